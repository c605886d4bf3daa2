// What a thread of the depthwise kernels owns in channels_last; see depthwise_columns.cuh.
#pragma once

#include "depthwise_columns.cuh"

namespace fastconvt::cuda {

// kVector channels of kCount columns that are a stride apart, so that they are in one phase and their bases are
// neighbours. kTaps is how many columns an output may reach; those without a tap are skipped.
template <typename T_, int kWindow_, int kTaps_, int kCount, int kVector>
struct ChannelColumns {
  using T = T_;
  using Raw = Pack<T, kVector>;
  static constexpr bool kChannels = true;
  static constexpr int kWindow = kWindow_, kTaps = kTaps_;
  static constexpr int kRaw = kCount + kTaps - 1;
  static constexpr int kInputs = kRaw * kVector, kHeld = kInputs * sizeof(T) / 4;
  static constexpr int kOutputs = kCount * kVector;
  static constexpr int kWeights = kTaps * kVector;  // of one row of the window
  static constexpr int kThreads = 256;
  static constexpr int kWarps =
      resident_warps(sizeof(T), kWindow* kInputs + kHeld + kOutputs + kWeights, kVector == 1 ? 45 : 52);

  const DepthwiseParams& p;
  const float* table;
  int first;   // of the thread's columns, as an output
  int source;  // its first input column
  int vector;  // its first channel in the tile
  bool whole;  // all columns exist
  bool tap[kTaps];

  __device__ ChannelColumns(const DepthwiseParams& params, const float* weights, int column, const T*) : p(params) {
    // First the outputs 0 .. stride - 1 of a group, so that rows begin where memory does.
    vector = column;
    first = p.by_vectors(vector);
    const int group = p.by_stride(first);
    vector *= kVector;
    const AxisParams& axis = p.axis[2];
    int r = first + axis.padding;
    source = p.by_stride(r) + group * kCount - (kTaps - 1);
    first += group * kCount * axis.stride;
    whole = first + (kCount - 1) * axis.stride < axis.out;
#pragma unroll
    for (int i = 0; i < kTaps; ++i) tap[i] = tap_at(p, 2, r, i) >= 0;
    table = weights + r * p.slot_pitch + vector;
  }

  __device__ static constexpr int input_of(int e, int i) {
    return (e / kVector + kTaps - 1 - i) * kVector + e % kVector;
  }
  __device__ static constexpr int weight_of(int e, int, int i) { return i * kVector + e % kVector; }
  __device__ bool has_tap(int, int i) const { return tap[i]; }
  __device__ int place_size() const { return p.axis[2].stride * p.slot_pitch; }
  __device__ ExactColumns exact() const { return {first, vector, kVector, kCount, p.axis[2].stride, true}; }
  __device__ int out_offset() const { return first * p.channels + vector; }
  __device__ int channel() const { return vector; }
  __device__ void move_inputs(int) {}
  __device__ void move_outputs(int) {}

  __device__ void load(const T* row, bool exists, Raw (&raw)[kRaw]) const {
    const unsigned limit = exists ? static_cast<unsigned>(p.axis[2].in) : 0;
    const int offset = source * p.channels + vector;
#pragma unroll
    for (int i = 0; i < kRaw; ++i) {
      Raw x{};
      if (static_cast<unsigned>(source + i) < limit) x = load_pack(row + (offset + i * p.channels));
      raw[i] = x;
    }
  }

  __device__ static Raw load_pack(const T* from) {
    Raw pack;
    if constexpr (sizeof(Raw) == 16) {
      reinterpret_cast<uint4&>(pack) = __ldg(reinterpret_cast<const uint4*>(from));
    } else if constexpr (sizeof(Raw) == 8) {
      reinterpret_cast<uint2&>(pack) = __ldg(reinterpret_cast<const uint2*>(from));
    } else {
      pack.value[0] = __ldg(from);
    }
    return pack;
  }

  __device__ void convert(const Raw (&raw)[kRaw], float (&x)[kInputs]) const {
#pragma unroll
    for (int i = 0; i < kRaw; ++i) {
#pragma unroll
      for (int c = 0; c < kVector; ++c) x[i * kVector + c] = to_accumulator(raw[i].value[c]);
    }
  }

  __device__ void load_weights(int place, int j, float (&w)[kWeights]) const {
#pragma unroll
    for (int i = 0; i < kTaps; ++i) {
      load_floats<kVector>(table + place + (j * kTaps + i) * p.channel_tile, w + i * kVector);
    }
  }

  __device__ void init(const float* bias, float (&sum)[kOutputs]) const {
    float term[kVector];
    load_floats<kVector>(bias + vector, term);
#pragma unroll
    for (int e = 0; e < kOutputs; ++e) sum[e] = term[e % kVector];
  }

  __device__ void store(T* target, bool exists, const float (&sum)[kOutputs]) const {
    const unsigned limit = static_cast<unsigned>(p.axis[2].out);
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      Raw pack;
#pragma unroll
      for (int c = 0; c < kVector; ++c) pack.value[c] = from_accumulator<T>(sum[k * kVector + c]);
      if (exists && (whole || static_cast<unsigned>(first + k * p.axis[2].stride) < limit)) store_pack(target, pack);
      target += p.axis[2].stride * p.channels;
    }
  }
};

}  // namespace fastconvt::cuda
