// The forward of dense layers as an implicit matrix product on mma.sync, phase by phase: rows are cells of a box,
// columns output channels, the inner dimension is input channels by the phase's taps. Half of the warps stage the
// input, the others multiply, as in the input's gradient; a first kernel lays the weights out as operands.
#pragma once

#include "../core/dense.h"
#include "dense_gradient_steps.cuh"
#include "dense_store.cuh"
#include "dense_weights.cuh"

namespace fastconvt::cuda {

// Of granules that are multiplied, kind after kind.
__device__ __forceinline__ void fill_dense_steps(const DenseForward& f, int* steps) {
  const DenseParams& p = f.phase;
  for (int i = threadIdx.x; i < 2 * p.steps * f.kinds; i += blockDim.x) {
    const int kind = i / (2 * p.steps), granule = i - kind * 2 * p.steps;
    int taps[3], left = kind;
#pragma unroll
    for (int a = 2; a >= 0; --a) {
      const bool fewer = f.axis[a].fewer > 0 && left >= f.axis[a].fewer;
      if (fewer) left -= f.axis[a].fewer;
      taps[a] = p.axis[a].taps - fewer;
    }
    const int all = taps[0] * taps[1] * taps[2], plane = granule / all;
    int tap = granule - plane * all;
    const int w = tap % taps[2];
    tap /= taps[2];
    const int h = tap % taps[1], d = tap / taps[1];
    const int place = (d * p.axis[0].turn * p.axis[1].extent + h * p.axis[1].turn) * p.columns + w * p.axis[2].turn;
    steps[i] = plane < p.chunk_planes ? plane * p.plane_bytes + place * 16 : 0;
  }
}

template <typename T>
__device__ __forceinline__ void produce_dense(const DenseForward& f, const DenseTables& tables, uint32_t barriers,
                                              char* stages) {
  const DenseParams& p = f.phase;
  const int thread = threadIdx.x - kDenseConsumers<T>;
  int stage = 0, round = 0;
  for (int index = blockIdx.x; index < p.tiles; index += gridDim.x) {
    const DenseTile tile(f, index);
    const DensePhase phase(f, tile.phase);
    if (phase.steps == 0) continue;
    const T* input = static_cast<const T*>(p.grad.data) + tile.box.batch * p.grad.batch + tile.group * p.grad.group;
    const int64_t block = (static_cast<int64_t>(tile.group) * p.in_blocks + tile.block) * f.phases + tile.phase;
    const char* weights = static_cast<const char*>(p.workspace) + block * p.chunks * p.weight_bytes;
    for (int chunk = 0; chunk < p.chunks; ++chunk, weights += p.weight_bytes) {
      int at[3], tap[3], tap_block = chunk / p.plane_chunks;
      const int first = (chunk - tap_block * p.plane_chunks) * p.chunk_planes;
      find_taps(p, tap_block, tap);
      for (int a = 0; a < 3; ++a) at[a] = tile.box.at[a] + phase.start[a] + tap[a] * p.axis[a].dilation;
      if (round > 0) dense_wait(kDenseEmpty + stage, p.threads);
      char* target = stages + stage * p.stage_bytes;
      if (!p.resident) {
        copy_words(weights, target + p.chunk_planes * p.plane_bytes, phase.steps * f.step_bytes, thread, p.producers);
      }
      stage_gradients<T>(p, tables, input + first * p.grad.plane, p.grad.channels - first * p.grad.plane_channels,
                         at[0], at[1], at[2], thread, target);
      arrive_full(barriers + 8 * stage);
      if (++stage == p.stages) stage = 0, round = 1;
    }
  }
}

template <typename T, DensePrecision kPrecision, int kRows, int kColumns, bool kRectify>
__device__ __forceinline__ void consume_dense(const DenseForward& f, const DenseTables& tables, uint32_t barriers,
                                              char* weights, char* stages, float4* room, float4* totals) {
  const DenseParams& p = f.phase;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int warps = p.warps_m * p.warps_n;
  const int warp_k = warp / warps, warp_mn = warp % warps, warp_n = warp_mn % p.warps_n, warp_m = warp_mn / p.warps_n;
  const int first_row = warp_m * kRows * 16;
  const int columns = p.warps_n * kColumns;
  DenseOperands<kRows> operands;
  operands.weight_step = columns * 32 * kDenseEntry<kPrecision>;
#pragma unroll
  for (int m = 0; m < kRows; ++m) {
    const int cell = max(0, tables.boxes[first_row + m * 16 + lane % 16]);
    operands.rows[m] = (((cell >> 20) * p.axis[1].extent + (cell >> 10 & 1023)) * p.columns + (cell & 1023)) * 16;
  }
  const int own_weights = (warp_n * kColumns * 32 + lane) * kDenseEntry<kPrecision>;
  int stage = 0, parity = 0;
  for (int index = blockIdx.x; index < p.tiles; index += gridDim.x) {
    const DenseTile tile(f, index);
    const DensePhase phase(f, tile.phase);
    operands.steps = tables.steps + phase.kind * 2 * p.steps;
    DenseSums<kRows, kColumns> sums = {};
    int until_flush = p.run;
    bool flushed = false;
    const int chunks = phase.steps == 0 ? 0 : p.chunks;
    for (int chunk = 0; chunk < chunks; ++chunk) {
      mbarrier_wait(barriers + 8 * stage, parity);
      const char* source = stages + stage * p.stage_bytes;
      operands.stage = shared_address(source);
      operands.weights = (p.resident ? weights + (tile.phase * p.chunks + chunk) * p.weight_bytes
                                     : source + p.chunk_planes * p.plane_bytes) +
                         own_weights;
      add_dense_steps<T, kPrecision, kRows, kColumns>(operands, warp_k, p.warps_k, phase.steps, sums);
      dense_arrive(kDenseEmpty + stage, p.threads);
      if (++stage == p.stages) stage = 0, parity ^= 1;
      if constexpr (kPrecision == DensePrecision::kFloat32) {
        if (--until_flush != 0 || chunk + 1 == chunks) continue;
        flush_dense<kRows, kColumns>(totals, !flushed, false, sums);
        flushed = true, until_flush = p.run;
      }
    }
    if constexpr (kPrecision == DensePrecision::kFloat32) {
      if (flushed) flush_dense<kRows, kColumns>(totals, false, true, sums);
    }
    if (p.warps_k > 1) reduce_dense<kRows, kColumns>(kDenseConsumers<T>, warps, p.warps_k, warp_mn, warp_k, room, sums);
    if (warp_k == 0) {
      store_dense<T, kRows, kColumns, kRectify>(f, tables, index, first_row, warp_n * kColumns * 8, sums);
    }
    // Before the room is used again.
    if (p.warps_k > 1) dense_wait(kDenseTeam, kDenseConsumers<T>);
  }
}

template <typename T, DensePrecision kPrecision, int kRows, int kColumns, bool kRectify>
__global__ void __launch_bounds__(kDenseConsumers<T> + 32 * dense_producers(kPrecision == DensePrecision::kTf32),
                                  dense_gradient_blocks(sizeof(T)))
    dense_kernel(const __grid_constant__ DenseForward f) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  extern __shared__ __align__(16) char shared[];
  const DenseParams& p = f.phase;
  const DenseTables tables(p, shared);
  tables.fill(p);
  fill_dense_rows(f, tables);
  fill_dense_steps(f, tables.steps);
  const uint32_t barriers = shared_address(shared);
  if (threadIdx.x == 0) init_full(barriers, p.producers);
  const int reduction = (p.warps_k - 1) * p.warps_m * p.warps_n * kRows * kColumns * 512;
  float4* const room = reinterpret_cast<float4*>(shared + p.table_bytes - reduction);
  float4* const totals = room - (p.run > 0 ? kRows * kColumns * kDenseConsumers<T> : 0);
  char* const weights = shared + p.table_bytes;
  const int weight_bytes = p.resident ? f.phases * p.chunks * p.weight_bytes : 0;
  wait_for_previous_grid();  // for the weights
  if (p.resident) {
    copy_words(static_cast<const char*>(p.workspace), weights, weight_bytes, threadIdx.x, p.threads);
    wait_for_copies();
  }
  __syncthreads();
  if (threadIdx.x >= kDenseConsumers<T>) {
    produce_dense<T>(f, tables, barriers, weights + weight_bytes);
  } else {
    consume_dense<T, kPrecision, kRows, kColumns, kRectify>(f, tables, barriers, weights, weights + weight_bytes, room,
                                                            totals + threadIdx.x);
  }
#endif
}

}  // namespace fastconvt::cuda
