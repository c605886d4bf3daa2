// What a thread of the depthwise kernels owns along the last axis: what all forms share, and loads and stores.
//
// A form tells how many outputs, inputs and weights the thread holds (kOutputs; kInputs of a row of the window;
// kWeights of a phase of depth and height), which input and weight meet in which output (input_of, weight_of; has_tap
// if they do), and loads (load, convert, load_weights) and stores them. Inputs that do not exist are loaded as zeros.
#pragma once

#include "depthwise_params.h"
#include "device/numeric.cuh"

namespace fastconvt::cuda {

// The tap of phase r of an axis that reads `distance` inputs before the base; -1 if there is none.
__device__ inline int tap_at(const DepthwiseParams& p, int axis, int r, int distance) {
  int rest = r + distance * p.axis[axis].stride;
  const int t = p.by_dilation[axis](rest);
  return rest == 0 && t < p.axis[axis].kernel ? t : -1;
}

__device__ inline int first_tap(const AxisParams& axis, int r) { return axis.dilation == 1 ? r : axis.first_tap(r); }

// Warps of a multiprocessor for threads that keep so many values at once, of elements of `size` bytes. Beyond `most`,
// 80 registers do not hold them.
constexpr int resident_warps(int size, int values, int most) {
  if (size == 2) values += 4;
  return values <= 29 ? 32 : values <= most ? 24 : values <= 60 ? 20 : 16;
}

// kCount floats from shared memory, in the widest accesses that their alignment allows.
template <int kCount>
__device__ inline void load_floats(const float* from, float* to) {
  constexpr int kWide = kCount % 4 == 0 ? 4 : kCount % 2 == 0 ? 2 : 1;
#pragma unroll
  for (int i = 0; i < kCount; i += kWide) {
    const auto pack = *reinterpret_cast<const Pack<float, kWide>*>(from + i);
#pragma unroll
    for (int j = 0; j < kWide; ++j) to[i + j] = pack.value[j];
  }
}

// from[offset] if `exists`, else zero, in one predicated instruction: the compiler would compute an address for each.
template <int offset>
__device__ inline float load_if(bool exists, const float* from) {
  float x;
  asm("{.reg .pred p; setp.ne.s32 p, %2, 0; mov.f32 %0, 0f00000000; @p ld.global.nc.f32 %0, [%1+%3];}"
      : "=f"(x)
      : "l"(from), "r"(static_cast<int>(exists)), "n"(offset * 4));
  return x;
}
template <int offset, typename T>
__device__ inline T load_if(bool exists, const T* from) {
  static_assert(sizeof(T) == 2);
  unsigned short x;
  asm("{.reg .pred p; setp.ne.s32 p, %2, 0; mov.u16 %0, 0; @p ld.global.nc.u16 %0, [%1+%3];}"
      : "=h"(x)
      : "l"(from), "r"(static_cast<int>(exists)), "n"(offset * 2));
  return reinterpret_cast<const T&>(x);
}

// Inputs first .. kCount - 1 of a run that begins at column `at`; those outside of 0 .. limit - 1 are zeros.
template <int first, int kCount, typename T>
__device__ __forceinline__ void load_run(const T* from, int at, unsigned limit, T* to) {
  if constexpr (first < kCount) {
    to[first] = load_if<first>(static_cast<unsigned>(at + first) < limit, from);
    load_run<first + 1, kCount>(from, at, limit, to);
  }
}

template <typename T, int kVector>
__device__ inline void store_pack(T* target, const Pack<T, kVector>& pack) {
  constexpr int kBytes = sizeof(T) * kVector;
  if constexpr (kBytes == 16) {
    __stcs(reinterpret_cast<uint4*>(target), reinterpret_cast<const uint4&>(pack));
  } else if constexpr (kBytes == 8) {
    __stcs(reinterpret_cast<uint2*>(target), reinterpret_cast<const uint2&>(pack));
  } else if constexpr (kVector == 1) {
    __stcs(target, pack.value[0]);
  } else {
    __stcs(reinterpret_cast<unsigned*>(target), reinterpret_cast<const unsigned&>(pack));
  }
}

// A thread's outputs of a row, as plain numbers: `count` vectors, `step` columns apart, of columns or channels.
struct ExactColumns {
  int first, channel, vector, count, step;
  bool channels;
};

// Contiguous layout: kCount vectors of kVector columns side by side, p.column_out columns apart.
template <typename T_, int kWindow_, int kTaps_, int kVector_, int kCount_>
struct RowColumns {
  using T = T_;
  using Raw = T;
  static constexpr bool kChannels = false;
  static constexpr int kThreads = kDepthwiseRowThreads;
  static constexpr int kWindow = kWindow_, kTaps = kTaps_, kVector = kVector_, kCount = kCount_;
  static constexpr int kOutputs = kCount * kVector;
  static constexpr int kPhase = kWindow * kTaps;  // weights of a phase of the last axis

  const DepthwiseParams& p;
  int first;   // the thread's first column, as an output
  bool whole;  // all columns exist

  // `row` is where the outputs of a row begin.
  __device__ RowColumns(const DepthwiseParams& params, int column, const T* row) : p(params) {
    first = column * kVector - static_cast<int>((reinterpret_cast<uintptr_t>(row) / sizeof(T)) & (p.align - 1));
    move_outputs(0);
  }

  // To tiles further along the last axis.
  __device__ void move_outputs(int columns) {
    first += columns;
    whole = first >= 0 && first + (kCount - 1) * p.column_out + kVector <= p.axis[2].out;
  }

  // The phase of the first column, and its base.
  __device__ int phase(int& base) const {
    int r = first + p.axis[2].padding + p.align_columns, rest = p.align_columns;
    base = p.by_stride(r);
    base -= p.by_stride(rest);
    return r;
  }

  // Where the table has phase r of the last axis: lanes with vectors side by side read places side by side.
  __device__ static int slot_of(const DepthwiseParams& p, int r) { return r % kVector * p.slot_pitch + r / kVector; }
  __device__ static int phase_at(const DepthwiseParams& p, int slot) {
    const int v = p.by_slot_pitch(slot);
    return slot * kVector + v;
  }
  __device__ int place_size() const { return p.num_slots * kPhase; }

  __device__ ExactColumns exact() const { return {first, 0, kVector, kCount, p.column_out, false}; }
  __device__ int out_offset() const { return first; }
  __device__ int channel() const { return 0; }

  __device__ void init(const float* bias, float (&sum)[kOutputs]) const {
#pragma unroll
    for (int e = 0; e < kOutputs; ++e) sum[e] = *bias;
  }

  __device__ static Pack<T, kVector> pack_of(const float (&sum)[kOutputs], int k) {
    Pack<T, kVector> pack;
#pragma unroll
    for (int v = 0; v < kVector; ++v) pack.value[v] = from_accumulator<T>(sum[k * kVector + v]);
    return pack;
  }

  // Of a vector at column `place`, what exists.
  __device__ static void store_part(T* target, unsigned place, unsigned limit, const Pack<T, kVector>& pack) {
#pragma unroll
    for (int v = 0; v < kVector; ++v) {
      if (place + v < limit) target[v] = pack.value[v];
    }
  }

  // `target` is the place of the thread's first column.
  __device__ void store(T* target, bool exists, const float (&sum)[kOutputs]) const {
    if (!exists) return;
#pragma unroll
    for (int k = 0; k < kCount; ++k, target += p.column_out) {
      const Pack<T, kVector> pack = pack_of(sum, k);
      if (kVector > 1 && whole) {
        store_pack(target, pack);
      } else {
        store_part(target, first + k * p.column_out, static_cast<unsigned>(p.axis[2].out), pack);
      }
    }
  }
};

}  // namespace fastconvt::cuda
