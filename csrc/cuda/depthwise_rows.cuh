// The three forms of what a thread owns along the last axis in contiguous layout; see depthwise_columns.cuh.
#pragma once

#include "depthwise_columns.cuh"

namespace fastconvt::cuda {

// Any stride, dilation and row length: 32-bit words.
template <typename T_, int kWindow_, int kTaps_, int kCount_>
struct WordColumns : RowColumns<T_, kWindow_, kTaps_, 4 / sizeof(T_), kCount_> {
  using T = T_;
  using Base = RowColumns<T_, kWindow_, kTaps_, 4 / sizeof(T_), kCount_>;
  using Base::first, Base::kCount, Base::kOutputs, Base::kPhase, Base::kTaps, Base::kVector, Base::p;
  static constexpr int kSide = kVector * kTaps;  // inputs of a word
  static constexpr int kInputs = kCount * kSide, kRaw = kInputs;
  static constexpr int kWeights = kVector * kPhase;
  static constexpr int kWarps = resident_warps(sizeof(T), Base::kWindow* kInputs + kRaw + kOutputs + kWeights, 42);

  int source[kSide];  // the input columns of the first word; far out of range where there is no tap
  const float* table[kVector];
  bool first_lane, last_lane;  // whose neighbours in the row are not in the warp

  __device__ WordColumns(const DepthwiseParams& params, const float* weights, int column, const T* row)
      : Base(params, column, row) {
    const AxisParams& axis = p.axis[2];
    int q, r = this->phase(q);
    const int lane = threadIdx.x & 31;
    first_lane = lane == 0 || column == 0;
    last_lane = lane == 31 || column == p.columns - 1;
#pragma unroll
    for (int v = 0; v < kVector; ++v) {
      const int tap = first_tap(axis, r);
      const int base = q + (axis.dilation == 1 ? 0 : axis.offset(r, tap));
#pragma unroll
      for (int i = 0; i < kTaps; ++i) {
        const bool exists = tap + i * axis.tap_step() < axis.kernel;
        source[v * kTaps + i] = exists ? base - i * axis.offset_step() : -(1 << 30);
      }
      table[v] = weights + Base::slot_of(p, r) * kPhase;
      if (++r == axis.stride) r = 0, ++q;
    }
  }

  __device__ static constexpr int input_of(int e, int i) { return e * kTaps + i; }
  __device__ static constexpr int weight_of(int e, int j, int i) { return e % kVector * kPhase + j * kTaps + i; }
  __device__ bool has_tap(int, int) const { return true; }

  __device__ void move_inputs(int columns) {
#pragma unroll
    for (int i = 0; i < kSide; ++i) source[i] += columns;
  }

  __device__ void load(const T* row, bool exists, T (&raw)[kRaw]) const {
    const unsigned limit = exists ? static_cast<unsigned>(p.axis[2].in) : 0;
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
#pragma unroll
      for (int i = 0; i < kSide; ++i) {
        const int at = source[i] + k * p.column_in;
        raw[k * kSide + i] = load_if<0>(static_cast<unsigned>(at) < limit, row + at);
      }
    }
  }

  __device__ void convert(const T (&raw)[kRaw], float (&x)[kInputs]) const {
#pragma unroll
    for (int i = 0; i < kRaw; ++i) x[i] = to_accumulator(raw[i]);
  }

  __device__ void load_weights(int place, float (&w)[kWeights]) const {
#pragma unroll
    for (int v = 0; v < kVector; ++v) load_floats<kPhase>(table[v] + place, w + v * kPhase);
  }

  // All lanes of a warp call it.
  __device__ void store(T* target, bool exists, const float (&sum)[kOutputs]) const {
    if constexpr (kVector == 2) {
      if (p.odd_rows) return store_realigned(target, exists, sum);
    }
    Base::store(target, exists, sum);
  }

  // Pairs of columns that may not begin at a word: then a thread stores its first with its left neighbour's second.
  __device__ void store_realigned(T* target, bool exists, const float (&sum)[kOutputs]) const {
    const bool odd = (reinterpret_cast<uintptr_t>(target) & 2) != 0;
    const unsigned limit = exists ? static_cast<unsigned>(p.axis[2].out) : 0;
#pragma unroll
    for (int k = 0; k < kCount; ++k, target += p.column_out) {
      const Pack<T, kVector> pack = Base::pack_of(sum, k);
      const unsigned word = reinterpret_cast<const unsigned&>(pack);
      const unsigned left = __shfl_up_sync(0xffffffff, word, 1);
      const unsigned place = static_cast<unsigned>(first + k * p.column_out);
      const bool first_exists = place < limit, second_exists = place + 1 < limit;
      if (!odd && first_exists && second_exists) {
        store_pack(target, pack);
      } else if (!odd) {
        Base::store_part(target, place, limit, pack);
      } else {
        if (first_exists && (first_lane || place == 0)) target[0] = pack.value[0];
        if (first_exists && !first_lane && place != 0) {
          __stcs(reinterpret_cast<unsigned*>(target - 1), __byte_perm(left, word, 0x5432));
        }
        if (second_exists && (last_lane || place + 2 >= limit)) target[kVector - 1] = pack.value[kVector - 1];
      }
    }
  }
};

// Vectors of 16 bytes, each of which reads a run of kSide inputs.
template <typename T_, int kWindow_, int kTaps_, int kCount_, int kSide_>
struct RunColumns : RowColumns<T_, kWindow_, kTaps_, 16 / sizeof(T_), kCount_> {
  using T = T_;
  using Base = RowColumns<T_, kWindow_, kTaps_, 16 / sizeof(T_), kCount_>;
  using Base::kCount, Base::p;
  static constexpr int kSide = kSide_, kRaw = kCount * kSide;

  int source;  // the first input column

  using Base::Base;

  __device__ void move_inputs(int columns) { source += columns; }

  __device__ void load(const T* row, bool exists, T (&raw)[kRaw]) const {
    const unsigned limit = exists ? static_cast<unsigned>(p.axis[2].in) : 0;
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      const int at = source + k * p.column_in;
      load_run<0, kSide>(row + at, at, limit, raw + k * kSide);
    }
  }
};

// Stride 2, dilation 1, kernel 2 * kTaps or one less, rows of whole vectors of 16 bytes, whose first columns are in
// phase kFirst. The columns of a vector share inputs, and all threads weights.
template <typename T_, int kWindow_, int kTaps_, int kCount_, int kFirst>
struct PairColumns : RunColumns<T_, kWindow_, kTaps_, kCount_, (kFirst + 16 / sizeof(T_) - 1) / 2 + kTaps_> {
  using T = T_;
  using Base = RunColumns<T_, kWindow_, kTaps_, kCount_, (kFirst + 16 / sizeof(T_) - 1) / 2 + kTaps_>;
  using Base::first, Base::kCount, Base::kOutputs, Base::kPhase, Base::kTaps, Base::kVector, Base::p;
  using Base::kRaw, Base::kSide, Base::source;
  static constexpr int kInputs = kRaw;
  static constexpr int kWeights = 2 * kPhase;
  static constexpr int kWarps = resident_warps(sizeof(T), Base::kWindow* kInputs + kRaw + kOutputs + kWeights, 42);

  const float* table;
  bool complete;  // the last phase has all taps

  __device__ PairColumns(const DepthwiseParams& params, const float* weights, int column, const T* row)
      : Base(params, column, row), table(weights) {
    source = (first + p.axis[2].padding - kFirst) / 2 - (kTaps - 1);
    complete = p.axis[2].kernel == 2 * kTaps;
  }

  __device__ static constexpr int input_of(int e, int i) {
    return e / kVector * kSide + (kFirst + e % kVector) / 2 + kTaps - 1 - i;
  }
  __device__ static constexpr int weight_of(int e, int j, int i) { return (kFirst + e) % 2 * kPhase + j * kTaps + i; }
  __device__ bool has_tap(int e, int i) const { return (kFirst + e) % 2 == 0 || i < kTaps - 1 || complete; }
  __device__ static int phase_at(const DepthwiseParams&, int slot) { return slot; }
  __device__ int place_size() const { return kWeights; }
  __device__ void convert(const T (&raw)[kRaw], float (&x)[kInputs]) const {
#pragma unroll
    for (int i = 0; i < kInputs; ++i) x[i] = to_accumulator(raw[i]);
  }

  __device__ void load_weights(int place, float (&w)[kWeights]) const { load_floats<kWeights>(table + place, w); }
};

// Stride kStride, or any from a vector's columns on if kStride is as many; dilation 1, rows of whole vectors of 16
// bytes. Their first columns are in any phase: columns that are so far from it that their base is the next one, the
// carried, take inputs one further. Columns that differ by the stride, a class, share inputs and weights.
template <typename T_, int kWindow_, int kTaps_, int kCount_, int kStride>
struct CarryColumns : RunColumns<T_, kWindow_, kTaps_, kCount_, (16 / sizeof(T_) + kStride - 1) / kStride + kTaps_> {
  using T = T_;
  using Base = RunColumns<T_, kWindow_, kTaps_, kCount_, (16 / sizeof(T_) + kStride - 1) / kStride + kTaps_>;
  using Base::kCount, Base::kOutputs, Base::kPhase, Base::kTaps, Base::kVector, Base::p;
  using Base::kRaw, Base::kSide, Base::source;
  static_assert(kStride <= kVector);
  static constexpr int kBases = (kVector + kStride - 1) / kStride;  // of a class
  static constexpr int kLine = kSide - 1;                           // inputs of a class
  static constexpr int kInputs = kCount * kStride * kLine;
  static constexpr int kWeights = kStride * kPhase;
  static constexpr int kWarps = resident_warps(sizeof(T), Base::kWindow* kInputs + kRaw + kOutputs + kWeights, 42);

  int first_phase;              // of the first column
  const float* table[kStride];  // of each class
  bool complete[kStride];       // whether its last tap exists

  __device__ CarryColumns(const DepthwiseParams& params, const float* weights, int column, const T* row)
      : Base(params, column, row) {
    const int stride = p.axis[2].stride;
    first_phase = this->phase(source);
    source -= kTaps - 1;
#pragma unroll
    for (int m = 0; m < kStride; ++m) {
      const int r = first_phase + m < stride ? first_phase + m : first_phase + m - stride;
      table[m] = weights + Base::slot_of(p, r) * kPhase;
      complete[m] = r + (kTaps - 1) * stride < p.axis[2].kernel;
    }
  }

  __device__ static constexpr int class_of(int e) { return e % kVector % kStride; }
  __device__ static constexpr int input_of(int e, int i) {
    return (e / kVector * kStride + class_of(e)) * kLine + e % kVector / kStride + kTaps - 1 - i;
  }
  __device__ static constexpr int weight_of(int e, int j, int i) { return class_of(e) * kPhase + j * kTaps + i; }
  // Where a class is one column, the input of a tap that does not exist is zero.
  __device__ bool has_tap(int e, int i) const { return kBases == 1 || i < kTaps - 1 || complete[class_of(e)]; }
  __device__ void convert(const T (&raw)[kRaw], float (&x)[kInputs]) const {
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      float line[kSide];
#pragma unroll
      for (int i = 0; i < kSide; ++i) line[i] = to_accumulator(raw[k * kSide + i]);
#pragma unroll
      for (int m = 0; m < kStride; ++m) {
        const bool carried = m > 0 && first_phase + m >= p.axis[2].stride;
#pragma unroll
        for (int i = 0; i < kLine; ++i) {
          const float value = carried ? line[i + 1] : line[i];
          x[(k * kStride + m) * kLine + i] = kBases == 1 && i == 0 && !complete[m] ? 0.f : value;
        }
      }
    }
  }

  __device__ void load_weights(int place, float (&w)[kWeights]) const {
#pragma unroll
    for (int m = 0; m < kStride; ++m) load_floats<kPhase>(table[m] + place, w + m * kPhase);
  }
};

}  // namespace fastconvt::cuda
