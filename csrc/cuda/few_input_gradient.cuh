// The input's gradient of few positions, device side. See core/few_input_gradient.h. Asynchronous copies bring weights
// as they lie and gather what positions see of the output's gradient; warps multiply; blocks of a cluster add their
// sums in a fixed order.
#pragma once

#include "../core/few_input_gradient.h"
#include "device/cluster.cuh"
#include "device/copy_groups.cuh"
#include "device/dependent_launch.cuh"
#include "device/fast_divide.h"
#include "device/met_taps.cuh"
#include "device/numeric.cuh"
#include "device/shared_address.cuh"
#include "device/tf32.cuh"

namespace fastconvt::cuda {

constexpr int kFewInputThreads = 256;

struct FewInputParams {
  MetAxis axis[3];
  FastDivide image, taps;  // input positions of a batch entry
  FastDivide splits, row_blocks;
  int positions, channels, out_channels, inner, steps;
  int in_batch, out_batch, out_image;  // elements
  bool vectors;                        // the weight is read in vectors of 16 bytes
  int lane_taps;                       // log2 of neighbouring taps, perhaps neighbours in memory, of neighbouring lanes
  const float *grad_output, *weight;
  float* grad_input;
};

// What a position meets, and the element of its first tap's output in the first channel.
struct FewInputPlace {
  int first;
  MetTaps met;

  __device__ FewInputPlace(const FewInputParams& p, int position) {
    const bool exists = position < p.positions;
    int n = exists ? position : 0;
    met = find_met_taps(p.axis, n, exists);
    first = n * p.out_batch + (met.first[0] * p.axis[1].out + met.first[1]) * p.axis[2].out + met.first[2];
  }
};

// An element by the definition, in float64: only outputs that exist are multiplied.
__device__ __noinline__ float few_input_by_definition(const FewInputParams& p, const MetTap* taps, int channel,
                                                      int position) {
  const FewInputPlace place(p, position);
  double sum = 0;
  for (int c = 0; c < p.inner; ++c) {
    int tap = c;
    const int out_channel = p.taps(tap);
    if (!place.met.meet(taps[tap])) continue;
    sum = fma(double(p.grad_output[place.first + out_channel * p.out_image + taps[tap].offset]),
              double(p.weight[static_cast<int64_t>(channel) * p.inner + c]), sum);
  }
  return static_cast<float>(sum);
}

template <int kPending>
__device__ __forceinline__ void wait_for_copies_but() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
#endif
}

// Of a block: where it stands, and what lies where in a stage, in floats. Pitches keep banks apart.
template <int kShape>
struct FewInputBlock {
  static constexpr FewInputShape kOf = kFewInputShapes[kShape];
  static constexpr int kRowPitch = kFewInner + 4, kColumnPitch = kOf.columns + 8;
  static constexpr int kStage = kOf.rows * kRowPitch + kFewInner * kColumnPitch;
  static constexpr int kSumPitch = kOf.columns + 4;
  static_assert(kOf.rows * kSumPitch <= kOf.stages * kStage);
  int first_row, first_column, rank, begin, end;

  __device__ __forceinline__ explicit FewInputBlock(const FewInputParams& p) {
    rank = static_cast<int>(blockIdx.x);
    int row = p.splits(rank);
    first_column = p.row_blocks(row) * kOf.columns, first_row = row * kOf.rows;
    begin = p.steps * rank / p.splits.divisor, end = p.steps * (rank + 1) / p.splits.divisor;
  }
};

// Whose position a thread copies.
template <int kShape>
__device__ __forceinline__ int few_input_column(const FewInputParams& p) {
  return (threadIdx.x >> p.lane_taps) % kFewInputShapes[kShape].columns;
}

template <int kShape>
__device__ __forceinline__ void copy_step(const FewInputParams& p, const FewInputBlock<kShape>& block,
                                          const MetTap* taps, const FewInputPlace& place, int step, float* stage) {
  using Block = FewInputBlock<kShape>;
  constexpr int kColumns = Block::kOf.columns, kApart = kFewInputThreads / kColumns;
  const int first = step * kFewInner;
  const uint32_t rows = shared_address(stage), columns = rows + Block::kOf.rows * Block::kRowPitch * 4;
#pragma unroll
  for (int i = 0; i < Block::kOf.rows * kFewInner / 4 / kFewInputThreads; ++i) {
    const int v = threadIdx.x + i * kFewInputThreads, row = v / (kFewInner / 4), c = v % (kFewInner / 4) * 4;
    const int channel = min(block.first_row + row, p.channels - 1);
    const float* const from = p.weight + static_cast<int64_t>(channel) * p.inner + first + c;
    const uint32_t to = rows + (row * Block::kRowPitch + c) * 4;
    if (p.vectors) {
      const bool exists = first + c < p.inner;
      copy_or_zero<16>(to, exists ? from : p.weight, exists);
    } else {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const bool exists = first + c + k < p.inner;
        copy_or_zero<4>(to + k * 4, exists ? from + k : p.weight, exists);
      }
    }
  }
  const int column = few_input_column<kShape>(p), lanes = 1 << p.lane_taps;
  const int k = threadIdx.x % lanes + threadIdx.x / (lanes * kColumns) * lanes;
#pragma unroll
  for (int i = 0; i < kFewInner / kApart; ++i) {
    int tap = first + k + i * kApart;
    const bool inside = tap < p.inner;
    const int out_channel = p.taps(tap);
    const MetTap of = taps[tap];
    const bool exists = inside && place.met.meet(of);
    const float* const from = p.grad_output + (exists ? place.first + out_channel * p.out_image + of.offset : 0);
    copy_or_zero<4>(columns + ((k + i * kApart) * Block::kColumnPitch + column) * 4, from, exists);
  }
}

// x = high + low, both rounded to what the matrix unit keeps. What is not finite makes a rest that is NaN.
__device__ __forceinline__ void split_few(float x, float& high, float& low) {
  split_tf32_rounded(x, high, low);
  low *= 1 + 1.f / 2048;
}

// The products of a stage. Float32: three each, and a sum of its own every two steps, since the unit truncates.
template <int kShape, bool kSplit, int kRowTiles, int kTiles>
__device__ __forceinline__ void multiply_step(const float* stage, int row, int column,
                                              float (&sum)[kRowTiles][kTiles][4]) {
  using Block = FewInputBlock<kShape>;
  const int lane = threadIdx.x % 32;
  const uint32_t rows =
      shared_address(stage) + ((row + lane / 8 % 2 * 8 + lane % 8) * Block::kRowPitch + lane / 16 * 4) * 4;
  const float* const columns =
      stage + Block::kOf.rows * Block::kRowPitch + lane % 4 * Block::kColumnPitch + column + lane / 4;
#pragma unroll
  for (int half = 0; half < kFewInner / 16; ++half) {
    float part[kRowTiles][kTiles][4] = {};
#pragma unroll
    for (int k = half * 16; k < half * 16 + 16; k += 8) {
      float a[kRowTiles][4], a_low[kRowTiles][4], b[kTiles][2], b_low[kTiles][2];
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) load_matrices(a[i], rows + (i * 16 * Block::kRowPitch + k) * 4);
#pragma unroll
      for (int j = 0; j < kTiles; ++j)
#pragma unroll
        for (int h = 0; h < 2; ++h) b[j][h] = columns[(k + h * 4) * Block::kColumnPitch + j * 8];
      const auto round = [](float& x, float& low) {
        if constexpr (kSplit) {
          split_few(x, x, low);
        } else {
          x = __uint_as_float(rounded_tf32(__float_as_uint(x)));
        }
      };
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
        for (int h = 0; h < 4; ++h) round(a[i][h], a_low[i][h]);
#pragma unroll
      for (int j = 0; j < kTiles; ++j)
#pragma unroll
        for (int h = 0; h < 2; ++h) round(b[j][h], b_low[j][h]);
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
        for (int j = 0; j < kTiles; ++j) {
          float (&d)[4] = kSplit ? part[i][j] : sum[i][j];
          if constexpr (kSplit) {
            multiply_tf32(d, a_low[i], b[j][0], b[j][1]);
            multiply_tf32(d, a[i], b_low[j][0], b_low[j][1]);
          }
          multiply_tf32(d, a[i], b[j][0], b[j][1]);
        }
    }
    if constexpr (kSplit) {
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
        for (int j = 0; j < kTiles; ++j)
#pragma unroll
          for (int k = 0; k < 4; ++k) sum[i][j][k] += part[i][j][k];
    }
  }
}

// Adds the sums of a cluster's blocks, each a share of the rows, and stores them.
template <int kShape>
__device__ __forceinline__ void store_few(const FewInputParams& p, const FewInputBlock<kShape>& block,
                                          const MetTap* taps, const float* sums) {
  using Block = FewInputBlock<kShape>;
  const int splits = p.splits.divisor, share = Block::kOf.rows / splits;
#pragma unroll 2
  for (int i = threadIdx.x; i < share * Block::kOf.columns; i += kFewInputThreads) {
    const int row = block.rank * share + i / Block::kOf.columns, column = i % Block::kOf.columns;
    const uint32_t at = shared_address(sums + row * Block::kSumPitch + column);
    float part[8], sum = 0;
#pragma unroll
    for (int s = 0; s < 8; ++s) part[s] = s < splits ? load_cluster(cluster_address(at, s)) : 0;
#pragma unroll
    for (int s = 0; s < 8; ++s) sum += part[s];
    const int channel = block.first_row + row, position = block.first_column + column;
    if (channel >= p.channels || position >= p.positions) continue;
    if (!is_finite(sum)) sum = few_input_by_definition(p, taps, channel, position);
    int in_image = position;
    const int n = p.image(in_image);
    p.grad_input[n * p.in_batch + channel * p.image.divisor + in_image] = sum;
  }
}

template <int kShape, bool kSplit>
__global__ void __launch_bounds__(kFewInputThreads, kFewInputShapes[kShape].resident)
    few_input_gradient_kernel(const __grid_constant__ FewInputParams p) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  using Block = FewInputBlock<kShape>;
  constexpr int kStages = Block::kOf.stages, kRowTiles = Block::kOf.rows / 32, kTiles = Block::kOf.columns / 32;
  extern __shared__ float4 stage_vectors[];
  __shared__ MetTap taps[kFewMaxTaps];
  float* const stages = reinterpret_cast<float*>(stage_vectors);
  fill_taps<kFewInputThreads>(p.axis, p.taps.divisor, taps);
  const Block block(p);
  const FewInputPlace place(p, block.first_column + few_input_column<kShape>(p));
  __syncthreads();
  wait_for_previous_grid();
  let_next_grid_begin();
#pragma unroll 1
  for (int i = 0; i < kStages - 1; ++i) {
    if (block.begin + i < block.end) copy_step(p, block, taps, place, block.begin + i, stages + i * Block::kStage);
    commit_copies();
  }
  const int warp = threadIdx.x / 32, row = warp / 4 * kRowTiles * 16, column = warp % 4 * kTiles * 8;
  float sum[kRowTiles][kTiles][4] = {};
  int place_now = 0, place_next = kStages - 1;
#pragma unroll 1
  for (int step = block.begin; step < block.end; ++step) {
    wait_for_copies_but<kStages - 2>();
    __syncthreads();
    const int next = step + kStages - 1;
    if (next < block.end) copy_step(p, block, taps, place, next, stages + place_next * Block::kStage);
    commit_copies();
    multiply_step<kShape, kSplit>(stages + place_now * Block::kStage, row, column, sum);
    if (++place_now == kStages) place_now = 0;
    if (++place_next == kStages) place_next = 0;
  }
  __syncthreads();
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
    for (int j = 0; j < kTiles; ++j)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float* const to =
            stages + (row + i * 16 + half * 8 + lane / 4) * Block::kSumPitch + column + j * 8 + lane % 4 * 2;
        *reinterpret_cast<float2*>(to) = make_float2(sum[i][j][half * 2], sum[i][j][half * 2 + 1]);
      }
  meet_cluster();
  store_few(p, block, taps, stages);
  meet_cluster();  // nobody leaves while others read
#endif
}

}  // namespace fastconvt::cuda
