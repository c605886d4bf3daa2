// Outputs by the definition: those that were not finite, since sums in float32 may overflow on their way to a finite
// one, and those of tensors that the shuffle GEMM cannot read.
#pragma once

#include "shuffle_gemm_store.cuh"

namespace fastconvt::cuda {

template <typename T, bool kContiguous>
__device__ __noinline__ T make_output(const ShuffleGemmParams& p, int n, int position, int group, int column) {
  const int64_t pixel = kContiguous ? 1 : p.in_channels, channel = kContiguous ? p.positions : 1;
  const T* x = static_cast<const T*>(p.input) + static_cast<int64_t>(n) * p.in_channels * p.positions +
               position * pixel + static_cast<int64_t>(group) * p.group_in * channel;
  const T* w = static_cast<const T*>(p.weight) + static_cast<int64_t>(group) * p.group_in * p.columns + column;
  double sum = 0;
#pragma unroll 4
  for (int c = 0; c < p.group_in; ++c) {
    sum += double(to_accumulator(*x)) * double(to_accumulator(*w));
    x += channel, w += p.columns;
  }
  const int quotient = p.channel_columns(column);
  if (p.bias != nullptr) {
    sum +=
        double(to_accumulator(static_cast<const T*>(p.bias)[group * p.group_out + (kContiguous ? quotient : column)]));
  }
  return from_accumulator<T>(p.rectify(static_cast<float>(sum)));
}

template <bool kContiguous>
__device__ __forceinline__ int64_t find_output(const ShuffleGemmParams& p, int64_t place, int group, int column) {
  if (!kContiguous) return place + group * p.group_out + find_output_column(p, column);
  const int taps = p.width_step;
  return place + group * static_cast<int64_t>(p.group_out) * p.plane + find_output_row(p, column / taps, taps) +
         column % taps;
}

// Of one tile, by a warpgroup, or a warp.
template <typename T, bool kContiguous, int kColumns, int kThreads = 128>
__device__ __noinline__ void repair_tile(const ShuffleGemmParams& p, int tile, int group, int block) {
  T* const output = static_cast<T*>(p.output);
  for (int i = threadIdx.x % kThreads; i < 64 * kColumns; i += kThreads) {
    const int at = i % 64, column = block * kColumns + i / 64;
    int n, position;
    const bool exists =
        !kContiguous && p.boxed ? find_box_position(p, tile, at, n, position) : find_position(p, tile, at, n, position);
    if (!exists || column >= p.columns) continue;
    T& to = output[find_output<kContiguous>(p, find_place_of(p, n, position), group, column)];
    if (is_finite(to_accumulator(to))) continue;
    to = make_output<T, kContiguous>(p, n, position, group, column);
  }
}

// All outputs, a thread each at a time.
template <typename T, bool kContiguous>
__global__ void __launch_bounds__(256) shuffle_gemm_exact_kernel(const __grid_constant__ ShuffleGemmParams p) {
  const int64_t of_tile = 64 * static_cast<int64_t>(p.columns) * p.groups.divisor;
  const int64_t tiles = p.tiles, step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < tiles * of_tile; i += step) {
    const int tile = static_cast<int>(i / of_tile);
    int rest = static_cast<int>(i % of_tile / 64);
    const int at = static_cast<int>(i % 64), group = rest / p.columns, column = rest % p.columns;
    const int64_t place = find_shuffle_gemm_place(p, tile, at);
    if (place < 0) continue;
    int n, position;
    find_position(p, tile, at, n, position);
    static_cast<T*>(p.output)[find_output<kContiguous>(p, place, group, column)] =
        make_output<T, kContiguous>(p, n, position, group, column);
  }
}

}  // namespace fastconvt::cuda
