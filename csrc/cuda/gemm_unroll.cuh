// Unrolls the output's gradient for products (core/gemm_gradients.h): a row for each input position, of all the outputs
// that it meets, in the order of the weight: output channel, tap. What lies outside is zero.
#pragma once

#include "../core/gemm_gradients.h"
#include "device/met_taps.cuh"
#include "gradient_gemm_pack.cuh"

namespace fastconvt::cuda {

constexpr int kUnrollThreads = 256;
constexpr int kUnrollPositions = 32;  // of a step of a block
constexpr int kUnrollVectors = 32;    // of eight neighbouring columns, of a block

struct UnrollParams {
  MetAxis axis[3];
  FastDivide column_blocks;
  int taps, columns, channels;
  int image;             // outputs of a channel
  int positions, steps;  // of the input; of a block
  const void* source;
  void* target;
  float* partial;  // (blocks of positions, columns): sums for the bias; may be null
};

// What a position meets, and the element of its first tap's output in the first channel.
struct UnrollPlace {
  int64_t first;
  MetTaps met;

  __device__ UnrollPlace(const UnrollParams& p, int position) {
    const bool exists = position < p.positions;
    int n = exists ? position : 0;
    met = find_met_taps(p.axis, n, exists);
    first = static_cast<int64_t>(n) * p.channels * p.image +
            (static_cast<int64_t>(met.first[0]) * p.axis[1].out + met.first[1]) * p.axis[2].out + met.first[2];
  }
};

// Eight neighbouring columns of a position, kWide taps at a time, which are neighbours in memory.
template <typename T, int kWide>
__device__ __forceinline__ uint4 unroll_vector(const UnrollParams& p, const MetTap* taps, const UnrollPlace& place,
                                               int column) {
  using Part = Pack<T, kWide>;
  union {
    uint4 vector;
    Part part[8 / kWide];
  } eight;
  int channel = column / p.taps, tap = column - channel * p.taps;
  const T* source = static_cast<const T*>(p.source) + place.first + static_cast<int64_t>(channel) * p.image;
#pragma unroll
  for (int k = 0; k < 8 / kWide; ++k) {
    const MetTap of = taps[tap];
    eight.part[k] = place.met.meet(of) ? *reinterpret_cast<const Part*>(source + of.offset) : Part{};
    if ((tap += kWide) == p.taps) tap = 0, source += p.image;
  }
  return eight.vector;
}

// Adds what a block's threads have summed of their rows: a thread has eight columns.
__device__ __forceinline__ void add_columns(const UnrollParams& p, const float (&sum)[8], int first, int block,
                                            float* sums) {
  constexpr int kColumns = kUnrollVectors * 8;
  const int vector = threadIdx.x % kUnrollVectors, share = threadIdx.x / kUnrollVectors;
  __syncthreads();
#pragma unroll
  for (int k = 0; k < 8; ++k) sums[share * kColumns + k * kUnrollVectors + vector] = sum[k];
  __syncthreads();
  const int column = first + vector * 8 + share;
  if (column >= p.columns) return;
  float all = 0;
#pragma unroll
  for (int i = 0; i < kUnrollThreads / kUnrollVectors; ++i) all += sums[i * kColumns + share * kUnrollVectors + vector];
  p.partial[static_cast<int64_t>(block) * p.columns + column] = all;
}

// By warps, whose lanes have neighbouring positions; then rows leave, whole lines of memory at a time.
template <typename T, int kWide>
__device__ __forceinline__ void unroll(const UnrollParams& p, int block, char* staged) {
  static_assert(kUnrollThreads / kUnrollVectors == 8);
  __shared__ MetTap taps[kUnrollMaxTaps];
  fill_taps<kUnrollThreads>(p.axis, p.taps, taps);
  __syncthreads();
  int column_block = block;
  const int position_block = p.column_blocks(column_block);
  const int first = column_block * kUnrollVectors * 8, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  uint4* const tile = reinterpret_cast<uint4*>(staged);
  float sum[8] = {};
#pragma unroll 1
  for (int step = 0; step < p.steps; ++step) {
    const int begin = (position_block * p.steps + step) * kUnrollPositions;
    if (begin >= p.positions) break;
    const UnrollPlace place(p, begin + lane);
    uint4 value[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int column = first + (warp + i * 8) * 8;
      value[i] = column < p.columns ? unroll_vector<T, kWide>(p, taps, place, column) : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) tile[lane * kUnrollVectors + ((warp + i * 8) ^ (lane & 7))] = value[i];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = warp + i * 8, column = first + lane * 8;
      if (begin + row >= p.positions || column >= p.columns) continue;
      const uint4 vector = tile[row * kUnrollVectors + (lane ^ (row & 7))];
      *reinterpret_cast<uint4*>(static_cast<T*>(p.target) + static_cast<int64_t>(begin + row) * p.columns + column) =
          vector;
      if (p.partial == nullptr) continue;
      const Pack<T, 8>& eight = *reinterpret_cast<const Pack<T, 8>*>(&vector);
#pragma unroll
      for (int k = 0; k < 8; ++k) sum[k] += to_accumulator(eight.value[k]);
    }
    __syncthreads();
  }
  if (p.partial != nullptr) add_columns(p, sum, first, position_block, reinterpret_cast<float*>(staged));
}

// `blocks` unroll, then blocks pack the weight, where it is not aligned, and the input.
template <typename T, int kWide>
__global__ void __launch_bounds__(kUnrollThreads)
    gemm_unroll_kernel(const __grid_constant__ UnrollParams p, const __grid_constant__ GradientPackParams weight,
                       const __grid_constant__ GradientPackParams input, int blocks) {
  static_assert(kUnrollThreads == kGradientPackThreads);
  __shared__ __align__(1024) char staged[kGradientPackPositions * 33 * 4];
  let_next_grid_begin();
  const int block = static_cast<int>(blockIdx.x);
  if (block < blocks) {
    unroll<T, kWide>(p, block, staged);
  } else if (block - blocks < weight.weight_blocks) {
    pack_weights<T>(weight, block - blocks, reinterpret_cast<T*>(staged));
  } else {
    turn_positions<T>(input, block - blocks - weight.weight_blocks, staged);
  }
}

struct UnrollBiasParams {
  const float* partial;
  int columns, taps, channels, blocks;
  uint32_t counted[kUnrollMaxTaps / 32];  // taps that meet every output once, together: a bit each
  const void* grad;
  Strides out;
  int64_t batch, positions;
  void* bias;
};

// Of the bias, where the sum is not finite.
template <typename T>
__device__ __noinline__ float sum_channel(const UnrollBiasParams& p, int channel) {
  double sum = 0;
  for (int64_t n = 0; n < p.batch; ++n) {
    const T* const grad = static_cast<const T*>(p.grad) + n * p.out.batch + channel * p.out.channel;
    for (int64_t i = 0; i < p.positions; ++i) sum += static_cast<double>(to_accumulator(grad[i * p.out.axis[2]]));
  }
  return static_cast<float>(sum);
}

// A block a channel.
template <typename T>
__global__ void __launch_bounds__(kUnrollThreads) unroll_bias_kernel(const __grid_constant__ UnrollBiasParams p) {
  __shared__ float sums[kUnrollThreads / 32];
  let_next_grid_begin();
  const int channel = static_cast<int>(blockIdx.x), lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  wait_for_previous_grid();
  float sum = 0;
#pragma unroll 4
  for (int i = threadIdx.x; i < p.blocks * p.taps; i += kUnrollThreads) {
    const int block = i / p.taps, t = i - block * p.taps;
    const float part = __ldcg(p.partial + static_cast<int64_t>(block) * p.columns + channel * p.taps + t);
    if (p.counted[t / 32] >> t % 32 & 1) sum += part;
  }
#pragma unroll
  for (int apart = 16; apart > 0; apart /= 2) sum += __shfl_xor_sync(~0u, sum, apart);
  if (lane == 0) sums[warp] = sum;
  __syncthreads();
  if (threadIdx.x > 0) return;
  for (int i = 1; i < kUnrollThreads / 32; ++i) sum += sums[i];
  if (!is_finite(sum)) sum = sum_channel<T>(p, channel);
  static_cast<T*>(p.bias)[channel] = from_accumulator<T>(sum);
}

}  // namespace fastconvt::cuda
