// The input's gradient of pairs: rows are positions, runs of an item, columns input channels, terms (output channel,
// tap) in the weight's order. A stage holds 32 terms: of every run 16 words of rows (128 bytes each), and the lines of
// the weight, as they lie.
#pragma once

#include "pairs_tf32_gradients_repair.cuh"

namespace fastconvt::cuda {

template <int kTiles>
constexpr int kPairsItemRuns = kTf32Rows<kTiles> * 8;

// Runs are copied by a lane each, weights by another one.
template <int kTiles>
__device__ __forceinline__ void copy_input_items(const PairsTf32Params& p, const PairsTf32Maps& maps, uint32_t base,
                                                 int block) {
  const PairsBarriers<kTiles> barriers{base};
  const int lane = threadIdx.x % 32;
  BarrierRing ring;
  for (int item = block; item < p.items; item += p.input_blocks) {
    const int first = item / p.column_blocks, column = (item - first * p.column_blocks) * kTiles * 8;
    const PairsRun run(p, first * kPairsItemRuns<kTiles> + lane % kPairsItemRuns<kTiles>, p.runs.of_row);
    const int x = 2 * run.x, y = run.y * p.step[0] - p.padding[0], z = run.z * p.step[1] - p.padding[1];
    for (int c = 0; c < p.chunks; ++c, ring.advance(kPairsStages<kTiles>)) {
      const uint32_t to = barriers.stage(ring.place), full = barriers.full(ring.place);
      mbarrier_wait(barriers.empty(ring.place), ring.parity ^ 1);
      if (lane == kPairsItemRuns<kTiles>) {
        mbarrier_arrive_expecting(full, kPairsStage<kTiles>);
        load_lines(to + kPairsRows<kTiles>, &maps.weights, c * 32, column, full);
      }
      if (lane < kPairsItemRuns<kTiles>) {
        load_box(to + lane * 2048, &maps.grads_of_chunk, x, y, z, c * p.chunk_channels, run.n, full);
      }
      __syncwarp();
    }
  }
}

// Lanes 4 apart exchange halves: then the one of even g has four neighbouring positions of column 2 t, the other one of
// column 2 t + 1.
__device__ __forceinline__ float4 neighbours_of(const float (&d)[4], bool odd) {
  const float first = __shfl_xor_sync(~0u, odd ? d[0] : d[1], 4), second = __shfl_xor_sync(~0u, odd ? d[2] : d[3], 4);
  return odd ? make_float4(first, d[1], second, d[3]) : make_float4(d[0], first, d[2], second);
}

// What a lane stores of a run: four positions from x on, of every eighth channel.
struct PairsStore {
  int x, channel;
  bool odd, exists;
  float* to;

  __device__ __forceinline__ PairsStore(const PairsTf32Params& p, const PairsRun& run, int column) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    odd = g % 2 != 0;
    x = run.x + g / 2 * 4, channel = column + 2 * t + (odd ? 1 : 0);
    exists = run.n < p.batch && x < p.width;
    to = p.grad_input + (static_cast<int64_t>(run.n) * p.in_channels + channel) * p.image +
         (run.z * p.height + run.y) * p.width + x;
  }
};

// Returns 0 if everything is finite.
template <int kTiles>
__device__ __forceinline__ float store_input_run(const PairsTf32Params& p, const PairsRun& run, int column,
                                                 const float (&sum)[kTiles][4]) {
  const PairsStore store(p, run, column);
  float probe = 0;
#pragma unroll
  for (int j = 0; j < kTiles; ++j) {
    const float4 v = neighbours_of(sum[j], store.odd);
    if (!store.exists || store.channel + j * 8 >= p.in_channels) continue;
    float* const at = store.to + static_cast<int64_t>(j * 8) * p.image;
    if (p.vectors && p.stream) {
      __stcs(reinterpret_cast<float4*>(at), v);
    } else if (p.vectors) {
      *reinterpret_cast<float4*>(at) = v;
    } else {
      *reinterpret_cast<float2*>(at) = make_float2(v.x, v.y);
      if (store.x + 2 < p.width) *reinterpret_cast<float2*>(at + 2) = make_float2(v.z, v.w);
    }
    probe = fmaf(v.x, 0.f, fmaf(v.y, 0.f, fmaf(v.z, 0.f, fmaf(v.w, 0.f, probe))));
  }
  return probe;
}

// Makes again what the lane has stored and is not finite.
template <int kTiles>
__device__ __noinline__ void repair_input_run(const PairsTf32Params& p, int number, int column) {
  const PairsRun run(p, number, p.runs.of_row);
  const PairsStore store(p, run, column);
  if (!store.exists) return;
  for (int j = 0; j < kTiles && store.channel + j * 8 < p.in_channels; ++j) {
    for (int i = 0; i < 4 && store.x + i < p.width; ++i) {
      float* const at = store.to + static_cast<int64_t>(j * 8) * p.image + i;
      if (!is_finite(*at)) *at = pairs_input_gradient_at(p, run.n, store.channel + j * 8, run.z, run.y, store.x + i);
    }
  }
}

template <int kTiles>
__device__ __forceinline__ void multiply_input_items(const PairsTf32Params& p, uint32_t base, int block) {
  const PairsBarriers<kTiles> barriers{base};
  const int warpgroup = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0), warp = threadIdx.x / 32 % 4;
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  constexpr int kRows = kTf32Rows<kTiles>;
  const int own = warpgroup * kRows * 4 + warp;  // the first run; the second is four further
  // Row g of a warp's 16 is position 4 (g / 2) + g % 2 of the run, row g + 8 that plus 2. Word 4 k + 2 i + t / 2 has
  // terms t + 4 i of step k. The swizzle exchanges 16 bytes by the word's number, so it repeats every two steps.
  uint32_t word[2][2];
#pragma unroll
  for (int k = 0; k < 2; ++k)
#pragma unroll
    for (int i = 0; i < 2; ++i)
      word[k][i] =
          own * 2048 + (i * 2 + t / 2) * 128 + (((g & 6) ^ (k * 4 + i * 2 + t / 2)) << 4) + g % 2 * 8 + t % 2 * 4;
  const uint32_t form = gradient_operand_form(1, 1024);
  BarrierRing ring;
  for (int item = block; item < p.items; item += p.input_blocks) {
    float sum[kRows][kTiles][4] = {};
#pragma unroll 1
    for (int c = 0; c < p.chunks; ++c, ring.advance(kPairsStages<kTiles>)) {
      const uint32_t at = barriers.stage(ring.place);
      mbarrier_wait(barriers.full(ring.place), ring.parity);
      uint32_t a[4][kRows][4];
#pragma unroll
      for (int k = 0; k < 4; ++k)
#pragma unroll
        for (int m = 0; m < kRows; ++m)
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const uint32_t from = at + word[k % 2][i];
            a[k][m][i * 2] = load_word(from + k * 512 + m * 8192);
            a[k][m][i * 2 + 1] = load_word((from ^ 16) + k * 512 + m * 8192);
          }
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < 4; ++k)
#pragma unroll
        for (int m = 0; m < kRows; ++m)
          start_tf32_product(sum[m], a[k][m], gradient_operand(form, ((at + kPairsRows<kTiles>) >> 4) + k * 2));
      wgmma_commit();
      wgmma_wait<0>();
      __syncwarp();
      if (lane == 0) mbarrier_arrive(barriers.empty(ring.place));
    }
    const int first = item / p.column_blocks, column = (item - first * p.column_blocks) * kTiles * 8;
    const int run = first * kPairsItemRuns<kTiles> + own;
    float probe = 0;
#pragma unroll
    for (int m = 0; m < kRows; ++m) {
      probe += store_input_run(p, PairsRun(p, run + m * 4, p.runs.of_row), column, sum[m]);
    }
    if (probe == 0) continue;
    for (int m = 0; m < kRows; ++m) repair_input_run<kTiles>(p, run + m * 4, column);
  }
}

}  // namespace fastconvt::cuda
