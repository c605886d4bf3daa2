// The gradient of depthwise layers with respect to the input, channels_last. A thread owns kVector channels of kCount
// columns of the input and marches along the height, from base to base: each row of the output's gradient adds to the
// kReach rows of the input that it reaches, whose sums it keeps. Along the last axis neighbours read the same columns,
// from the L1 cache. Weights lie in shared memory, the channel fastest.
#pragma once

#include "depthwise_input_gradient_params.cuh"

namespace fastconvt::cuda {

constexpr int depthwise_channel_count(int vector) { return vector > 1 ? 2 : 4; }

// What a block has in shared memory: floats [output channel of the group][tap][channel], and the tap of the height of
// each phase and row of the window, negative if there is none.
template <typename T>
__device__ __forceinline__ void fill_channel_table(const DepthwiseInputParams& p, int first_channel, int tile,
                                                   float* table, int* taps) {
  constexpr int kReach = kDepthwiseGradientReach;
  const AxisParams& height = p.axis[1];
  const int filter = p.axis[0].kernel * height.kernel * p.axis[2].kernel;
  const T* weight = static_cast<const T*>(p.weight) + static_cast<int64_t>(first_channel) * p.multiplier * filter;
  const int size = p.multiplier * filter * tile;
#pragma unroll 1
  for (int i = threadIdx.x; i < size; i += static_cast<int>(blockDim.x)) {  // in the order of memory
    int tap = i;
    const int channel = p.by_taps(tap);  // of the output
    const int own = channel / p.multiplier, multiple = channel - own * p.multiplier;
    const bool exists = first_channel + own < p.channels;
    table[(multiple * filter + tap) * tile + own] = exists ? to_accumulator(weight[i]) : 0.f;
  }
#pragma unroll 1
  for (int i = threadIdx.x; i < height.stride * kReach; i += static_cast<int>(blockDim.x)) {
    const int distance = i / kReach + i % kReach * height.stride, tap = distance / height.dilation;
    taps[i] = tap < height.kernel && tap * height.dilation == distance ? tap : -1;
  }
}

template <typename T, int kVector>
struct DepthwiseChannelSums {
  static constexpr int kCount = depthwise_channel_count(kVector), kReach = kDepthwiseGradientReach;
  float sum[kReach][kCount][kVector] = {};

  // A row of the output's gradient; `first` is its column, of each input, of tap 0. weights[w] is null where row w of
  // the window has no tap.
  __device__ __forceinline__ void add_row(const DepthwiseInputParams& p, const T* row, const int (&first)[kCount],
                                          const float* const (&weights)[kReach], int tile) {
    const AxisParams& width = p.axis[2];
    constexpr int kTaps = 4;  // added first, so that no chain of float32 sums is long
#pragma unroll 1
    for (int t = 0; t < width.kernel; t += kTaps) {
      Pack<T, kVector> grad[kTaps][kCount];
#pragma unroll
      for (int i = 0; i < kTaps * kCount; ++i) {
        const int tap = t + i / kCount, x = first[i % kCount] + tap * width.dilation;
        grad[i / kCount][i % kCount] = Pack<T, kVector>{};
        if (tap < width.kernel && static_cast<unsigned>(x) < static_cast<unsigned>(width.out)) {
          grad[i / kCount][i % kCount] = *reinterpret_cast<const Pack<T, kVector>*>(row + x * p.grad_column);
        }
      }
#pragma unroll
      for (int w = 0; w < kReach; ++w) {
        if (weights[w] == nullptr) continue;
        float part[kCount][kVector] = {};
#pragma unroll
        for (int i = 0; i < kTaps; ++i) {
          const int tap = min(t + i, width.kernel - 1);
          const auto weight = *reinterpret_cast<const Pack<float, kVector>*>(weights[w] + tap * tile);
#pragma unroll
          for (int e = 0; e < kCount * kVector; ++e) {
            part[e / kVector][e % kVector] +=
                weight.value[e % kVector] * to_accumulator(grad[i][e / kVector].value[e % kVector]);
          }
        }
#pragma unroll
        for (int e = 0; e < kCount * kVector; ++e) sum[w][e / kVector][e % kVector] += part[e / kVector][e % kVector];
      }
    }
  }

  // The oldest row leaves.
  __device__ __forceinline__ void shift() {
#pragma unroll
    for (int w = kReach - 1; w >= 0; --w) {
#pragma unroll
      for (int i = 0; i < kCount * kVector; ++i) {
        sum[w][i / kVector][i % kVector] = w > 0 ? sum[w > 0 ? w - 1 : 0][i / kVector][i % kVector] : 0.f;
      }
    }
  }
};

template <typename T, int kVector>
__device__ __forceinline__ void store_channels(const DepthwiseInputParams& p, int sample, int channel, int z, int y,
                                               int x, const float (&sum)[kVector]) {
  Pack<T, kVector> pack;
  bool finite = true;
#pragma unroll
  for (int v = 0; v < kVector; ++v) {
    pack.value[v] = from_accumulator<T>(sum[v]);
    finite = finite && is_finite(sum[v]);
  }
  T* target = static_cast<T*>(p.output) + sample * p.output_batch + z * p.output_plane +
              static_cast<int64_t>(y) * p.output_row + static_cast<int64_t>(x) * p.output_column + channel;
  if (finite) {
    *reinterpret_cast<Pack<T, kVector>*>(target) = pack;
    return;
  }
#pragma unroll 1
  for (int v = 0; v < kVector; ++v) target[v] = depthwise_input_gradient_at<T>(p, sample, channel + v, z, y, x);
}

template <typename T, int kVector>
__global__ void __launch_bounds__(kDepthwiseGradientThreads, 2)
    depthwise_input_gradient_channels_kernel(const __grid_constant__ DepthwiseInputParams p) {
  using Sums = DepthwiseChannelSums<T, kVector>;
  constexpr int kCount = Sums::kCount, kReach = kDepthwiseGradientReach;
  extern __shared__ __align__(16) float shared[];
  int* taps = reinterpret_cast<int*>(shared + p.table_size);
  const AxisParams &depth = p.axis[0], &height = p.axis[1], &width = p.axis[2];
  int part = static_cast<int>(blockIdx.x), vector = static_cast<int>(threadIdx.x);
  const int tile = p.vectors * kVector, first_channel = p.by_part(part) * tile;
  fill_channel_table<T>(p, first_channel, tile, shared, taps);
  __syncthreads();
  const int column = p.by_vectors(vector), channel = first_channel + vector * kVector;
  if (channel >= p.channels || column >= p.thread_columns) return;
  const int end = min(p.units, (part + 1) * p.units_of_part);
#pragma unroll 1
  for (int unit = part * p.units_of_part; unit < end; ++unit) {
    int x = unit, rest = p.by_column(x), segment = rest;
    rest = p.by_row(segment);
    int z = rest;
    const int sample = p.by_plane(z);
    x = x * p.thread_columns * kCount + column;
    const int begin_y = segment * p.march, end_y = min(begin_y + p.march, static_cast<int>(height.in));
    int first[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {  // inputs that do not exist read nothing
      const int own = x + i * p.thread_columns;
      first[i] = own < width.in ? own * width.stride - width.padding : 1 << 30;
    }
    const T* grad = static_cast<const T*>(p.grad) + sample * p.grad_batch + channel * p.multiplier;
    Sums sums;
#pragma unroll 1
    for (int base = begin_y; base < end_y + kReach - 1; ++base) {
#pragma unroll 1
      for (int phase = 0; phase < height.stride; ++phase) {
        const int y = base * height.stride + phase - height.padding;
        int tap[kReach], any = -1;
#pragma unroll
        for (int w = 0; w < kReach; ++w) {
          tap[w] = base - w >= begin_y && base - w < end_y ? taps[phase * kReach + w] : -1;
          any = max(any, tap[w]);
        }
        if (any < 0 || static_cast<unsigned>(y) >= static_cast<unsigned>(height.out)) continue;
#pragma unroll 1
        for (int i = 0; i < p.multiplier * depth.kernel; ++i) {
          const int multiple = i / depth.kernel;
          const int gz = z * depth.stride - depth.padding + (i - multiple * depth.kernel) * depth.dilation;
          if (static_cast<unsigned>(gz) >= static_cast<unsigned>(depth.out)) continue;
          const float* weights[kReach];
#pragma unroll
          for (int w = 0; w < kReach; ++w) {
            weights[w] =
                tap[w] < 0 ? nullptr : shared + (i * height.kernel + tap[w]) * width.kernel * tile + vector * kVector;
          }
          sums.add_row(p, grad + (gz * p.grad_plane + static_cast<int64_t>(y) * p.grad_row + multiple), first, weights,
                       tile);
        }
      }
      if (base - (kReach - 1) >= begin_y) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
          if (x + i * p.thread_columns < width.in) {
            store_channels<T, kVector>(p, sample, channel, z, base - (kReach - 1), x + i * p.thread_columns,
                                       sums.sum[kReach - 1][i]);
          }
        }
      }
      sums.shift();
    }
  }
}

}  // namespace fastconvt::cuda
