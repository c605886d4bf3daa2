// The phase GEMM on tensor copies, device side. See core/phase_tma.h. Blocks are persistent: one thread copies what all
// their items need, two warpgroups multiply and store.
#pragma once

#include "phase_tma_store.cuh"

namespace fastconvt::cuda {

// In shared memory: of every stage of weights and every buffer of inputs, that it is full and that it is empty.
struct PhaseTmaBarriers {
  uint32_t address;
  __device__ __forceinline__ uint32_t full(int stage) const { return address + stage * 8; }
  __device__ __forceinline__ uint32_t empty(int stage) const { return address + (kPhaseTmaMaxStages + stage) * 8; }
  __device__ __forceinline__ uint32_t loaded(int buffer) const { return full(2 * kPhaseTmaMaxStages + buffer); }
  __device__ __forceinline__ uint32_t free(int buffer) const {
    return full(2 * kPhaseTmaMaxStages + kPhaseTmaMaxBuffers + buffer);
  }
};

// The weights of a warpgroup's phase: units of one tap of one chunk.
__device__ __forceinline__ const char* find_weights(const PhaseTmaParams& p, const PhaseTmaItem& item,
                                                    const PhaseTmaPhase& phase, int warpgroup) {
  const bool channels = p.split == PhaseTmaSplit::kChannels;
  const int block = channels ? 2 * item.channel_block + warpgroup : item.channel_block;
  const int blocks = channels ? 2 * p.channel_blocks.divisor : p.channel_blocks.divisor;
  const int64_t unit = ((static_cast<int64_t>(item.group) * blocks + block) * p.taps + phase.before) * p.chunks;
  return static_cast<const char*>(p.packed_weight) + unit * p.unit_bytes;
}

// Copies what all items of the block need, each piece as soon as its place is free. One thread.
__device__ __forceinline__ void copy_items(const PhaseTmaParams& p, const CUtensorMap* map, uint32_t shared) {
  const PhaseTmaBarriers barriers{shared};
  const int units = p.split == PhaseTmaSplit::kCells ? 1 : 2;
  wait_for_launch_before();  // for the packed tensors
  PhaseGemmRing stages, buffers;
  for (int index = blockIdx.x; index < p.items; index += gridDim.x) {
    const PhaseTmaItem item = find_item(p, index);
    for (int pass = 0; pass < p.passes; ++pass) {
      const PhaseTmaPhase even = find_phase(p, item, pass, 0), odd = find_phase(p, item, pass, 1);
      const int taps = max(even.count, odd.count);
      if (taps == 0) continue;
      int start[3];
      find_start(p, even, odd, start);
      const char *weights = find_weights(p, item, even, 0), *odd_weights = find_weights(p, item, odd, 1);
      const int n = item.first[0], w = item.first[3] + start[2];
      int at[5] = {item.group * p.group_channels, p.batch_inner ? n : w, p.batch_inner ? w : n,
                   item.first[2] + start[1], item.first[1] + start[0]};
      for (int chunk = 0; chunk < p.chunks; ++chunk) {
        barrier_wait(barriers.free(buffers.place), buffers.parity ^ 1);
        barrier_expect(barriers.loaded(buffers.place), p.copied_bytes);
        tensor_load(shared + p.inputs_at + buffers.place * p.buffer_bytes, map, at, barriers.loaded(buffers.place));
        buffers.advance(p.buffers);
        at[0] += p.chunk;
        for (int tap = 0; tap < taps; tap += p.taps_per_stage, stages.advance(p.stages)) {
          const uint32_t full = barriers.full(stages.place);
          const uint32_t to = shared + p.weights_at + stages.place * p.stage_bytes;
          barrier_wait(barriers.empty(stages.place), stages.parity ^ 1);
          const int bytes = min(p.taps_per_stage, max(0, even.count - tap)) * p.unit_bytes;
          const int odd_bytes = units == 1 ? 0 : min(p.taps_per_stage, max(0, odd.count - tap)) * p.unit_bytes;
          barrier_expect(full, bytes + odd_bytes);
          if (bytes > 0) bulk_load(to, weights, bytes, full);
          if (odd_bytes > 0) bulk_load(to + p.taps_per_stage * p.unit_bytes, odd_weights, odd_bytes, full);
          weights += bytes, odd_weights += odd_bytes;
        }
      }
    }
  }
}

// The sums of a warpgroup's phase in one pass: all chunks of input channels, in each all taps. The products of a tap
// are in straight code, with their commitment, so that nothing waits for them but what must: the next tap's are in
// flight when those of the one before have ended, and its places are handed back.
template <typename T, int kSteps, int kRowTiles, int kColumnTiles>
__device__ __forceinline__ void multiply_pass(const PhaseTmaParams& p, const PhaseTmaBarriers& barriers,
                                              const PhaseTmaPhase& own, int taps, const int (&start)[3],
                                              uint32_t row_form, uint32_t column_form,
                                              const uint32_t (&cells)[kRowTiles], int part, uint32_t weights_at,
                                              PhaseGemmRing& stages, PhaseGemmRing& buffers,
                                              float (&sum)[kRowTiles][kColumnTiles][4]) {
  const bool arrives = threadIdx.x % 32 == 0;
  uint32_t done_stage = 0, done_buffer = 0;  // barriers of what the tap before was the last to read
  const auto release = [&] {
    if (arrives && done_stage != 0) barrier_arrive(done_stage);
    if (arrives && done_buffer != 0) barrier_arrive(done_buffer);
  };
  int add = 0;
#pragma unroll 1
  for (int chunk = 0; chunk < p.chunks; ++chunk) {
    PhaseTmaTaps at(p, own, start);
    const uint32_t buffer = buffers.place * p.buffer_bytes;
    uint32_t weights = 0;
    int in_stage = 0;
    barrier_wait(barriers.loaded(buffers.place), buffers.parity);
#pragma unroll 1
    for (int tap = 0; tap < taps; ++tap) {
      if (in_stage == 0) {
        weights = weights_at + stages.place * p.stage_bytes + part * p.taps_per_stage * p.unit_bytes;
        barrier_wait(barriers.full(stages.place), stages.parity);
      }
      if (tap < own.count) {
        const uint32_t offset = (buffer + at.offset) >> 4, unit = weights >> 4;
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kSteps; ++k)
#pragma unroll
          for (int i = 0; i < kRowTiles; ++i) {
            start_shared_product<T>(sum[i], operand(row_form, cells[i] + offset + 2 * k),
                                    operand(column_form, unit + 2 * k), k == 0 ? add : 1);
          }
        wgmma_commit();
        wgmma_wait<1>();
        add = 1;
      } else {
        wgmma_wait<0>();
      }
      release();
      at.advance();
      weights += p.unit_bytes;
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

// Makes and stores all items of the block.
template <typename T, int kRowTiles, int kColumnTiles, int kWarpgroups>
__device__ __forceinline__ void multiply_items(const PhaseTmaParams& p, unsigned char* shared_bytes, int* not_finite) {
  constexpr int kColumns = kColumnTiles * 8, kThreads = kWarpgroups * 128;
  const uint32_t shared = shared_address(shared_bytes);
  const PhaseTmaBarriers barriers{shared};
  PhaseTmaLine* const lines = reinterpret_cast<PhaseTmaLine*>(shared_bytes + p.lines_at);
  short* const table = reinterpret_cast<short*>(shared_bytes + p.table_at);
  T* const constants = reinterpret_cast<T*>(shared_bytes + p.constants_at);
  unsigned char* const staging = shared_bytes + p.staging_at;
  const int warpgroup = kWarpgroups == 1 ? 0 : __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0),
            lane = threadIdx.x % 32;
  const bool of_cells = p.split == PhaseTmaSplit::kCells, of_channels = p.split == PhaseTmaSplit::kChannels;
  const int columns = of_channels ? 2 * kColumns : kColumns;  // of the block
  const int first_cell = of_cells ? warpgroup * kRowTiles * 64 : 0,
            first_column = of_channels ? warpgroup * kColumns : 0;
  const BiasEpilogue<T> epilogue{static_cast<const T*>(p.bias)};
  const uint32_t row_form = operand_form(p.swizzle, p.group_bytes);
  const uint32_t column_form = operand_form(p.swizzle, p.chunk * 16);
  uint32_t cells[kRowTiles];
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
    const PhaseTmaCell cell = find_cell(p, first_cell + i * 64);
    int at = cell.at[0] * p.batch_bytes;
#pragma unroll
    for (int a = 0; a < 3; ++a) at += cell.at[a + 1] * p.axis[a].step_bytes;
    cells[i] = (shared + p.inputs_at + at) >> 4;
  }
  if (p.contiguous) fill_table<kThreads>(p, table);
  PhaseGemmRing stages, buffers;
  for (int index = blockIdx.x; index < p.items; index += gridDim.x) {
    const PhaseTmaItem item = find_item(p, index);
    const int first_channel = item.channel_block * columns + first_column;
    int line_count = 0;
    meet_multipliers<kThreads>();  // everyone has stored the item before
    fill_constants<T>(p, item, columns, epilogue, constants);
    if (p.contiguous) line_count = fill_lines<kThreads>(p, item, lines);
    if (threadIdx.x == 0) *not_finite = 0;
    meet_multipliers<kThreads>();
    bool finite = true, constant = true;
#pragma unroll 1
    for (int pass = 0; pass < p.passes; ++pass) {
      const PhaseTmaPhase even = find_phase(p, item, pass, 0), odd = find_phase(p, item, pass, 1);
      const PhaseTmaPhase own = warpgroup == 0 ? even : odd;
      const int taps = max(even.count, odd.count);
      if (taps == 0) {
        if (!p.contiguous) {
          store_constants<T, kThreads>(p, item, even, columns, constants);
          if (p.split == PhaseTmaSplit::kPhases) store_constants<T, kThreads>(p, item, odd, columns, constants);
        }
        continue;
      }
      constant = false;
      int start[3];
      find_start(p, even, odd, start);
      float sum[kRowTiles][kColumnTiles][4];
      if (own.count == 0) {
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
          for (int j = 0; j < kColumnTiles; ++j)
#pragma unroll
            for (int q = 0; q < 4; ++q) sum[i][j][q] = 0;
      }
      const auto multiply = [&](auto steps) {
        multiply_pass<T, decltype(steps)::value>(p, barriers, own, taps, start, row_form, column_form, cells,
                                                 of_cells ? 0 : warpgroup, shared + p.weights_at, stages, buffers, sum);
      };
      if (p.chunk == 64) {
        multiply(std::integral_constant<int, 4>{});
      } else if (p.chunk == 32) {
        multiply(std::integral_constant<int, 2>{});
      } else {
        multiply(std::integral_constant<int, 1>{});
      }
      if (!p.contiguous) {
        if (own.f[2] < p.axis[2].stride) {
          store_sums<T>(p, item, own, sum, epilogue, first_cell, first_channel);
        }
      } else if (own.count > 0) {
        const int slot = (p.merged ? p.axis[1].phase[own.f[1]].slot * p.width_slots : 0) +
                         p.axis[2].phase[own.f[2]].slot - item.f[2] * p.width_group;
        finite = stage_sums<T>(p, item, sum, epilogue, slot * p.slot_pitch + first_cell, first_channel,
                               shared + p.staging_at + first_column * p.channel_pitch) &&
                 finite;
      }
    }
    if (!p.contiguous || line_count == 0) continue;
    if (!finite) *not_finite = 1;
    meet_multipliers<kThreads>();
    if (*not_finite) {
      repair_staged<T, kThreads>(p, item, columns, line_count, lines, table, staging);
      meet_multipliers<kThreads>();
    }
    if (p.wide && !constant) {
      store_groups<T, kThreads>(p, item, columns, line_count, lines, table, staging);
    } else if (p.words || p.width_group != p.axis[2].stride) {
      store_words<T, kThreads>(p, item, columns, line_count, lines, table, constants, staging, constant);
    } else {
      store_runs<T, kThreads>(p, item, columns, line_count, lines, table, constants, staging, constant);
    }
  }
}

template <typename T, int kRowTiles, int kColumnTiles, int kWarpgroups>
__global__ void __launch_bounds__(kWarpgroups * 128 + 128, 2 / kWarpgroups)
    phase_tma_kernel(const __grid_constant__ PhaseTmaParams p, const __grid_constant__ CUtensorMap map) {
#ifdef FASTCONVT_PHASE_GEMM
  extern __shared__ unsigned char unaligned_bytes[];
  __shared__ int not_finite;
  unsigned char* const shared_bytes = unaligned_bytes + (-shared_address(unaligned_bytes) & 1023);
  const uint32_t shared = shared_address(shared_bytes);
  if (threadIdx.x == 0) {
    const PhaseTmaBarriers barriers{shared};
    for (int i = 0; i < kPhaseTmaMaxStages; ++i) {
      barrier_init(barriers.full(i), 1);
      barrier_init(barriers.empty(i), kWarpgroups * 4);
    }
    for (int i = 0; i < kPhaseTmaMaxBuffers; ++i) {
      barrier_init(barriers.loaded(i), 1);
      barrier_init(barriers.free(i), kWarpgroups * 4);
    }
    fence_barriers();
  }
  __syncthreads();
  if (threadIdx.x < kWarpgroups * 128) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kPhaseTmaRegisters<kWarpgroups>));
    multiply_items<T, kRowTiles, kColumnTiles, kWarpgroups>(p, shared_bytes, &not_finite);
  } else {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kPhaseTmaCopierRegisters<kWarpgroups>));
    if (threadIdx.x == kWarpgroups * 128) copy_items(p, &map, shared);
  }
#endif
}

}  // namespace fastconvt::cuda
