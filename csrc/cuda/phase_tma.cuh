// The phase GEMM on tensor copies, device side. See core/phase_tma.h. Blocks are persistent: one thread copies what all
// their items need, two warpgroups multiply and store.
#pragma once

#include "phase_tma_store.cuh"

namespace fastconvt::cuda {

// In shared memory: of every stage of weights, every buffer of inputs and every task, that it is full and that it is
// empty.
struct PhaseTmaBarriers {
  uint32_t address;
  __device__ __forceinline__ uint32_t full(int stage) const { return address + stage * 8; }
  __device__ __forceinline__ uint32_t empty(int stage) const { return full(kPhaseTmaMaxStages + stage); }
  __device__ __forceinline__ uint32_t loaded(int buffer) const { return full(2 * kPhaseTmaMaxStages + buffer); }
  __device__ __forceinline__ uint32_t free(int buffer) const { return loaded(kPhaseTmaMaxBuffers + buffer); }
  __device__ __forceinline__ uint32_t posted(int task) const { return loaded(2 * kPhaseTmaMaxBuffers + task); }
  __device__ __forceinline__ uint32_t done(int task) const { return posted(2 + task); }
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

__device__ __forceinline__ void write_share(const PhaseTmaParams& p, const PhaseTmaItem& item,
                                            const PhaseTmaPhase& phase, const int (&start)[3], int batches,
                                            int warpgroup, PhaseTmaShare& share) {
  share.walk = find_walk(p, phase, start);
  share.count = phase.count;
  share.weights = find_weights(p, item, phase, warpgroup);
  share.staged_at = 0;
  if (p.contiguous && phase.count > 0) {
    const int outer = p.merged ? p.axis[1].phase[phase.f[1]].slot * p.width_slots : 0;
    share.staged_at = (outer + p.axis[2].phase[phase.f[2]].slot - item.f[2] * p.width_group) * p.slot_pitch;
  }
  const bool exists = phase.f[2] < p.axis[2].stride;
  bool whole = batches == p.box_batch;
  int64_t place = item.first[0] * p.out.batch + int64_t{item.group} * p.group_out;
#pragma unroll
  for (int a = 0; a < 3; ++a) {
    const int count = exists ? count_cells(p, item, a, phase.f[a]) : 0;
    share.counts[a] = count;
    whole = whole && count >= p.axis[a].box;
    place += (item.first[a + 1] * p.axis[a].stride + phase.f[a]) * p.out.axis[a];
  }
  share.whole = whole;
  share.place = place;
}

// Contiguous: how many outputs a run has. Where an item makes some of the phases only, so many of every cell.
__device__ __forceinline__ int run_length(const PhaseTmaParams& p, const PhaseTmaItem& item) {
  const int from = item.first[3] * p.axis[2].stride;
  const int width = item.last[2] ? p.axis[2].out - from : p.axis[2].box * p.axis[2].stride;
  if (!p.merged) return p.width_group == p.axis[2].stride ? width : width / p.axis[2].stride * p.width_group;
  const int row = item.first[2] * p.axis[1].stride;
  return width * (item.last[1] ? p.axis[1].out - row : p.axis[1].box * p.axis[1].stride);
}

// Contiguous: the runs of an item, by a warp.
__device__ __forceinline__ int count_lines(const PhaseTmaParams& p, const PhaseTmaItem& item, int batches) {
  return batches * count_cells(p, item, 0, item.f[0]) * (p.merged ? 1 : count_cells(p, item, 1, item.f[1]));
}
__device__ __forceinline__ void fill_lines(const PhaseTmaParams& p, const PhaseTmaItem& item, int count,
                                           PhaseTmaLine* lines) {
  const int planes = count_cells(p, item, 0, item.f[0]);
  const int heights = p.merged ? 1 : count_cells(p, item, 1, item.f[1]);
  for (int i = threadIdx.x % 32; i < count; i += 32) {
    const int row = i / heights, h = i - row * heights, n = row / planes, d = row - n * planes;
    const int o0 = (item.first[1] + d) * p.axis[0].stride + item.f[0];
    const int o1 = (item.first[2] + h) * p.axis[1].stride + item.f[1];
    const int o2 = item.first[3] * p.axis[2].stride + item.f[2] * p.width_group;
    lines[i].place = (item.first[0] + n) * p.out.batch + o0 * p.out.axis[0] + o1 * p.out.axis[1] + o2 * p.out.axis[2];
    lines[i].cell = (n << p.shift_batch) + (d << p.shift_depth) + (h << p.shift_height);
  }
}

// Finds out what the block's items are, ahead of those who need it: every second task. A warp.
template <class Epilogue>
__device__ __forceinline__ void post_tasks(const PhaseTmaShared& shared, const Epilogue& epilogue, int place) {
  const PhaseTmaParams& p = shared.p;
  const PhaseTmaBarriers barriers{shared_address(shared.bytes)};
  PhaseTmaTask& task = shared.tasks()[place];
  const int lane = threadIdx.x % 32, warpgroup = lane % 2;
  int number = 0, item_slot = 0, parity = 1;
  for (int index = blockIdx.x; index < p.items; index += gridDim.x, item_slot ^= 1) {
    const PhaseTmaItem item = find_item(p, index);
    const int batches = min(p.box_batch, p.batch - item.first[0]);
    const int lines = p.contiguous ? count_lines(p, item, batches) : 0;
    for (int pass = 0; pass < p.passes; ++pass, ++number) {
      if (number % 2 != place) continue;
      const PhaseTmaPhase phase = find_phase(p, item, pass, warpgroup);
      const int taps = max(phase.count, __shfl_xor_sync(~0u, phase.count, 1));
      int start[3];
      find_start(p, phase, start);
      mbarrier_wait(barriers.done(place), parity);
      parity ^= 1;
      if (pass == 0) {
        float* const terms = shared.terms(item_slot);
        for (int i = lane; i < p.columns; i += 32) {
          const int channel = item.channel_block * p.columns + i;
          terms[i] = channel < p.group_out && p.bias != nullptr
                         ? epilogue.channel_term(static_cast<int64_t>(item.group) * p.group_out + channel)
                         : 0.f;
        }
        if (p.contiguous) fill_lines(p, item, lines, shared.lines(item_slot));
      }
      if (lane == 0) {
        const int n = item.first[0], w = item.first[3] + start[2];
        task.group = item.group;
        task.channel_block = item.channel_block;
        task.taps = taps;
        task.last_pass = pass + 1 == p.passes;
        task.item_slot = item_slot;
        task.batches = batches;
        task.lines = lines;
        task.length = p.contiguous ? run_length(p, item) : 0;
        task.at[0] = item.group * p.group_channels;
        task.at[1] = p.batch_inner ? n : w;
        task.at[2] = p.batch_inner ? w : n;
        task.at[3] = item.first[2] + start[1];
        task.at[4] = item.first[1] + start[0];
      }
      if (lane < 2) write_share(p, item, phase, start, batches, warpgroup, task.share[warpgroup]);
      __syncwarp();
      if (lane == 0) mbarrier_arrive(barriers.posted(place));
    }
  }
  if (number % 2 != place) return;
  mbarrier_wait(barriers.done(place), parity);
  if (lane == 0) {
    task.group = -1;
    mbarrier_arrive(barriers.posted(place));
  }
}

// Copies what all tasks need, each piece as soon as its place is free. One thread.
__device__ __forceinline__ void copy_tasks(const PhaseTmaShared& shared, const CUtensorMap* map) {
  const PhaseTmaParams& p = shared.p;
  const uint32_t base = shared_address(shared.bytes);
  const PhaseTmaBarriers barriers{base};
  const bool shares = p.split != PhaseTmaSplit::kCells;  // both warpgroups have weights of their own
  wait_for_previous_grid();                              // for the packed tensors
  BarrierRing ring, stages, buffers;
  for (;; ring.advance(2)) {
    mbarrier_wait(barriers.posted(ring.place), ring.parity);
    const PhaseTmaTask& task = shared.tasks()[ring.place];
    if (task.group < 0) break;
    const int taps = task.taps, even = task.share[0].count, odd = shares ? task.share[1].count : 0;
    const char *weights = task.share[0].weights, *odd_weights = task.share[1].weights;
    int at[5];
#pragma unroll
    for (int i = 0; i < 5; ++i) at[i] = task.at[i];
    mbarrier_arrive(barriers.done(ring.place));
    if (taps == 0) continue;
    for (int chunk = 0; chunk < p.chunks; ++chunk) {
      mbarrier_wait(barriers.free(buffers.place), buffers.parity ^ 1);
      mbarrier_arrive_expecting(barriers.loaded(buffers.place), p.copied_bytes);
      load_box(base + p.inputs_at + buffers.place * p.buffer_bytes, map, at, barriers.loaded(buffers.place));
      buffers.advance(p.buffers);
      at[0] += p.chunk;
      for (int tap = 0; tap < taps; tap += p.taps_per_stage, stages.advance(p.stages)) {
        const uint32_t full = barriers.full(stages.place);
        const uint32_t to = base + p.weights_at + stages.place * p.stage_bytes;
        mbarrier_wait(barriers.empty(stages.place), stages.parity ^ 1);
        const int bytes = min(p.taps_per_stage, max(0, even - tap)) * p.unit_bytes;
        const int odd_bytes = min(p.taps_per_stage, max(0, odd - tap)) * p.unit_bytes;
        mbarrier_arrive_expecting(full, bytes + odd_bytes);
        if (bytes > 0) bulk_load(to, weights, bytes, full);
        if (odd_bytes > 0) bulk_load(to + p.taps_per_stage * p.unit_bytes, odd_weights, odd_bytes, full);
        weights += bytes, odd_weights += odd_bytes;
      }
    }
  }
}

// The sums of a warpgroup's phase in one pass: all chunks of input channels, in each all taps. The products of a tap
// are in straight code, with their commitment, so that nothing waits for them but what must: the next tap's are in
// flight when those of the one before have ended, and its places are handed back.
template <typename T, int kSteps, int kRowTiles, int kColumnTiles>
__device__ __forceinline__ void multiply_pass(const PhaseTmaParams& p, uint32_t base, const PhaseTmaWalk& walk,
                                              int count, int taps, uint32_t row_form, uint32_t column_form,
                                              const uint32_t (&cells)[kRowTiles], int part, BarrierRing& stages,
                                              BarrierRing& buffers, float (&sum)[kRowTiles][kColumnTiles][4]) {
  const PhaseTmaBarriers barriers{base};
  const bool arrives = threadIdx.x % 32 == 0;
  uint32_t done_stage = 0, done_buffer = 0;  // barriers of what the tap before was the last to read
  const auto release = [&] {
    if (arrives && done_stage != 0) mbarrier_arrive(done_stage);
    if (arrives && done_buffer != 0) mbarrier_arrive(done_buffer);
  };
  int add = 0;
#pragma unroll 1
  for (int chunk = 0; chunk < p.chunks; ++chunk) {
    PhaseTmaTap at{walk.offset, 0, 0};
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
                                    operand(column_form, unit + 2 * k), k == 0 ? add : 1);
          }
        wgmma_commit();
        wgmma_wait<1>();
        add = 1;
      } else {
        wgmma_wait<0>();
      }
      release();
      at.advance(walk);
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

// Contiguous: everyone's sums are staged; the item's outputs go to memory.
template <typename T, int kThreads, class Epilogue>
__device__ __forceinline__ void store_item(const PhaseTmaShared& shared, const PhaseTmaTask& task,
                                           const Epilogue& epilogue, bool finite, bool constant, int* not_finite) {
  const PhaseTmaParams& p = shared.p;
  const PhaseTmaLine* const lines = shared.lines(task.item_slot);
  const float* const terms = shared.terms(task.item_slot);
  if (!finite) *not_finite = 1;
  meet_multipliers<kThreads>();
  if (*not_finite) {
    repair_staged<T, kThreads>(p, task, lines, shared.table(), shared.staging());
    meet_multipliers<kThreads>();
    *not_finite = 0;
  }
  if (p.wide && !constant) {
    store_groups<T, kThreads>(p, task, lines, shared.table(), shared.staging());
  } else if (p.words || p.width_group != p.axis[2].stride) {
    store_words<T, kThreads>(p, task, lines, shared.table(), epilogue, terms, shared.staging(), constant);
  } else {
    store_runs<T, kThreads>(p, task, lines, shared.table(), epilogue, terms, shared.staging(), constant);
  }
}

// Makes and stores what all tasks ask for.
template <typename T, int kRowTiles, int kColumnTiles, int kWarpgroups, bool kRectify>
__device__ __forceinline__ void multiply_tasks(const PhaseTmaShared& shared, int* not_finite) {
  constexpr int kColumns = kColumnTiles * 8, kThreads = kWarpgroups * 128;
  const PhaseTmaParams& p = shared.p;
  const uint32_t base = shared_address(shared.bytes);
  const PhaseTmaBarriers barriers{base};
  const int warpgroup = kWarpgroups == 1 ? 0 : __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0);
  const bool of_cells = p.split == PhaseTmaSplit::kCells;
  const int first_cell = of_cells ? warpgroup * kRowTiles * 64 : 0;
  const int first_column = p.split == PhaseTmaSplit::kChannels ? warpgroup * kColumns : 0;
  const auto epilogue = make_epilogue<T, kRectify>(p.bias, p.rectify);
  const uint32_t row_form = operand_form(p.swizzle, p.group_bytes);
  const uint32_t column_form = operand_form(p.swizzle, p.chunk * 16);
  uint32_t cells[kRowTiles];
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
    const PhaseTmaCell cell = find_cell(p, first_cell + i * 64);
    int at = cell.at[0] * p.batch_bytes;
#pragma unroll
    for (int a = 0; a < 3; ++a) at += cell.at[a + 1] * p.axis[a].step_bytes;
    cells[i] = (base + p.inputs_at + at) >> 4;
  }
  int rows[kRowTiles][2];
  if (p.contiguous) {
    fill_table<kThreads>(p, shared.table());
  } else {
    find_rows(p, first_cell, rows);
  }
  bool finite = true, constant = true, stored = false;  // of the item so far
  BarrierRing ring, stages, buffers;
  for (;; ring.advance(2)) {
    mbarrier_wait(barriers.posted(ring.place), ring.parity);
    const PhaseTmaTask& task = shared.tasks()[ring.place];
    if (task.group < 0) break;
    const PhaseTmaShare& share = task.share[warpgroup];
    const float* const terms = shared.terms(task.item_slot);
    if (task.taps > 0) {
      float sum[kRowTiles][kColumnTiles][4];
      const PhaseTmaWalk walk = share.walk;
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
      if (!p.contiguous) {
        store_sums<T>(p, task, share, sum, epilogue, rows, first_cell, first_column, terms);
      } else {
        if (stored) meet_multipliers<kThreads>();  // everyone has stored the item before
        stored = false;
        if (count > 0) {
          finite = stage_sums<T>(p, sum, epilogue, share.staged_at + first_cell, terms + first_column,
                                 base + p.staging_at + first_column * p.channel_pitch) &&
                   finite;
        }
        constant = false;
      }
    } else if (!p.contiguous) {
      store_constants<T, kThreads>(p, task, task.share[0], epilogue, terms);
      if (p.split == PhaseTmaSplit::kPhases) {
        store_constants<T, kThreads>(p, task, task.share[1], epilogue, terms);
      }
    }
    if (p.contiguous && task.last_pass) {
      if (task.lines > 0) store_item<T, kThreads>(shared, task, epilogue, finite, constant, not_finite);
      finite = constant = stored = true;
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(barriers.done(ring.place));
  }
}

template <typename T, int kRowTiles, int kColumnTiles, int kWarpgroups, bool kRectify>
__global__ void __launch_bounds__(kWarpgroups * 128 + 128, 2 / kWarpgroups)
    phase_tma_kernel(const __grid_constant__ PhaseTmaParams p, const __grid_constant__ CUtensorMap map) {
#ifdef FASTCONVT_WGMMA
  static_assert(sizeof(PhaseTmaTask) <= kPhaseTmaTaskBytes);
  extern __shared__ unsigned char unaligned_bytes[];
  __shared__ int not_finite;
  const PhaseTmaShared shared{unaligned_bytes + (-shared_address(unaligned_bytes) & 1023), p};
  if (threadIdx.x == 0) {
    const PhaseTmaBarriers barriers{shared_address(shared.bytes)};
    for (int i = 0; i < kPhaseTmaMaxStages; ++i) {
      mbarrier_init(barriers.full(i), 1);
      mbarrier_init(barriers.empty(i), kWarpgroups * 4);
    }
    for (int i = 0; i < kPhaseTmaMaxBuffers; ++i) {
      mbarrier_init(barriers.loaded(i), 1);
      mbarrier_init(barriers.free(i), kWarpgroups * 4);
    }
    for (int i = 0; i < 2; ++i) {
      mbarrier_init(barriers.posted(i), 1);
      mbarrier_init(barriers.done(i), kWarpgroups * 4 + 1);
    }
    not_finite = 0;
    fence_shared_writes();
  }
  __syncthreads();
  if (threadIdx.x < kWarpgroups * 128) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kPhaseTmaRegisters<kWarpgroups>));
    multiply_tasks<T, kRowTiles, kColumnTiles, kWarpgroups, kRectify>(shared, &not_finite);
  } else {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kPhaseTmaCopierRegisters<kWarpgroups>));
    const int warp = threadIdx.x / 32 - kWarpgroups * 4;
    if (warp == 0) {
      if (threadIdx.x % 32 == 0) copy_tasks(shared, &map);
    } else if (warp <= 2) {
      post_tasks(shared, BiasEpilogue<T>{static_cast<const T*>(p.bias)}, warp - 1);
    }
  }
#endif
}

}  // namespace fastconvt::cuda
