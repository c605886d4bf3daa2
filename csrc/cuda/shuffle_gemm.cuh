// The shuffle GEMM, device side. See core/shuffle_gemm.h. Blocks are persistent: two or four warpgroups multiply 64
// positions by some columns each and store. Teams of one, or of two that share copies, multiply in turns, so that
// others store meanwhile. Two more threads copy.
#pragma once

#include "device/dependent_launch.cuh"
#include "device/registers.cuh"
#include "device/wgmma.cuh"
#include "shuffle_gemm_boxes.cuh"
#include "shuffle_gemm_repair.cuh"

namespace fastconvt::cuda {

// What bias adds to the columns of an item, and where the first of each two goes, from a position's first output;
// contiguous: where its row of taps does; runs: in the image of what is stored; boxes: nothing. A warpgroup.
template <typename T, int kTaps, ShuffleGemmStore kStore, int kColumns>
__device__ __forceinline__ void fill_tables(const ShuffleGemmParams& p, const ShuffleGemmItem& item, uint32_t terms,
                                            uint32_t offsets) {
  constexpr bool kContiguous = kTaps != 0;
  for (int i = threadIdx.x % 128; i < kColumns; i += 128) {
    const int column = item.block * kColumns + i;
    const bool exists = column < p.columns;
    float term = 0;  // first, since the load takes long
    if (p.bias != nullptr && exists) {
      int rest = column;
      const int quotient = p.channel_columns(rest);
      term = to_accumulator(
          __ldg(static_cast<const T*>(p.bias) + item.group * p.group_out + (kContiguous ? quotient : rest)));
    }
    int64_t offset = -1;
    if (kStore != ShuffleGemmStore::kBoxes && exists && i % 2 == 0) {
      if constexpr (kStore == ShuffleGemmStore::kRuns) {
        int in_line = column;
        const int line = p.run(in_line);
        offset = line * p.run.divisor * 128 + in_line * 2;
      } else if constexpr (kContiguous) {
        offset = item.group * static_cast<int64_t>(p.group_out) * p.plane + find_output_row(p, column / kTaps, kTaps);
      } else {
        offset = item.group * p.group_out + find_output_column(p, column);
      }
    }
    store_shared(terms + i * 4, __float_as_uint(term));
    if (kStore != ShuffleGemmStore::kBoxes && i % 2 == 0) {
      store_shared(offsets + i * 2, static_cast<uint32_t>(offset));
    }
  }
}

// The sums of an item's tile; after the products of chunk `hand_over` the next team may multiply. While the last
// products are made, `meanwhile` is called.
template <typename T, bool kContiguous, int kColumns, typename Function>
__device__ __forceinline__ void multiply_item(const ShuffleGemmParams& p, uint32_t base, uint32_t inputs,
                                              uint32_t next_turn, bool wait, int hand_over, ShuffleGemmRing& ring,
                                              float (&sum)[kColumns / 8][4], Function&& meanwhile) {
  const ShuffleGemmBarriers barriers{base + p.barriers};
  const bool arrives = threadIdx.x % 32 == 0;
  uint32_t done = 0;
  const auto multiply = [&](auto steps) {
#pragma unroll 1
    for (int chunk = 0; chunk < p.chunks; ++chunk) {
      if (wait) mbarrier_wait(barriers.weights(chunk), 0);
      mbarrier_wait(barriers.full(ring.place), ring.parity);
      const uint32_t stage = base + p.ring + ring.place * p.stage_bytes;
      const uint32_t rows = swizzled_operand(stage + inputs, kContiguous ? 8192 : 16);
      const uint32_t weights = p.resident ? base + chunk * (kColumns * 128) : stage + p.sharing * 8192;
      const uint32_t columns = swizzled_operand(weights, 8192);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < decltype(steps)::value; ++k) {
        start_swizzled_product<T, kContiguous, kColumns>(sum, rows + k * (kContiguous ? 128 : 2), columns + k * 128,
                                                         chunk | k);
      }
      wgmma_commit();
      if (p.takes_turns && chunk == hand_over && arrives) mbarrier_arrive(next_turn);
      wgmma_wait<1>();
      if (arrives && done != 0) mbarrier_arrive(done);
      done = barriers.empty(ring.place);
      ring.advance(p.stages);
    }
  };
  // Decided once: products wait for what lies between them.
  if (p.group_in > 16) {
    multiply(std::integral_constant<int, 4>{});
  } else {
    multiply(std::integral_constant<int, 1>{});
  }
  meanwhile();
  wgmma_wait<0>();
  if (arrives) mbarrier_arrive(done);
}

// Makes all items' outputs: all threads that multiply.
template <typename T, int kTaps, int kColumns, ShuffleGemmStore kStore, int kWarpgroups, bool kRectify, bool kWhole>
__device__ __forceinline__ void make_items(const ShuffleGemmParams& p, uint32_t base, const CUtensorMap* outputs) {
  constexpr bool kContiguous = kTaps != 0;
  const ShuffleGemmBarriers barriers{base + p.barriers};
  const int warpgroup = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0), team = warpgroup >> (p.sharing - 1);
  const uint32_t staging = base + p.staging + warpgroup * p.buffers * kShuffleGemmStaging;
  const uint32_t terms = base + p.terms + warpgroup * (kColumns * 4);
  const uint32_t offsets = base + p.offsets + warpgroup * (kColumns * 2);
  if (p.by_hand) {
    const ShuffleGemmItem item = find_shuffle_gemm_item(p, blockIdx.x);
    copy_weights_by_hand<kColumns, kWarpgroups * 128>(
        static_cast<const unsigned short*>(p.weight) + static_cast<int64_t>(item.group) * p.group_in * p.columns,
        p.group_in, p.columns, p.chunks, item.block, base);
    asm volatile("bar.sync 6, %0;" ::"n"(kWarpgroups * 128) : "memory");
  }
  const int of_team = warpgroup & (p.sharing - 1);
  const uint32_t next_turn = barriers.turn((team + 1) & (p.teams - 1));
  ShuffleGemmRing ring;
  ring.advance(p.stages, team * p.chunks);
  bool first = true;
  int tables = -1;      // the item part that they are of
  int turn = team > 0;  // the first team begins without being told
  for (int index = blockIdx.x + team * gridDim.x; index < p.items; index += p.teams * gridDim.x, ++turn) {
    const ShuffleGemmItem item = find_shuffle_gemm_item(p, index);
    const int tile = item.first_tile + of_team;
    const int part = item.group * p.column_blocks.divisor + item.block;
    if (part != tables) {
      fill_tables<T, kTaps, kStore, kColumns>(p, item, terms, offsets);
      meet_warpgroup(warpgroup);
      tables = part;
    }
    float sum[kColumns / 8][4];
    const bool wait = first && p.resident && !p.by_hand;
    const int hand_over = team == 0 ? p.hand_over : p.chunks - 1;
    // Where outputs go is found while nothing else can be done: before the first inputs are there or, where teams take
    // turns, during the last products.
    ShuffleGemmPlaces<T, kTaps, kColumns, kStore, kWhole> places;
    if constexpr (kWarpgroups == 2) places.find(p, tile);
    if (p.takes_turns && turn > 0) mbarrier_wait(barriers.turn(team), (turn - 1) & 1);
    multiply_item<T, kContiguous, kColumns>(p, base, of_team * 8192, next_turn, wait, hand_over, ring, sum, [&] {
      if constexpr (kWarpgroups != 2) places.find(p, tile);
    });
    first = false;
    ring.advance(p.stages, (p.teams - 1) * p.chunks);
    if (tile >= p.tiles) continue;
    uint32_t mark;
    if constexpr (kStore == ShuffleGemmStore::kBoxes) {
      mark = store_boxes<T, kTaps, kColumns>(p, outputs, sum, staging, terms, tile, item.group, item.block, warpgroup);
    } else if constexpr (kStore == ShuffleGemmStore::kRuns) {
      mark = store_runs<T, kColumns>(p, sum, staging, terms, offsets, tile, warpgroup);
    } else if constexpr (kContiguous) {
      mark = store_rows<T, kTaps, kColumns, kRectify, kWhole>(p, sum, staging, terms, offsets, places, item.block,
                                                              warpgroup);
    } else {
      mark = store_pixels<T, kColumns, kRectify, kWhole>(p, sum, staging, terms, offsets, places, item.block);
    }
    if (any_of_warpgroup(warpgroup, is_marked(mark))) {
      if constexpr (kStore != ShuffleGemmStore::kVectors) {
        wait_for_bulk_stores();
        meet_warpgroup(warpgroup);
      }
      repair_tile<T, kContiguous, kColumns>(p, tile, item.group, item.block);
    }
  }
  if constexpr (kStore != ShuffleGemmStore::kVectors) wait_for_bulk_reads();
}

// kTaps: of the last axis; 0: channels_last.
template <typename T, int kTaps, int kColumns, ShuffleGemmStore kStore, int kWarpgroups, bool kRectify, bool kWhole>
__global__ void __launch_bounds__(kWarpgroups * 128 + 128, 1)
    shuffle_gemm_kernel(const __grid_constant__ CUtensorMap inputs, const __grid_constant__ CUtensorMap weights,
                        const __grid_constant__ CUtensorMap outputs, const __grid_constant__ ShuffleGemmParams p) {
#ifdef FASTCONVT_SHUFFLE_GEMM
  constexpr bool kContiguous = kTaps != 0;
  constexpr int kThreads = kWarpgroups * 128;  // that multiply
  extern __shared__ __align__(1024) unsigned char bytes[];
  const uint32_t base = shared_address(bytes);
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0), copier = warp - kThreads / 32;
  if (elect_one()) {
    if (copier >= 0) {
      if (copier == 0) prefetch_map(&inputs);
      if (copier == 1) prefetch_map(&weights);
      if (kStore == ShuffleGemmStore::kBoxes && copier == 2) prefetch_map(&outputs);
    } else {  // by all others, since it takes a thread long
      const ShuffleGemmBarriers barriers{base + p.barriers};
#pragma unroll 1
      for (int i = warp; i < p.stages; i += kThreads / 32) {
        mbarrier_init(barriers.full(i), p.resident ? 1 : 2);
        mbarrier_init(barriers.empty(i), 4 * p.sharing);
      }
      if (warp < p.teams) mbarrier_init(barriers.turn(warp), 4 * p.sharing);
#pragma unroll 1
      for (int i = warp; p.resident && i < p.chunks; i += kThreads / 32) mbarrier_init(barriers.weights(i), 1);
      fence_new_barriers();
    }
  }
  __syncthreads();
  if (copier >= 0) {
    lower_registers<kWarpgroups == 2 ? 40 : 32>();
    if (copier > 1) return;
    if (elect_one()) {
      wait_for_previous_grid();  // for packed tensors
      if (copier == 0) {
        copy_inputs<kContiguous, kStore == ShuffleGemmStore::kBoxes>(p, base, &inputs);
      } else if (!p.by_hand) {
        copy_weights<kColumns>(p, base, &weights);
      }
    }
  } else {
    raise_registers<kWarpgroups == 2 ? 232 : 112>();
    make_items<T, kTaps, kColumns, kStore, kWarpgroups, kRectify, kWhole>(p, base, &outputs);
  }
#endif
}

}  // namespace fastconvt::cuda
