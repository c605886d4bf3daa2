// Brings both operands of the weight's gradient into the form that copies read: channels innermost, in rows of whole
// vectors of 16 bytes. Float32 becomes two planes of bfloat16, the rounded numbers and what is left of them.
#pragma once

#include "gradient_gemm_pack.cuh"

namespace fastconvt::cuda {

constexpr int kSplitPackChannels = 32;

// Two neighbours as the sum of two pairs of bfloat16.
__device__ __forceinline__ void split_pair(float x, float y, uint32_t& high, uint32_t& low) {
  const __nv_bfloat162 h = __floats2bfloat162_rn(x, y);
  high = *reinterpret_cast<const uint32_t*>(&h);
  const __nv_bfloat162 l =
      __floats2bfloat162_rn(x - __uint_as_float(high << 16), y - __uint_as_float(high & 0xffff0000u));
  low = *reinterpret_cast<const uint32_t*>(&l);
}

// Eight neighbours; they go to the same place of both planes.
__device__ __forceinline__ void store_split(const float (&value)[8], void* target, int64_t place, int64_t plane) {
  uint4 high, low;
  split_pair(value[0], value[1], high.x, low.x);
  split_pair(value[2], value[3], high.y, low.y);
  split_pair(value[4], value[5], high.z, low.z);
  split_pair(value[6], value[7], high.w, low.w);
  __nv_bfloat16* const to = static_cast<__nv_bfloat16*>(target) + place;
  *reinterpret_cast<uint4*>(to) = high;
  *reinterpret_cast<uint4*>(to + plane) = low;
}

// 32 channels of 128 positions.
__device__ __forceinline__ void turn_split(const GradientPackParams& p, int block, float* staged) {
  int column = block, group, tile;
  group = p.tile_columns(column);
  tile = p.tile_groups(group);
  const int n = p.tile_rows(tile), first = column * kSplitPackChannels, from = tile * p.tile_positions;
  const int positions = min(p.tile_positions, p.image - from), channels = min(kSplitPackChannels, p.group - first);
  const float* const source = static_cast<const float*>(p.source) +
                              ((static_cast<int64_t>(n) * p.groups + group) * p.group + first) * p.image + from;
  float value[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const int v = threadIdx.x + i * kGradientPackThreads, c = v / kGradientPackPositions;
    const int at = v % kGradientPackPositions;
    value[i] = 0;
    if (c < channels && at < positions) value[i] = __ldg(source + static_cast<int64_t>(c) * p.image + at);
  }
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const int v = threadIdx.x + i * kGradientPackThreads, c = v / kGradientPackPositions;
    staged[v % kGradientPackPositions * 33 + c] = value[i];
  }
  __syncthreads();
  const int room = p.group_pitch - first;
  const int64_t place = (static_cast<int64_t>(n) * p.image + from) * p.pitch + group * p.group_pitch + first;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int v = threadIdx.x + i * kGradientPackThreads, at = v / 4, c = v % 4 * 8;
    if (at >= positions || c >= room) continue;
    float eight[8];
#pragma unroll
    for (int k = 0; k < 8; ++k) eight[k] = staged[at * 33 + c + k];
    store_split(eight, p.target, place + static_cast<int64_t>(at) * p.pitch + c, p.positions * p.pitch);
  }
}

// Channels that are innermost already.
__device__ __forceinline__ void pad_split(const GradientPackParams& p, int block) {
  const int64_t first = static_cast<int64_t>(block) * kGradientPackPositions;
  const int vectors = p.pitch / 8, group_vectors = p.group_pitch / 8;
  const int positions = static_cast<int>(min(p.positions - first, int64_t{kGradientPackPositions}));
#pragma unroll 2
  for (int i = threadIdx.x; i < positions * vectors; i += kGradientPackThreads) {
    const int at = i / vectors, v = i - at * vectors, group = v / group_vectors, c = (v - group * group_vectors) * 8;
    const float* const from = static_cast<const float*>(p.source) + ((first + at) * p.groups + group) * p.group + c;
    float eight[8];
    if (p.vectors) {
      *reinterpret_cast<float4*>(eight) = __ldg(reinterpret_cast<const float4*>(from));
      *reinterpret_cast<float4*>(eight + 4) = __ldg(reinterpret_cast<const float4*>(from) + 1);
    } else {
#pragma unroll
      for (int k = 0; k < 8; ++k) eight[k] = c + k < p.group ? __ldg(from + k) : 0.f;
    }
    store_split(eight, p.target, (first + at) * p.pitch + v * 8, p.positions * p.pitch);
  }
}

template <typename T>
__device__ __forceinline__ void pack_positions(const GradientPackParams& p, int block, char* staged) {
  if constexpr (sizeof(T) == 4) {
    if (p.turned) {
      pad_split(p, block);
    } else {
      turn_split(p, block, reinterpret_cast<float*>(staged));
    }
  } else if (p.turned) {
    pad_positions<T>(p, block);
  } else {
    turn_positions<T>(p, block, staged);
  }
}

// The input by the first `blocks` of the grid, the output's gradient by the others.
template <typename T>
__global__ void __launch_bounds__(kGradientPackThreads)
    gemm_weight_pack_kernel(const __grid_constant__ GradientPackParams p, const __grid_constant__ GradientPackParams q,
                            int blocks) {
  __shared__ __align__(1024) char staged[kGradientPackPositions * 33 * 4];
  let_next_grid_begin();
  const int block = static_cast<int>(blockIdx.x);
  if (block >= blocks) {
    pack_positions<T>(q, block - blocks, staged);
  } else {
    pack_positions<T>(p, block, staged);
  }
}

}  // namespace fastconvt::cuda
