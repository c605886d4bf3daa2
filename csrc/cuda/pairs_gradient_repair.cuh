// Elements of the gradients by the definition, in float64, where infinity and NaN meet only what they should.
#pragma once

#include "device/numeric.cuh"
#include "pairs_gradient_params.h"

namespace fastconvt::cuda {

template <typename T>
__device__ __noinline__ T pairs_input_gradient_at(const PairsGradientParams& p, int n, int channel, int z, int y,
                                                  int x) {
  const int at[3] = {z, y, x};
  int begin[3], end[3], from[3];  // taps that meet outputs; the output of tap 0
#pragma unroll
  for (int a = 0; a < 3; ++a) {
    from[a] = at[a] * p.axis[a].stride - p.axis[a].padding;
    begin[a] = max(0, -from[a]);
    end[a] = static_cast<int>(min(static_cast<int64_t>(p.axis[a].kernel), p.axis[a].out - from[a]));
  }
  const T* const grad = static_cast<const T*>(p.grad_output) + n * p.out.batch;
  const T* const weight = static_cast<const T*>(p.weight) + static_cast<int64_t>(channel) * p.inner;
  const int height = p.axis[1].kernel, width = p.axis[2].kernel, taps = p.axis[0].kernel * height * width;
  double sum = 0;
#pragma unroll 1
  for (int c = 0; c < p.out_channels && sum == sum; ++c) {  // NaN stays
#pragma unroll 1
    for (int i = begin[0]; i < end[0]; ++i) {
#pragma unroll 1
      for (int j = begin[1]; j < end[1]; ++j) {
        const T* const row = grad + c * p.out.channel + (from[0] + i) * p.out.axis[0] + (from[1] + j) * p.out.axis[1];
        const T* const factors = weight + static_cast<int64_t>(c) * taps + (i * height + j) * width;
        for (int k = begin[2]; k < end[2]; ++k) {
          sum +=
              static_cast<double>(to_accumulator(row[from[2] + k])) * static_cast<double>(to_accumulator(factors[k]));
        }
      }
    }
  }
  return from_accumulator<T>(static_cast<float>(sum));
}

// Element `index` of an input channel's row of the weight.
template <typename T>
__device__ __forceinline__ T sum_pairs_weight_gradient(const PairsGradientParams& p, int channel, int index) {
  const int height = p.axis[1].kernel, width = p.axis[2].kernel;
  const int taps[3] = {index / (height * width) % p.axis[0].kernel, index / width % height, index % width};
  const int out_channel = index / (p.axis[0].kernel * height * width);
  const T* const grad = static_cast<const T*>(p.grad_output) + out_channel * p.out.channel;
  const T* const input = static_cast<const T*>(p.input) + channel * p.in.channel;
  double sum = 0;
  for (int64_t n = 0; n < p.batch; ++n) {
    for (int64_t z = 0; z < p.axis[0].in; ++z) {
      const int64_t at_z = z * p.axis[0].stride + taps[0] - p.axis[0].padding;
      if (at_z < 0 || at_z >= p.axis[0].out) continue;
      for (int64_t y = 0; y < p.axis[1].in; ++y) {
        const int64_t at_y = y * p.axis[1].stride + taps[1] - p.axis[1].padding;
        if (at_y < 0 || at_y >= p.axis[1].out) continue;
        const T* const gradients = grad + n * p.out.batch + at_z * p.out.axis[0] + at_y * p.out.axis[1];
        const T* const inputs = input + n * p.in.batch + z * p.in.axis[0] + y * p.in.axis[1];
        for (int64_t x = 0; x < p.axis[2].in; ++x) {
          const int64_t at_x = x * p.axis[2].stride + taps[2] - p.axis[2].padding;
          if (at_x < 0 || at_x >= p.axis[2].out) continue;
          sum += static_cast<double>(to_accumulator(gradients[at_x])) * static_cast<double>(to_accumulator(inputs[x]));
        }
        if (sum != sum) return from_accumulator<T>(static_cast<float>(sum));  // NaN stays
      }
    }
  }
  return from_accumulator<T>(static_cast<float>(sum));
}

template <typename T>
__device__ __noinline__ T pairs_weight_gradient_at(const PairsGradientParams& p, int channel, int index) {
  return sum_pairs_weight_gradient<T>(p, channel, index);
}

// By a warp.
template <typename T>
__device__ __noinline__ T pairs_bias_gradient_at(const PairsGradientParams& p, int channel) {
  double sum = 0;
  for (int64_t n = 0; n < p.batch; ++n) {
    const T* const grad = static_cast<const T*>(p.grad_output) + n * p.out.batch + channel * p.out.channel;
    for (int64_t i = threadIdx.x % 32; i < p.out.channel; i += 32) sum += static_cast<double>(to_accumulator(grad[i]));
  }
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
  return from_accumulator<T>(static_cast<float>(sum));
}

}  // namespace fastconvt::cuda
