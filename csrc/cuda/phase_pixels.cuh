// The phase GEMM on tensor copies, device side. See core/phase_pixels.h. Blocks are persistent: one thread copies what
// all their items need, two warpgroups multiply and store.
#pragma once

#include "phase_pixels_copy.cuh"
#include "phase_pixels_rows.cuh"

namespace fastconvt::cuda {

// The tensors that copies read: inputs, channels innermost, and weights, output channels innermost.
struct PhasePixelsMaps {
  CUtensorMap input, weight;
};

// The sums of a warpgroup's phase in one pass: all chunks of input channels, in each all taps. The products of a tap
// are in straight code, with their commitment, so that nothing waits for them but what must: the next tap's are in
// flight when those of the one before have ended, and its places are handed back.
template <typename T, int kSteps, int kRowTiles, int kColumnTiles>
__device__ __forceinline__ void multiply_pass(const PhasePixelsParams& p, uint32_t base, const PhasePixelsWalk& walk,
                                              int count, int taps, uint64_t row_form, uint64_t column_form,
                                              const uint32_t (&cells)[kRowTiles], int part, BarrierRing& stages,
                                              BarrierRing& buffers, float (&sum)[kRowTiles][kColumnTiles][4]) {
  constexpr int kColumnStep = kColumnTiles == 4 ? 64 : 128;  // 16 input channels, in units of 16 bytes
  const PhasePixelsBarriers barriers{base};
  const bool arrives = threadIdx.x % 32 == 0;
  uint32_t done_stage = 0, done_buffer = 0;  // barriers of what the tap before was the last to read
  const auto release = [&] {
    if (arrives && done_stage != 0) mbarrier_arrive(done_stage);
    if (arrives && done_buffer != 0) mbarrier_arrive(done_buffer);
  };
  int add = 0;
#pragma unroll 1
  for (int chunk = 0; chunk < p.chunks; ++chunk) {
    PhasePixelsTap at{walk.offset, 0, 0};
    const uint32_t buffer = buffers.place * p.buffer_bytes;
    uint32_t weights = 0;
    int in_stage = 0;
    mbarrier_wait(barriers.loaded(buffers.place), buffers.parity);
#pragma unroll 1
    for (int tap = 0; tap < taps; ++tap) {
      if (in_stage == 0) {
        weights = base + p.weights_at + stages.place * p.stage_bytes + part * p.taps_per_stage * p.unit_bytes;
        mbarrier_wait(barriers.full(stages.place), stages.parity);
      }
      if (tap < count) {
        const uint32_t offset = (buffer + at.offset) >> 4, unit = weights >> 4;
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kSteps; ++k)
#pragma unroll
          for (int i = 0; i < kRowTiles; ++i) {
            start_shared_product<T>(sum[i], operand(row_form, cells[i] + offset + 2 * k),
                                    operand(column_form, unit + kColumnStep * k), k == 0 ? add : 1);
          }
        wgmma_commit();
        wgmma_wait<1>();
        add = 1;
      } else {
        wgmma_wait<0>();
      }
      release();
      at.advance(walk);
      weights += p.weight_tap_bytes;
      const bool last = tap + 1 == taps;
      done_stage = 0;
      if (++in_stage == p.taps_per_stage || last) {
        done_stage = barriers.empty(stages.place);
        stages.advance(p.stages);
        in_stage = 0;
      }
      done_buffer = last ? barriers.free(buffers.place) : 0;
    }
    buffers.advance(p.buffers);
  }
  wgmma_wait<0>();
  release();
}

// Makes and stores what all tasks ask for.
template <typename T, int kRowTiles, int kColumnTiles, int kWarpgroups, bool kRectify>
__device__ __forceinline__ void multiply_tasks(const PhasePixelsShared& shared) {
  constexpr int kColumns = kColumnTiles * 8, kThreads = kWarpgroups * 128;
  const PhasePixelsParams& p = shared.p;
  const uint32_t base = shared_address(shared.bytes);
  const PhasePixelsBarriers barriers{base};
  const int warpgroup = kWarpgroups == 1 ? 0 : __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0);
  const bool of_cells = p.split == PhaseTmaSplit::kCells;
  const int first_cell = of_cells ? warpgroup * kRowTiles * 64 : 0;
  const int first_column = p.split == PhaseTmaSplit::kChannels ? warpgroup * kColumns : 0;
  const auto epilogue = make_epilogue<T, kRectify>(p.bias, p.rectify);
  const uint64_t row_form = operand_form(p.swizzle, p.group_bytes, 16);
  const uint64_t column_form = operand_form(kColumns == 32 ? 2 : 1, p.weight_group_bytes, p.weight_block_bytes);
  uint32_t cells[kRowTiles];
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
    const PhasePixelsCell cell = find_cell(p, first_cell + i * 64);
    int at = cell.at[0] * p.batch_bytes;
#pragma unroll
    for (int a = 0; a < 3; ++a) at += cell.at[a + 1] * p.axis[a].step_bytes;
    cells[i] = (base + p.inputs_at + at) >> 4;
  }
  int places[kPhasePixelsOwnRows<kRowTiles>];
  int rows[kRowTiles][2];
  find_places<kRowTiles>(p, first_cell, places);
  find_rows(p, first_cell, rows);
  BarrierRing ring, stages, buffers;
  for (;; ring.advance(2)) {
    mbarrier_wait(barriers.posted(ring.place), ring.parity);
    const PhasePixelsTask& task = shared.tasks()[ring.place];
    if (task.group < 0) break;
    const PhasePixelsShare& share = task.share[warpgroup];
    const float* const terms = shared.terms(ring.place);
    if (task.taps > 0) {
      float sum[kRowTiles][kColumnTiles][4];
      const PhasePixelsWalk walk = share.walk;
      const int count = of_cells ? task.share[0].count : share.count, taps = task.taps;
      if (count == 0) {
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
          for (int j = 0; j < kColumnTiles; ++j)
#pragma unroll
            for (int q = 0; q < 4; ++q) sum[i][j][q] = 0;
      }
      const auto multiply = [&](auto steps) {
        multiply_pass<T, decltype(steps)::value>(p, base, walk, count, taps, row_form, column_form, cells,
                                                 of_cells ? 0 : warpgroup, stages, buffers, sum);
      };
      if (p.chunk == 64) {
        multiply(std::integral_constant<int, 4>{});
      } else if (p.chunk == 32) {
        multiply(std::integral_constant<int, 2>{});
      } else {
        multiply(std::integral_constant<int, 1>{});
      }
      if (kColumns < 128 && p.permuted) {
        store_sums<T>(p, task, share, sum, epilogue, rows, first_cell, first_column, terms);
      } else {
        const int staged_at = p.staging_at + threadIdx.x / 32 * (16 * kRowTiles) * p.staging_pitch;
        const bool good = stage_rows<T>(p, sum, epilogue, terms + first_column, base + staged_at);
        store_rows<T, kRowTiles, kColumns>(shared, task, share, places, first_cell, first_column, staged_at, good);
      }
    } else {
      store_constants<T, kThreads>(p, task, task.share[0], epilogue, terms);
      if (p.split == PhaseTmaSplit::kPhases) {
        store_constants<T, kThreads>(p, task, task.share[1], epilogue, terms);
      }
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(barriers.done(ring.place));
  }
  wait_for_stores();
}

template <typename T, int kRowTiles, int kColumnTiles, int kWarpgroups, bool kRectify>
__global__ void __launch_bounds__(kPhasePixelsThreads<kWarpgroups>, 2 / kWarpgroups)
    phase_pixels_kernel(const __grid_constant__ PhasePixelsParams p, const __grid_constant__ PhasePixelsMaps maps) {
#ifdef FASTCONVT_PHASE_PIXELS
  using Registers = PhasePixelsRegisters<kWarpgroups>;
  static_assert(sizeof(PhasePixelsTask) <= kPhasePixelsTaskBytes);
  extern __shared__ unsigned char unaligned_bytes[];
  const PhasePixelsShared shared{unaligned_bytes + (-shared_address(unaligned_bytes) & 1023), p};
  if (threadIdx.x == kWarpgroups * 128) {
    prefetch_map(&maps.input);
    if (p.packed_weight == nullptr) prefetch_map(&maps.weight);
  }
  if (threadIdx.x == 0) {
    const PhasePixelsBarriers barriers{shared_address(shared.bytes)};
    for (int i = 0; i < kPhasePixelsMaxStages; ++i) {
      mbarrier_init(barriers.full(i), 1);
      mbarrier_init(barriers.empty(i), kWarpgroups * 4);
    }
    for (int i = 0; i < kPhasePixelsMaxBuffers; ++i) {
      mbarrier_init(barriers.loaded(i), 1);
      mbarrier_init(barriers.free(i), kWarpgroups * 4);
    }
    for (int i = 0; i < 2; ++i) {
      mbarrier_init(barriers.posted(i), 1);
      mbarrier_init(barriers.done(i), kWarpgroups * 4 + 2);
    }
    fence_shared_writes();
  }
  __syncthreads();
  if (threadIdx.x < kWarpgroups * 128) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Registers::kMultiplier));
    multiply_tasks<T, kRowTiles, kColumnTiles, kWarpgroups, kRectify>(shared);
  } else {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Registers::kCopier));
    const int warp = threadIdx.x / 32 - kWarpgroups * 4;
    if (warp == 0) {
      if (threadIdx.x % 32 == 0) copy_inputs(shared, &maps.input);
    } else if (warp <= 2) {
      post_tasks(shared, BiasEpilogue<T>{static_cast<const T*>(p.bias)}, warp - 1);
    } else if (threadIdx.x % 32 == 0) {
      if (p.packed_weight != nullptr) {
        copy_weights<true>(shared, nullptr);
      } else {
        copy_weights<false>(shared, &maps.weight);
      }
    }
  }
#endif
}

}  // namespace fastconvt::cuda
