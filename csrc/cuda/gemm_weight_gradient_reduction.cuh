// Partial sums of the weight's gradient come together, and take the layout of the weight.
#pragma once

#include "device/dependent_launch.cuh"
#include "device/numeric.cuh"
#include "gemm_weight_gradient_store.cuh"

namespace fastconvt::cuda {

// The bias of a channel by the definition.
template <typename T>
__device__ __noinline__ float gemm_bias_gradient_at(const GemmWeightDefinition& p, int64_t positions, int channel) {
  double sum = 0;
  for (int64_t n = 0; n < p.batch; ++n) {
    const T* const grad = static_cast<const T*>(p.grad) + n * p.out.batch + channel * p.out.channel;
    for (int64_t i = 0; i < positions; ++i) sum += static_cast<double>(to_accumulator(grad[i * p.out.axis[2]]));
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
  for (int i = 0; channel < p.out_channels && i < p.merged; ++i) {
    const int all = i * p.out_channels + channel, group = all / p.group_out, in_group = all - group * p.group_out;
    const int channel_block = in_group / p.width, first = channel_block * p.taps.divisor;
    const int64_t pitch = static_cast<int64_t>(p.slot_blocks) * kGemmWeightBiasBlocks * p.width;
    const float* const from = p.bias_partial + group * pitch + in_group % p.width;
    for (int slot_block = first / p.slots; slot_block <= (first + p.taps.divisor - 1) / p.slots; ++slot_block) {
      const int place = slot_block * kGemmWeightBiasBlocks + channel_block - slot_block * p.slots / p.taps.divisor;
#pragma unroll 8
      for (int part = share; part < p.parts; part += kShares) {
        sum += __ldcg(from + part * p.groups * pitch + static_cast<int64_t>(place) * p.width);
      }
    }
  }
  sums[threadIdx.x] = sum;
  __syncthreads();
  if (share > 0 || channel >= p.out_channels) return;
  for (int i = 1; i < kShares; ++i) sum += sums[i * 32 + threadIdx.x];
  if (!is_finite(sum)) sum = gemm_bias_gradient_at<T>(p.definition, p.out_positions, channel);
  static_cast<T*>(p.bias)[channel] = from_accumulator<T>(sum);
}

// Where parts lie as the weight's gradient does, in vectors: four neighbours are a thread's, and `shares` warps, or
// more of a block's threads, share the parts. Short, since code comes from memory the first time.
template <typename T>
__global__ void __launch_bounds__(kGemmWeightReduceThreads)
    gemm_weight_sum_kernel(const __grid_constant__ GemmWeightReduction p) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  __shared__ float4 sums[kGemmWeightReduceThreads];
  let_next_grid_begin();
  wait_for_previous_grid();
  // Those of the bias come first, since they take longer.
  const int block = static_cast<int>(blockIdx.x) - p.bias_blocks;
  if (block < 0) {
    reduce_bias<T>(p, blockIdx.x, reinterpret_cast<float*>(sums));
    return;
  }
  const int units = kGemmWeightReduceThreads / p.shares, share = threadIdx.x / units;
  const int64_t unit = static_cast<int64_t>(block) * units + threadIdx.x % units;
  const bool exists = unit * 4 < p.part;
  float4 sum = make_float4(0, 0, 0, 0);
  const float* from = p.partial + (exists ? unit * 4 : 0) + share * p.part;
  const int64_t step = p.shares * p.part;
#pragma unroll 8
  for (int split = share; split < p.splits; split += p.shares, from += step) {
    const float4 part = __ldcg(reinterpret_cast<const float4*>(from));
    sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
  }
  if (p.shares > 1) {
    sums[threadIdx.x] = sum;
    __syncthreads();
    if (share > 0) return;
#pragma unroll 1
    for (int i = 1; i < p.shares; ++i) {
      const float4 part = sums[i * units + threadIdx.x];
      sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
    }
  }
  if (!exists) return;
  const float probe = fmaf(sum.x, 0.f, fmaf(sum.y, 0.f, fmaf(sum.z, 0.f, sum.w * 0.f)));
  float values[4] = {sum.x, sum.y, sum.z, sum.w};
  if (probe != 0) {
    const int64_t line = unit * 4 / p.weight_pitch;
    const int channel = static_cast<int>(unit * 4 - line * p.weight_pitch), taps = p.taps.divisor;
    const int row = static_cast<int>(line / taps), tap = static_cast<int>(line - static_cast<int64_t>(row) * taps);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      if (is_finite(values[k])) continue;
      values[k] = gemm_weight_gradient_at<T>(p.definition, row, channel + k, tap);
    }
  }
  reinterpret_cast<Pack<T, 4>*>(p.output)[unit] = rounded<T>(values);
#endif
}

// A block makes all taps of p.channels output channels of p.rows input channels; `shares` threads share the splits.
template <typename T>
__global__ void __launch_bounds__(kGemmWeightReduceThreads)
    gemm_weight_reduction_kernel(const __grid_constant__ GemmWeightReduction p) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  constexpr int kUnits = 4;  // of a thread at a time: four channels of a tap each
  __shared__ float4 sums[kGemmWeightReduceThreads];
  __shared__ float turned[kGemmWeightReduceSums];
  let_next_grid_begin();
  int rest = static_cast<int>(blockIdx.x) - p.bias_blocks;
  if (rest < 0) {
    wait_for_previous_grid();
    reduce_bias<T>(p, blockIdx.x, turned);
    return;
  }
  const int taps = p.taps.divisor, vectors = p.vectors.divisor;
  const int first_row = p.channel_blocks(rest) * p.rows, first = rest * p.channels;
  const int rows = min(p.rows, p.all_rows - first_row), count = rows * vectors * taps;
  const int channels = min(p.channels, p.group_out - first), pitch = taps | 1;
  const int per_share = kGemmWeightReduceThreads / p.shares;
  const int share = threadIdx.x / per_share, lane = threadIdx.x % per_share;
  wait_for_previous_grid();
#pragma unroll 1
  for (int begin = 0; begin < count; begin += kUnits * per_share) {
    float4 sum[kUnits];
    int place[kUnits];  // of the first channel, -1: none; the others are `vectors` rows apart, which keeps banks apart
    const float* from[kUnits];
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      const int unit = begin + i * per_share + lane;
      int vector = unit, tap = p.vectors(vector);
      const int row = p.taps(tap);
      const bool exists = unit < count && first + vector * 4 < p.weight_pitch;
      place[i] = exists ? (row * p.channels + vector) * pitch + tap : -1;
      from[i] = p.partial;
      if (exists) {
        from[i] += (static_cast<int64_t>(first_row + row) * taps + tap) * p.weight_pitch + first + vector * 4;
        if (first_row + row >= p.far_row) from[i] += p.further;
      }
      sum[i] = make_float4(0, 0, 0, 0);
    }
#pragma unroll 4
    for (int split = share; split < p.splits; split += p.shares) {
#pragma unroll
      for (int i = 0; i < kUnits; ++i) {
        if (place[i] < 0) continue;
        const float4 part = __ldcg(reinterpret_cast<const float4*>(from[i] + split * p.step));
        sum[i].x += part.x, sum[i].y += part.y, sum[i].z += part.z, sum[i].w += part.w;
      }
    }
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      if (begin + i * per_share >= count) break;
      if (p.shares > 1) {
        sums[threadIdx.x] = sum[i];
        __syncthreads();
        if (share == 0) {
#pragma unroll 8
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
      for (int k = 0; k < 4; ++k) turned[place[i] + k * vectors * pitch] = values[k];
    }
  }
  __syncthreads();
  // Neighbours in memory, from the block's first one in a row.
  const int all = channels * taps;
  const auto find = [&](int i, int& channel, int& tap) {
    if (p.channels_last) {
      tap = i / channels, channel = i - tap * channels;
    } else {
      tap = i, channel = p.taps(tap);
    }
    return p.channels_last ? tap * p.group_out + first + channel : first * taps + i;
  };
  const auto value_of = [&](int row, int channel, int tap) {
    return turned[(row * p.channels + channel % 4 * vectors + channel / 4) * pitch + tap];
  };
  T* const output = static_cast<T*>(p.output) + static_cast<int64_t>(first_row) * p.group_out * taps;
  const int64_t row_pitch = static_cast<int64_t>(p.group_out) * taps;
  bool finite = true;
  for (int row = 0; row < rows; ++row) {
    const int step = p.pairs ? 2 : 1;
#pragma unroll 2
    for (int i = step * static_cast<int>(threadIdx.x); i < all; i += step * kGemmWeightReduceThreads) {
      int channel, tap;
      T* const to = output + row * row_pitch + find(i, channel, tap);
      const float value = value_of(row, channel, tap);
      finite = finite && is_finite(value);
      if (p.pairs) {
        find(i + 1, channel, tap);
        const float next = value_of(row, channel, tap);
        finite = finite && is_finite(next);
        Pack<T, 2> both;
        both.value[0] = from_accumulator<T>(value), both.value[1] = from_accumulator<T>(next);
        *reinterpret_cast<Pack<T, 2>*>(to) = both;
      } else {
        *to = from_accumulator<T>(value);
      }
    }
  }
  if (!__syncthreads_or(!finite)) return;
  for (int i = threadIdx.x; i < rows * all; i += kGemmWeightReduceThreads) {
    const int row = i / all;
    int channel, tap;
    T* const to = output + row * row_pitch + find(i - row * all, channel, tap);
    if (is_finite(value_of(row, channel, tap))) continue;
    *to = from_accumulator<T>(gemm_weight_gradient_at<T>(p.definition, first_row + row, first + channel, tap));
  }
#endif
}

}  // namespace fastconvt::cuda
