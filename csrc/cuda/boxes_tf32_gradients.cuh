// Gradients in TF32 from boxes, device side. See core/boxes_tf32_gradients.h. Some blocks make the input's gradient,
// others the weight's, at the same time. One warp copies, two warpgroups multiply.
#pragma once

#include "boxes_tf32_input_gradient.cuh"
#include "boxes_tf32_weight_gradient.cuh"
#include "device/dependent_launch.cuh"

namespace fastconvt::cuda {

// Offsets of the terms of a chunk, for each phase.
__device__ __forceinline__ void fill_table(const BoxesTf32Params& p, uint32_t table) {
  for (int i = threadIdx.x; i < p.phases * 32; i += kBoxesThreads) {
    const int first = p.parts > 1 ? 0 : i / 32 * 32 / p.taps;
    int tap = i;
    const int channel = p.parts > 1 ? 0 : p.by_taps(tap);
    const int offset = offset_of_tap(p, p.input_channel, p.input_tap, channel - first, tap);
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(table + i * 4), "r"(offset) : "memory");
  }
}

template <int kInputTiles, int kWeightTiles>
__global__ void __launch_bounds__(kBoxesThreads, 1)
    boxes_tf32_kernel(const __grid_constant__ BoxesTf32Params p, const __grid_constant__ BoxesTf32Maps maps) {
#ifdef FASTCONVT_GRADIENT_GEMM
  extern __shared__ __align__(1024) char shared[];
  const uint32_t base = (shared_address(shared) + 1023) & ~1023u;
  // The roles are spread evenly over the grid.
  const int b = blockIdx.x, before = static_cast<int>(static_cast<int64_t>(b) * p.input_blocks / p.blocks);
  const int after = static_cast<int>(static_cast<int64_t>(b + 1) * p.input_blocks / p.blocks);
  const bool of_input = after > before;
  const BoxesBarriers barriers{base, of_input ? p.stages : p.weight_stages, 0};
  if (threadIdx.x == 0) barriers.initialize();
  if (of_input) fill_table(p, barriers.table());
  let_next_grid_begin();
  __syncthreads();
  wait_for_previous_grid();
  if (threadIdx.x >= 256) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
    if (threadIdx.x >= 288) return;
    if (of_input) {
      copy_input_boxes<kInputTiles>(p, maps, base, before);
    } else {
      copy_weight_boxes<kWeightTiles>(p, maps, base, b - before);
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
    if (of_input) {
      multiply_input_boxes<kInputTiles>(p, base, before);
    } else {
      multiply_weight_boxes<kWeightTiles>(p, base, b - before);
    }
  }
#endif
}

constexpr int kBoxesReduceThreads = 256;

// Parts of a gradient, each `vectors` times four floats; `shares` threads share the parts of a vector.
struct BoxesParts {
  const float* parts;
  float* sums;
  int64_t vectors;
  int count, shares, blocks;
};

__device__ __forceinline__ float4 add_parts(const BoxesParts& of, int block, int64_t& at) {
  __shared__ float4 sums[kBoxesReduceThreads];
  const int lanes = kBoxesReduceThreads / of.shares, share = threadIdx.x / lanes, lane = threadIdx.x % lanes;
  at = static_cast<int64_t>(block) * lanes + lane;
  float4 sum = make_float4(0, 0, 0, 0);
  if (at < of.vectors) {
#pragma unroll 8
    for (int s = share; s < of.count; s += of.shares) {
      const float4 x = __ldcg(reinterpret_cast<const float4*>(of.parts) + s * of.vectors + at);
      sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
    }
  }
  sums[threadIdx.x] = sum;
  __syncthreads();
  if (share > 0 || at >= of.vectors) {
    at = -1;
    return sum;
  }
  for (int s = 1; s < of.shares; ++s) {
    const float4 x = sums[s * lanes + lane];
    sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
  }
  return sum;
}

// A lane's share of the outputs beyond those that counted taps meet: along each axis, those at the end.
__device__ __noinline__ float uncounted_outputs(const BoxesTf32Params& p, int channel, int lane) {
  float sum = 0;
  for (int a = 0; a < 3; ++a) {
    int64_t size[3], first[3] = {0, 0, 0}, all = p.batch;
    for (int b = 0; b < 3; ++b) {
      size[b] = b < a ? p.counted[b] : p.axis[b].out;
      if (b == a) first[b] = p.counted[b], size[b] -= p.counted[b];
      all *= size[b];
    }
    for (int64_t i = lane; i < all; i += 32) {
      int64_t rest = i, offset = channel * p.out.channel;
      for (int b = 2; b >= 0; --b) {
        const int64_t next = rest / size[b];
        offset += (first[b] + rest - next * size[b]) * p.out.axis[b], rest = next;
      }
      sum += p.grad_output[rest * p.out.batch + offset];
    }
  }
  return sum;
}

// A warp adds a channel: counted taps, which meet each output once, and outputs that these do not meet.
__device__ __forceinline__ void add_bias(const BoxesTf32Params& p, int block) {
  const int channel = block * (kBoxesReduceThreads / 32) + static_cast<int>(threadIdx.x) / 32, lane = threadIdx.x % 32;
  if (channel >= p.out_channels) return;
  float sum = 0;
  for (int i = lane; i < p.splits * p.taps; i += 32) {
    const int split = i / p.taps, tap = i - split * p.taps, row = tap / p.axis[2].kernel;
    const int t[3] = {row / p.axis[1].kernel, row % p.axis[1].kernel, tap - row * p.axis[2].kernel};
    bool counted = true;
    for (int a = 0; a < 3; ++a) {
      counted = counted && t[a] >= p.axis[a].padding && t[a] < p.axis[a].padding + p.axis[a].stride;
    }
    if (counted) sum += __ldcg(p.bias_partial + static_cast<int64_t>(split) * p.inner + channel * p.taps + tap);
  }
  if (p.uncounted) sum += uncounted_outputs(p, channel, lane);
  for (int i = 16; i > 0; i /= 2) sum += __shfl_xor_sync(~0u, sum, i);
  if (lane == 0) p.grad_bias[channel] = is_finite(sum) ? sum : tf32_bias_gradient_at(p, channel);
}

// Adds the parts of the gradients in fixed order: those of the weight, of the input, of the bias.
static __global__ void __launch_bounds__(kBoxesReduceThreads)
    boxes_tf32_reduction_kernel(const __grid_constant__ BoxesTf32Params p, const __grid_constant__ BoxesParts weight,
                                const __grid_constant__ BoxesParts input) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  let_next_grid_begin();
  wait_for_previous_grid();
  int block = static_cast<int>(blockIdx.x);
  if (block >= weight.blocks + input.blocks) return add_bias(p, block - weight.blocks - input.blocks);
  const bool of_input = block >= weight.blocks;
  const BoxesParts& of = of_input ? input : weight;
  int64_t at;
  const float4 sum = add_parts(of, of_input ? block - weight.blocks : block, at);
  if (at < 0) return;
  float values[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (is_finite(values[i])) continue;
    values[i] = of_input ? boxes_input_gradient_at(p, at * 4 + i) : boxes_weight_gradient_at(p, at * 4 + i);
  }
  reinterpret_cast<float4*>(of.sums)[at] = make_float4(values[0], values[1], values[2], values[3]);
#endif
}

}  // namespace fastconvt::cuda
