// Parts of the weight's gradient by pairs come together, in a fixed order, and so does the bias's.
#pragma once

#include "device/dependent_launch.cuh"
#include "pairs_gradient_repair.cuh"

namespace fastconvt::cuda {

constexpr int kPairsReduceThreads = 256;

struct PairsReduction {
  int64_t vectors;  // of four elements; 0: the weight's gradient has been made already
  int shares;       // threads that share the parts
  int weight_blocks;
  bool aligned;  // a vector of the result is
};

template <typename T>
__device__ __forceinline__ void reduce_pairs_weight(const PairsGradientParams& p, const PairsReduction& r) {
  __shared__ float4 sums[kPairsReduceThreads];
  const int lanes = kPairsReduceThreads / r.shares, share = threadIdx.x / lanes, lane = threadIdx.x % lanes;
  const int64_t vector = static_cast<int64_t>(blockIdx.x) * lanes + lane;
  float4 sum = make_float4(0, 0, 0, 0);
  if (vector < r.vectors) {
#pragma unroll 8
    for (int split = share; split < p.splits; split += r.shares) {
      const float4 x = __ldcg(reinterpret_cast<const float4*>(p.part_of(split)) + vector);
      sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
    }
  }
  sums[threadIdx.x] = sum;
  __syncthreads();
  if (share > 0 || vector >= r.vectors) return;
  for (int i = 1; i < r.shares; ++i) {
    const float4 x = sums[i * lanes + lane];
    sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
  }
  const float values[4] = {sum.x, sum.y, sum.z, sum.w};
  Pack<T, 4> result;
#pragma unroll
  for (int i = 0; i < 4; ++i) result.value[i] = from_accumulator<T>(values[i]);
  T* const to = static_cast<T*>(p.grad_weight) + vector * 4;
  if (r.aligned) {
    *reinterpret_cast<Pack<T, 4>*>(to) = result;
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) to[i] = result.value[i];
  }
  if (fmaf(sum.x, 0.f, fmaf(sum.y, 0.f, fmaf(sum.z, 0.f, sum.w * 0.f))) == 0.f) return;
  asm volatile("" ::: "memory");
#pragma unroll 1
  for (int i = 0; i < 4; ++i) {
    if (is_finite(to_accumulator(to[i]))) continue;
    const int64_t at = vector * 4 + i;
    to[i] = sum_pairs_weight_gradient<T>(p, static_cast<int>(at / p.inner), static_cast<int>(at % p.inner));
  }
}

// The bias of a channel, by a warp: sums over the taps that meet every output once.
template <typename T>
__device__ __forceinline__ void reduce_pairs_bias(const PairsGradientParams& p, int channel) {
  if (channel >= p.out_channels) return;
  const int height = p.axis[1].kernel, width = p.axis[2].kernel, taps = p.axis[0].kernel * height * width;
  const auto counted = [](const AxisParams& a, int tap) { return tap >= a.padding && tap < a.padding + a.stride; };
  float sum = 0;
  for (int i = threadIdx.x % 32; i < p.splits * taps; i += 32) {
    const int split = i / taps, tap = i - split * taps;
    if (counted(p.axis[2], tap % width) && counted(p.axis[1], tap / width % height) &&
        counted(p.axis[0], tap / (width * height))) {
      sum += __ldcg(p.bias_partial + static_cast<int64_t>(split) * p.inner + channel * taps + tap);
    }
  }
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
  T result = from_accumulator<T>(sum);
  if (!is_finite(sum)) result = pairs_bias_gradient_at<T>(p, channel);
  if (threadIdx.x % 32 == 0) static_cast<T*>(p.grad_bias)[channel] = result;
}

template <typename T>
__global__ void __launch_bounds__(kPairsReduceThreads)
    pairs_reduction_kernel(const __grid_constant__ PairsGradientParams p, const __grid_constant__ PairsReduction r) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  let_next_grid_begin();
  wait_for_previous_grid();
  const int block = static_cast<int>(blockIdx.x) - r.weight_blocks;
  if (block < 0) {
    reduce_pairs_weight<T>(p, r);
  } else {
    reduce_pairs_bias<T>(p, block * (kPairsReduceThreads / 32) + static_cast<int>(threadIdx.x) / 32);
  }
#endif
}

}  // namespace fastconvt::cuda
