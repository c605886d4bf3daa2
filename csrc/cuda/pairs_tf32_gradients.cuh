// Gradients of pairs in TF32, device side. See core/pairs_tf32_gradients.h. Some blocks make the input's gradient,
// others the weight's; both walk through the positions in memory's order at the same time, so that what one of them
// reads from memory the other one finds in the L2 cache. One warp copies, two warpgroups multiply.
#pragma once

#include "device/dependent_launch.cuh"
#include "pairs_tf32_input_gradient.cuh"
#include "pairs_tf32_weight_gradient.cuh"

namespace fastconvt::cuda {

template <int kInputTiles, int kWeightTiles>
__global__ void __launch_bounds__(kPairsThreads, 1)
    pairs_tf32_kernel(const __grid_constant__ PairsTf32Params p, const __grid_constant__ PairsTf32Maps maps) {
#ifdef FASTCONVT_GRADIENT_GEMM
  extern __shared__ __align__(1024) char shared[];
  const uint32_t base = (shared_address(shared) + 1023) & ~1023u;
  // The roles are spread evenly over the grid.
  const int b = blockIdx.x, before = static_cast<int>(static_cast<int64_t>(b) * p.input_blocks / p.blocks);
  const int after = static_cast<int>(static_cast<int64_t>(b + 1) * p.input_blocks / p.blocks);
  const bool of_input = after > before;
  if (threadIdx.x == 0) {
    of_input ? PairsBarriers<kInputTiles>{base}.initialize() : PairsBarriers<kWeightTiles>{base}.initialize();
  }
  let_next_grid_begin();
  __syncthreads();
  wait_for_previous_grid();
  if (threadIdx.x >= 256) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
    if (threadIdx.x >= 288) return;
    if (of_input) {
      copy_input_items<kInputTiles>(p, maps, base, before);
    } else {
      copy_weight_items<kWeightTiles>(p, maps, base, b - before);
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
    if (of_input) {
      multiply_input_items<kInputTiles>(p, base, before);
    } else {
      multiply_weight_items<kWeightTiles>(p, base, b - before);
    }
  }
#endif
}

constexpr int kPairsReduceThreads = 256;

// Adds the parts of the weight's gradient in fixed order, four terms a thread, `shares` threads sharing the parts; the
// last blocks add those of the bias, a warp a channel.
static __global__ void __launch_bounds__(kPairsReduceThreads)
    pairs_tf32_reduction_kernel(const __grid_constant__ PairsTf32Params p, int weight_blocks, int shares) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  __shared__ float4 sums[kPairsReduceThreads];
  let_next_grid_begin();
  wait_for_previous_grid();
  const int block = static_cast<int>(blockIdx.x) - weight_blocks;
  if (block >= 0) {
    const int channel = block * (kPairsReduceThreads / 32) + static_cast<int>(threadIdx.x) / 32,
              lane = threadIdx.x % 32;
    if (channel >= p.out_channels) return;
    float sum = 0;
    for (int i = lane; i < p.splits * p.taps; i += 32) {
      const int split = i / p.taps, tap = i - split * p.taps, row = tap / p.axis[2].kernel;
      const int z = row / p.axis[1].kernel, y = row - z * p.axis[1].kernel;
      // The outputs of these taps are all outputs, each once.
      const bool counted = z >= p.axis[0].padding && z < p.axis[0].padding + p.axis[0].stride &&
                           y >= p.axis[1].padding && y < p.axis[1].padding + p.axis[1].stride;
      if (counted) sum += __ldcg(p.bias_partial + static_cast<int64_t>(split) * p.inner + channel * p.taps + tap);
    }
    for (int i = 16; i > 0; i /= 2) sum += __shfl_xor_sync(~0u, sum, i);
    if (lane > 0) return;
    p.grad_bias[channel] = is_finite(sum) ? sum : tf32_bias_gradient_at(p, channel);
    return;
  }
  const int64_t vectors = static_cast<int64_t>(p.in_channels) * p.inner / 4;
  const int lanes = kPairsReduceThreads / shares, share = threadIdx.x / lanes, lane = threadIdx.x % lanes;
  const int64_t at = static_cast<int64_t>(blockIdx.x) * lanes + lane;
  float4 sum = make_float4(0, 0, 0, 0);
  if (at < vectors) {
#pragma unroll 8
    for (int s = share; s < p.splits; s += shares) {
      const float4 x = __ldcg(reinterpret_cast<const float4*>(p.partial) + s * vectors + at);
      sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
    }
  }
  sums[threadIdx.x] = sum;
  __syncthreads();
  if (share > 0 || at >= vectors) return;
  for (int s = 1; s < shares; ++s) {
    const float4 x = sums[s * lanes + lane];
    sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
  }
  float values[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (is_finite(values[i])) continue;
    const int channel = static_cast<int>(at * 4 / p.inner);
    values[i] =
        pairs_weight_gradient_at(p, channel, static_cast<int>(at * 4 - static_cast<int64_t>(channel) * p.inner) + i);
  }
  reinterpret_cast<float4*>(p.grad_weight)[at] = make_float4(values[0], values[1], values[2], values[3]);
#endif
}

}  // namespace fastconvt::cuda
