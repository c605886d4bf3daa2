// The gradient of rows (1D and 2D) with respect to the bias: the sum of each channel of the output's gradient.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>

#include "../core/rows_gradient.h"
#include "device/numeric.cuh"
#include "params.h"

namespace fastconvt::cuda {

// A channel is summed in slices with fixed owners.
struct BiasGradientParams {
  const void* grad;
  double* partial;  // (channels, slices)
  void* output;
  int64_t batch_stride, channel_stride, position_stride;
  int64_t batch, positions;
  int channels;
  int batch_slices, position_slices;
};

constexpr int kBiasThreads = 256;

// A block sums kLanesOfChannels channels, side by side, of one slice. Contiguous rows: 1; channels_last: 32.
template <typename T, int kLanesOfChannels>
__global__ void __launch_bounds__(kBiasThreads) bias_gradient_kernel(const __grid_constant__ BiasGradientParams p) {
  constexpr int kShares = kBiasThreads / kLanesOfChannels;
  __shared__ double sums[kBiasThreads];
  int64_t index = blockIdx.x;
  const int position_slice = static_cast<int>(index % p.position_slices);
  index /= p.position_slices;
  const int batch_slice = static_cast<int>(index % p.batch_slices);
  const int64_t channel = index / p.batch_slices * kLanesOfChannels + threadIdx.x % kLanesOfChannels;
  const int share = threadIdx.x / kLanesOfChannels;
  const int64_t begin = p.positions * position_slice / p.position_slices;
  const int64_t end = p.positions * (position_slice + 1) / p.position_slices;
  double sums_of_thread[4] = {};
  if (channel < p.channels) {
    for (int64_t n = batch_slice; n < p.batch; n += p.batch_slices) {
      const T* grad = static_cast<const T*>(p.grad) + n * p.batch_stride + channel * p.channel_stride;
      int64_t position = begin + share;
      for (; position + 7 * kShares < end; position += 8 * kShares) {
        float value[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) value[i] = to_accumulator(grad[(position + i * kShares) * p.position_stride]);
#pragma unroll
        for (int i = 0; i < 8; ++i) sums_of_thread[i % 4] += value[i];
      }
      for (; position < end; position += kShares)
        sums_of_thread[0] += to_accumulator(grad[position * p.position_stride]);
    }
  }
  sums[threadIdx.x] = (sums_of_thread[0] + sums_of_thread[1]) + (sums_of_thread[2] + sums_of_thread[3]);
  __syncthreads();
  for (int half = kShares / 2; half > 0; half /= 2) {
    if (share < half) sums[threadIdx.x] += sums[threadIdx.x + half * kLanesOfChannels];
    __syncthreads();
  }
  if (share == 0 && channel < p.channels) {
    p.partial[(channel * p.batch_slices + batch_slice) * p.position_slices + position_slice] = sums[threadIdx.x];
  }
}

template <typename T>
__global__ void __launch_bounds__(kBiasThreads) bias_reduction_kernel(const __grid_constant__ BiasGradientParams p) {
  const int channel = blockIdx.x * kBiasThreads + threadIdx.x;
  if (channel >= p.channels) return;
  const int slices = p.batch_slices * p.position_slices;
  double sum = 0;
#pragma unroll 8
  for (int i = 0; i < slices; ++i) sum += p.partial[static_cast<int64_t>(channel) * slices + i];
  static_cast<T*>(p.output)[channel] = from_accumulator<T>(static_cast<float>(sum));
}

inline BiasGradientParams make_bias_params(const Problem& problem, const void* grad_output, void* grad_bias,
                                           void* workspace) {
  constexpr int64_t kBlocks = 2048, kMaxSlices = 1024;
  BiasGradientParams p{};
  const Strides strides = output_strides(problem);
  p.grad = grad_output;
  p.partial = static_cast<double*>(workspace);
  p.output = grad_bias;
  p.batch_stride = strides.batch;
  p.channel_stride = strides.channel;
  p.position_stride = strides.axis[2];  // rows follow each other
  p.batch = problem.batch;
  p.positions = problem.out_positions();
  p.channels = static_cast<int>(problem.out_channels);
  const int64_t blocks = ceil_div(p.channels, problem.layout == Layout::kChannelsLast ? 32 : 1);
  const int64_t slices = std::min(kMaxSlices, ceil_div(kBlocks, blocks));
  p.batch_slices = static_cast<int>(std::min(p.batch, slices));
  p.position_slices = static_cast<int>(std::min(ceil_div(slices, p.batch_slices), ceil_div(p.positions, 2048)));
  return p;
}

template <typename T>
cudaError_t launch_bias(const Problem& problem, const BiasGradientParams& p, cudaStream_t stream) {
  const int64_t slices = int64_t{p.batch_slices} * p.position_slices;
  if (problem.layout == Layout::kChannelsLast) {
    const int64_t blocks = slices * ceil_div(p.channels, 32);
    bias_gradient_kernel<T, 32><<<static_cast<unsigned>(blocks), kBiasThreads, 0, stream>>>(p);
  } else {
    bias_gradient_kernel<T, 1><<<static_cast<unsigned>(slices * p.channels), kBiasThreads, 0, stream>>>(p);
  }
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) return error;
  const int64_t blocks = ceil_div(p.channels, kBiasThreads);
  bias_reduction_kernel<T><<<static_cast<unsigned>(blocks), kBiasThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace fastconvt::cuda
