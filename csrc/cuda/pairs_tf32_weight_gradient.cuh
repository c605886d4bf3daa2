// The weight's gradient of pairs: rows are terms, words of two, columns input channels, the inner dimension
// positions. A stage holds two runs: words of the output's gradient by 16 positions each, and inputs by 16
// positions, as they lie.
#pragma once

#include "pairs_tf32_gradients_repair.cuh"

namespace fastconvt::cuda {

template <int kTiles>
constexpr int kPairsWords = kTf32Rows<kTiles> * 64;

// Two lanes copy a run each.
template <int kTiles>
__device__ __forceinline__ void copy_weight_items(const PairsTf32Params& p, const PairsTf32Maps& maps, uint32_t base,
                                                  int block) {
  const PairsBarriers<kTiles> barriers{base};
  const int lane = threadIdx.x % 32;
  BarrierRing ring;
  for (int item = block; item < p.kinds * p.splits; item += p.blocks - p.input_blocks) {
    const int split = item / p.kinds, kind = item - split * p.kinds;
    const int column = kind / p.row_blocks * kTiles * 8, channel = kind % p.row_blocks * p.row_channels;
    for (int i = split; i < p.steps.count; i += p.splits, ring.advance(kPairsStages<kTiles>)) {
      const uint32_t to = barriers.stage(ring.place), full = barriers.full(ring.place);
      mbarrier_wait(barriers.empty(ring.place), ring.parity ^ 1);
      if (lane == 0) mbarrier_arrive_expecting(full, kPairsStage<kTiles>);
      if (lane < 2) {
        PairsRun run(p, 2 * i + lane, p.steps.of_row);
        const int row = (run.z * p.height + run.y) * p.width;
        const uint32_t inputs = to + kPairsRows<kTiles> + lane * (kTiles * 512);
        if (p.wide) {  // both runs are neighbours: one copy of 128 bytes a channel
          if (lane == 0) load_box(inputs, &maps.inputs, run.x, run.y, run.z, column, run.n, full);
        } else if (p.flat) {  // copies begin at multiples of 16 bytes; what lies outside the row meets zeros
          run.x = (row + run.x) / 4 * 4 - row;
          load_box(inputs, &maps.inputs, row + run.x, 0, 0, column, run.n, full);
        } else {
          load_box(inputs, &maps.inputs, run.x, run.y, run.z, column, run.n, full);
        }
        load_box(to + lane * (kPairsRows<kTiles> / 2), &maps.grads_of_rows, 2 * run.x, run.y * p.step[0] - p.padding[0],
                 run.z * p.step[1] - p.padding[1], channel, run.n, full);
      }
      __syncwarp();
    }
  }
}

// Makes again what a lane has stored and is not finite.
template <int kTiles>
__device__ __noinline__ void repair_weight_sums(const PairsTf32Params& p, int column, int word) {
  for (int i = 0; i < kTiles * 8; ++i) {
    const int channel = column + i / 8 * 8 + threadIdx.x % 4 * 2 + i % 2;
    const int term = 2 * (word + (kTf32Rows<kTiles> == 2 ? i / 4 % 2 * 8 : 0)) + i / 2 % 2;
    if (channel >= p.in_channels || term >= p.inner) continue;
    float* const at = p.grad_weight + static_cast<int64_t>(channel) * p.inner + term;
    if (!is_finite(*at)) *at = pairs_weight_gradient_at(p, channel, term);
  }
}

template <int kTiles>
__device__ __forceinline__ void store_weight_sums(const PairsTf32Params& p, int split, int column, int word,
                                                  const float (&sum)[kTf32Rows<kTiles>][kTiles][4]) {
  constexpr bool kTwo = kTf32Rows<kTiles> == 2;
  const int t = threadIdx.x % 4;
  const bool whole =
      column + kTiles * 8 <= p.in_channels && word / kPairsWords<kTiles> < p.inner / (2 * kPairsWords<kTiles>);
  float probe = 0;
  float* const to = p.splits == 1 ? p.grad_weight : p.partial + static_cast<int64_t>(split) * p.in_channels * p.inner;
#pragma unroll
  for (int j = 0; j < kTiles; ++j)
#pragma unroll
    for (int c = 0; c < 2; ++c)
#pragma unroll
      for (int r = 0; r < kTf32Rows<kTiles>; ++r) {
        const int channel = column + j * 8 + 2 * t + c, term = 2 * (word + r * 8);
        const float2 pair = kTwo ? make_float2(sum[0][j][r * 2 + c], sum[kTwo ? 1 : 0][j][r * 2 + c])
                                 : make_float2(sum[0][j][c], sum[0][j][2 + c]);
        store_if(whole || (channel < p.in_channels && term < p.inner),
                 to + static_cast<int64_t>(channel) * p.inner + term, pair);
        probe = fmaf(pair.x, 0.f, fmaf(pair.y, 0.f, probe));
      }
  if (probe != 0 && p.splits == 1) repair_weight_sums<kTiles>(p, column, word);
}

template <int kTiles>
__device__ __forceinline__ void multiply_weight_items(const PairsTf32Params& p, uint32_t base, int block) {
  const PairsBarriers<kTiles> barriers{base};
  const int warpgroup = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0), warp = threadIdx.x / 32 % 4;
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int key = g % 4 * 2 + g / 4;  // the word of eight: half a warp's rows meet no bank twice
  // Two sums of 64 rows: one of each tap, words 8 apart in a lane. One: words of eight with both taps.
  constexpr bool kTwo = kTf32Rows<kTiles> == 2;
  const int row = warpgroup * (kTwo ? 64 : 32) + warp * (kTwo ? 16 : 8) + key;
  uint32_t word[2][2];  // of eight positions each: the first and the second four
#pragma unroll
  for (int k = 0; k < 2; ++k)
#pragma unroll
    for (int h = 0; h < 2; ++h) word[k][h] = row * 128 + (((k * 4 + h * 2 + t / 2) ^ key) << 4) + t % 2 * 8;
  const uint32_t form = p.wide ? gradient_operand_form(1, 1024) : gradient_operand_form(2, 512);
  const int second = p.wide ? 4 : kTiles * 32;  // from the first run's inputs to the others, in units of 16 bytes
  BarrierRing ring;
  for (int item = block; item < p.kinds * p.splits; item += p.blocks - p.input_blocks) {
    const int split = item / p.kinds, kind = item - split * p.kinds;
    const int column = kind / p.row_blocks * kTiles * 8, first = kind % p.row_blocks * kPairsWords<kTiles>;
    const bool counts = p.bias_partial != nullptr && column == 0;
    float sum[kTf32Rows<kTiles>][kTiles][4] = {}, bias[2][2] = {};
#pragma unroll 1
    for (int i = split; i < p.steps.count; i += p.splits, ring.advance(kPairsStages<kTiles>)) {
      const uint32_t at = barriers.stage(ring.place);
      mbarrier_wait(barriers.full(ring.place), ring.parity);
      uint32_t a[4][kTf32Rows<kTiles>][4];
#pragma unroll
      for (int k = 0; k < 4; ++k)
#pragma unroll
        for (int h = 0; h < 2; ++h)
#pragma unroll
          for (int r = 0; r < (kTwo ? 2 : 1); ++r) {
            const uint32_t from = at + k / 2 * (kPairsRows<kTiles> / 2) + word[k % 2][h] + r * 1024;
            load_pair(from, a[k][0][h * 2 + r], kTwo ? a[k][kTwo ? 1 : 0][h * 2 + r] : a[k][0][h * 2 + 1]);
          }
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const uint64_t columns = gradient_operand(form, ((at + kPairsRows<kTiles>) >> 4) + k / 2 * second + k % 2 * 2);
#pragma unroll
        for (int m = 0; m < kTf32Rows<kTiles>; ++m) start_tf32_product(sum[m], a[k][m], columns);
      }
      wgmma_commit();
      if (counts) {
#pragma unroll
        for (int k = 0; k < 4; ++k)
#pragma unroll
          for (int m = 0; m < kTf32Rows<kTiles>; ++m)
#pragma unroll
            for (int r = 0; r < 2; ++r) bias[m][r] += __uint_as_float(a[k][m][r]) + __uint_as_float(a[k][m][2 + r]);
      }
      wgmma_wait<0>();
      __syncwarp();
      if (lane == 0) mbarrier_arrive(barriers.empty(ring.place));
    }
    store_weight_sums(p, split, column, first + row, sum);
    if (counts) {
#pragma unroll
      for (int m = 0; m < kTf32Rows<kTiles>; ++m)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          float b = bias[m][r];
          b += __shfl_xor_sync(~0u, b, 1);
          b += __shfl_xor_sync(~0u, b, 2);
          const int term = kTwo ? 2 * (first + row + r * 8) + m : 2 * (first + row) + r;
          if (t == 0 && term < p.inner) p.bias_partial[static_cast<int64_t>(split) * p.inner + term] = b;
        }
    }
  }
}

}  // namespace fastconvt::cuda
