// Partial sums of the weight's gradient come together, and take the layout of the weight.
#pragma once

#include "device/dependent_launch.cuh"
#include "device/numeric.cuh"
#include "gemm_weight_gradient_params.h"

namespace fastconvt::cuda {

// One element by the definition, where infinity and NaN meet only what they should.
template <typename T>
__device__ __noinline__ float gemm_weight_gradient_at(const GemmWeightReduction& p, int row, int channel, int tap) {
  const int group = row / p.group_in, width = p.axis[2].kernel, height = p.axis[1].kernel;
  const int taps[3] = {tap / width / height, tap / width % height, tap % width};
  const T* const grad =
      static_cast<const T*>(p.grad) + (static_cast<int64_t>(group) * p.group_out + channel) * p.out.channel;
  const T* const input = static_cast<const T*>(p.input) + row * p.in.channel;
  double sum = 0;
  for (int64_t n = 0; n < p.batch; ++n) {
    for (int64_t z = 0; z < p.axis[0].in; ++z) {
      const int64_t at_z = z * p.axis[0].stride + taps[0] * p.axis[0].dilation - p.axis[0].padding;
      if (at_z < 0 || at_z >= p.axis[0].out) continue;
      for (int64_t y = 0; y < p.axis[1].in; ++y) {
        const int64_t at_y = y * p.axis[1].stride + taps[1] * p.axis[1].dilation - p.axis[1].padding;
        if (at_y < 0 || at_y >= p.axis[1].out) continue;
        const T* const gradients = grad + n * p.out.batch + at_z * p.out.axis[0] + at_y * p.out.axis[1];
        const T* const inputs = input + n * p.in.batch + z * p.in.axis[0] + y * p.in.axis[1];
        for (int64_t x = 0; x < p.axis[2].in; ++x) {
          const int64_t at_x = x * p.axis[2].stride + taps[2] * p.axis[2].dilation - p.axis[2].padding;
          if (at_x < 0 || at_x >= p.axis[2].out) continue;
          sum += static_cast<double>(to_accumulator(gradients[at_x * p.out.axis[2]])) *
                 static_cast<double>(to_accumulator(inputs[x * p.in.axis[2]]));
        }
        if (sum != sum) return static_cast<float>(sum);  // NaN stays
      }
    }
  }
  return static_cast<float>(sum);
}

// The same of the bias.
template <typename T>
__device__ __noinline__ float gemm_bias_gradient_at(const GemmWeightReduction& p, int channel) {
  double sum = 0;
  for (int64_t n = 0; n < p.batch; ++n) {
    const T* const grad = static_cast<const T*>(p.grad) + n * p.out.batch + channel * p.out.channel;
    for (int64_t i = 0; i < p.out_positions; ++i) sum += static_cast<double>(to_accumulator(grad[i * p.out.axis[2]]));
  }
  return static_cast<float>(sum);
}

constexpr int kGemmWeightReduceThreads = 256;
constexpr int kGemmWeightReduceSums = 4096;  // of a block at most

// The bias of 32 channels.
template <typename T>
__device__ __forceinline__ void reduce_bias(const GemmWeightReduction& p, int block, float* sums) {
  constexpr int kShares = kGemmWeightReduceThreads / 32;
  const int channel = block * 32 + static_cast<int>(threadIdx.x) % 32, share = threadIdx.x / 32;
  float sum = 0;
  if (channel < p.out_channels) {
    const int group = channel / p.group_out, in_group = channel - group * p.group_out;
    const int channel_block = in_group / p.width, first = channel_block * p.taps.divisor;
    const int64_t pitch = static_cast<int64_t>(p.slot_blocks) * kGemmWeightBiasBlocks * p.width;
    const float* const from = p.bias_partial + group * pitch + in_group % p.width;
    for (int slot_block = first / p.slots; slot_block <= (first + p.taps.divisor - 1) / p.slots; ++slot_block) {
      const int place = slot_block * kGemmWeightBiasBlocks + channel_block - slot_block * p.slots / p.taps.divisor;
#pragma unroll 8
      for (int part = share; part < p.parts; part += kShares) {
        sum += __ldcg(from + part * (p.out_channels / p.group_out) * pitch + static_cast<int64_t>(place) * p.width);
      }
    }
  }
  sums[threadIdx.x] = sum;
  __syncthreads();
  if (share > 0 || channel >= p.out_channels) return;
  for (int i = 1; i < kShares; ++i) sum += sums[i * 32 + threadIdx.x];
  if (!is_finite(sum)) sum = gemm_bias_gradient_at<T>(p, channel);
  static_cast<T*>(p.bias)[channel] = from_accumulator<T>(sum);
}

// A block makes all taps of p.channels output channels of p.rows input channels; `shares` threads share the splits.
template <typename T>
__global__ void __launch_bounds__(kGemmWeightReduceThreads)
    gemm_weight_reduction_kernel(const __grid_constant__ GemmWeightReduction p) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  __shared__ float4 sums[kGemmWeightReduceThreads];
  __shared__ float turned[kGemmWeightReduceSums];
  let_next_grid_begin();
  int rest = static_cast<int>(blockIdx.x);
  if (rest >= p.weight_blocks) {
    wait_for_previous_grid();
    reduce_bias<T>(p, rest - p.weight_blocks, turned);
    return;
  }
  const int first_row = p.channel_blocks(rest) * p.rows, first = rest * p.channels;
  const int rows = min(p.rows, p.all_rows - first_row);
  const int count = rows * p.vectors.divisor * p.taps.divisor;
  const int channels = min(p.channels, p.group_out - first), pitch = p.taps.divisor | 1;
  const int per_share = kGemmWeightReduceThreads / p.shares;
  const int share = threadIdx.x / per_share, lane = threadIdx.x % per_share;
  wait_for_previous_grid();
#pragma unroll 1
  for (int begin = 0; begin < count; begin += 4 * per_share) {
    float4 sum[4];
    int place[4];
    const float* from[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int unit = begin + i * per_share + lane;
      int vector = unit, tap = p.vectors(vector);
      const int row = p.taps(tap);
      const bool exists = unit < count && first + vector * 4 < p.weight_pitch;
      place[i] = exists ? (row * p.channels + vector * 4) * pitch + tap : -1;
      from[i] = p.partial + (static_cast<int64_t>(first_row + row) * p.taps.divisor + tap) * p.weight_pitch + first +
                vector * 4;
      sum[i] = make_float4(0, 0, 0, 0);
    }
#pragma unroll 2
    for (int split = share; split < p.splits; split += p.shares) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (place[i] < 0) continue;
        const float4 part = __ldcg(reinterpret_cast<const float4*>(from[i] + split * p.part));
        sum[i].x += part.x, sum[i].y += part.y, sum[i].z += part.z, sum[i].w += part.w;
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (p.shares > 1) {
        sums[threadIdx.x] = sum[i];
        __syncthreads();
        if (share == 0) {
          for (int k = 1; k < p.shares; ++k) {
            const float4 part = sums[k * per_share + lane];
            sum[i].x += part.x, sum[i].y += part.y, sum[i].z += part.z, sum[i].w += part.w;
          }
        }
        __syncthreads();
      }
      if (share > 0 || place[i] < 0) continue;
      const float values[4] = {sum[i].x, sum[i].y, sum[i].z, sum[i].w};
#pragma unroll
      for (int k = 0; k < 4; ++k) turned[place[i] + k * pitch] = values[k];
    }
  }
  __syncthreads();
  const int all = channels * p.taps.divisor;
  for (int row = 0; row < rows; ++row) {
    T* const output = static_cast<T*>(p.output) + static_cast<int64_t>(first_row + row) * p.group_out * p.taps.divisor;
    for (int i = threadIdx.x; i < all; i += kGemmWeightReduceThreads) {
      int channel, tap;
      if (p.channels_last) {
        tap = i / channels, channel = i - tap * channels;
      } else {
        tap = i, channel = p.taps(tap);
      }
      float value = turned[(row * p.channels + channel) * pitch + tap];
      if (!is_finite(value)) value = gemm_weight_gradient_at<T>(p, first_row + row, first + channel, tap);
      const int64_t to = p.channels_last ? static_cast<int64_t>(tap) * p.group_out + first + channel
                                         : static_cast<int64_t>(first) * p.taps.divisor + i;
      output[to] = from_accumulator<T>(value);
    }
  }
#endif
}

}  // namespace fastconvt::cuda
