// The shuffle GEMM over planes, device side. See core/shuffle_planes.h. Blocks are persistent: one thread copies
// weights, three warps inputs, and two warpgroups multiply 64 rows by the same positions each, in turns, so that one
// stores meanwhile.
#pragma once

#include <cuda.h>

#include "device/copy_groups.cuh"
#include "device/dependent_launch.cuh"
#include "shuffle_planes_pack.cuh"
#include "shuffle_planes_product.cuh"
#include "shuffle_planes_store.cuh"

namespace fastconvt::cuda {

inline constexpr int kShufflePlanesThreads = 384, kShufflePlanesCopiers = 96;

// In shared memory: of every stage of weights and slot of inputs, that it is full and that it is empty; that a
// warpgroup's turn has come.
struct ShufflePlanesBarriers {
  uint32_t address;
  __device__ __forceinline__ uint32_t full_stage(int i) const { return address + i * 8; }
  __device__ __forceinline__ uint32_t empty_stage(int i) const { return full_stage(kShufflePlanesMaxStages + i); }
  __device__ __forceinline__ uint32_t full_slot(int i) const { return full_stage(2 * kShufflePlanesMaxStages + i); }
  __device__ __forceinline__ uint32_t empty_slot(int i) const { return full_slot(kShufflePlanesMaxSlots + i); }
  __device__ __forceinline__ uint32_t turn(int warpgroup) const {
    return full_slot(2 * kShufflePlanesMaxSlots + warpgroup);
  }
};

// Weights of all items, 64 rows by 64 channels at a time. One thread.
__device__ __forceinline__ void copy_weights(const ShufflePlanesParams& p, uint32_t base, const CUtensorMap* map) {
#ifdef FASTCONVT_WGMMA
  const ShufflePlanesBarriers barriers{base + p.barriers};
  BarrierRing ring;
  wait_for_previous_grid();  // that has packed them
  for (int index = blockIdx.x; index < p.items; index += gridDim.x) {
    const int first = find_shuffle_planes_item(p, index).part * p.part;
    for (int tile = first; tile < first + p.part; ++tile) {
      for (int chunk = 0; chunk < p.chunks; ++chunk, ring.advance(p.stages)) {
        const uint32_t full = barriers.full_stage(ring.place);
        mbarrier_wait(barriers.empty_stage(ring.place), ring.parity ^ 1);
        mbarrier_arrive_expecting(full, kShufflePlanesStage);
        asm volatile(
            "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], "
            "[%4];" ::"r"(base + ring.place * kShufflePlanesStage),
            "l"(map), "r"(tile * 64), "r"(chunk * 64), "r"(full)
            : "memory");
      }
    }
  }
#endif
}

// 64 channels of a tile's inputs, `channels` of which exist, to blocks of 8 by 8: a warp copies neighbouring pieces of
// a channel.
template <int kBytes>
__device__ __forceinline__ void copy_chunk(const ShufflePlanesParams& p, uint32_t to, const unsigned char* from,
                                           int channels, int count, int thread) {
  constexpr int kWarps = kShufflePlanesCopiers / 32;
  const int64_t channel_bytes = p.input_channel * 2;
  for (int byte = thread % 32 * kBytes; byte < count * 2; byte += 32 * kBytes) {
    uint32_t target = to + byte / 16 * p.pitch + byte % 16 + thread / 32 * 16;
    const unsigned char* source = from + thread / 32 * channel_bytes + byte;
#pragma unroll 11
    for (int channel = thread / 32; channel < 64; channel += kWarps) {
      copy_or_zero<kBytes>(target, source, channel < channels);
      target += kWarps * 16, source += kWarps * channel_bytes;
    }
  }
}

// Columns that no copy reaches are finite, too.
__device__ __forceinline__ void clear_slots(const ShufflePlanesParams& p, uint32_t base, int blocks, int thread) {
  const int first = p.lines * p.width.divisor / 8;
  for (int slot = 0; slot < p.slots; ++slot) {
    for (int block = first; block < blocks; ++block) {
      const uint32_t to = base + p.slots_begin + slot * p.slot_bytes + block * p.pitch + thread * 16;
      if (thread < 64) asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(to), "r"(0) : "memory");
    }
  }
  asm volatile("bar.sync 1, %0;" ::"n"(kShufflePlanesCopiers) : "memory");
}

// Asks for an item's inputs in the second-level cache.
__device__ __forceinline__ void prefetch_inputs(const unsigned char* from, int64_t channel_bytes, int channels,
                                                int bytes, int thread) {
  const int lines = bytes / 128 + 1;
  for (int i = thread; i < channels * lines; i += kShufflePlanesCopiers) {
    const unsigned char* const at = from + i / lines * channel_bytes + min(i % lines * 128, bytes - 1);
    asm volatile("prefetch.global.L2 [%0];" ::"l"(at));
  }
}

__device__ __forceinline__ const unsigned char* find_inputs(const ShufflePlanesParams& p,
                                                            const ShufflePlanesItem& item) {
  const int64_t at = static_cast<int64_t>(item.n) * p.in_channels * p.input_channel + item.depth * p.input_plane +
                     static_cast<int64_t>(item.tile) * p.lines * p.width.divisor;
  return static_cast<const unsigned char*>(p.input) + 2 * at;
}

// Inputs of all items, 64 channels at a time. Three warps.
__device__ __forceinline__ void copy_inputs(const ShufflePlanesParams& p, uint32_t base, int thread) {
  const ShufflePlanesBarriers barriers{base + p.barriers};
  BarrierRing ring;
  for (int index = blockIdx.x; index < p.items; index += gridDim.x) {
    const ShufflePlanesItem item = find_shuffle_planes_item(p, index);
    const unsigned char* from = find_inputs(p, item);
    for (int chunk = 0; chunk < p.chunks; ++chunk, ring.advance(p.slots)) {
      mbarrier_wait(barriers.empty_slot(ring.place), ring.parity ^ 1);
      const uint32_t to = base + p.slots_begin + ring.place * p.slot_bytes;
      const int channels = min(64, p.in_channels - chunk * 64);
      if (p.copy == 16) {
        copy_chunk<16>(p, to, from, channels, item.count, thread);
      } else if (p.copy == 8) {
        copy_chunk<8>(p, to, from, channels, item.count, thread);
      } else {
        copy_chunk<4>(p, to, from, channels, item.count, thread);
      }
      mbarrier_arrive_after_copies(barriers.full_slot(ring.place));
      from += 64 * p.input_channel * 2;
    }
    const int next = index + gridDim.x;
    if (next < p.items) {
      const ShufflePlanesItem then = find_shuffle_planes_item(p, next);
      prefetch_inputs(find_inputs(p, then), p.input_channel * 2, p.in_channels, then.count * 2, thread);
    }
  }
}

// The sums of 64 rows; `first`, `last`: of the warpgroup's tiles of an item.
template <typename T, int kColumns>
__device__ __forceinline__ void multiply_planes(const ShufflePlanesParams& p, uint32_t base, int warpgroup, bool first,
                                                bool last, BarrierRing& ring, BarrierRing slot,
                                                float (&sum)[kColumns / 8][4]) {
  const ShufflePlanesBarriers barriers{base + p.barriers};
  const bool arrives = threadIdx.x % 32 == 0;
  uint32_t done = 0, done_slot = 0;
#pragma unroll 1
  for (int chunk = 0; chunk < p.chunks; ++chunk) {
    if (first) {
      mbarrier_wait(barriers.full_slot(slot.place), slot.parity);
      fence_shared_writes();  // of the copying threads
    }
    mbarrier_wait(barriers.full_stage(ring.place), ring.parity);
    const uint64_t rows = swizzled_rows(base + ring.place * kShufflePlanesStage);
    const uint64_t columns = blocked_columns(base + p.slots_begin + slot.place * p.slot_bytes, p.pitch);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      start_planes_product<T, kColumns>(sum, rows + k * kPlanesRowsStep, columns + k * kPlanesColumnsStep, chunk | k);
    }
    wgmma_commit();
    if (chunk + 1 == p.chunks && arrives) mbarrier_arrive(barriers.turn(warpgroup ^ 1));
    wgmma_wait<1>();
    if (arrives && done != 0) {
      mbarrier_arrive(done);
      if (last) mbarrier_arrive(done_slot);
    }
    done = barriers.empty_stage(ring.place), done_slot = barriers.empty_slot(slot.place);
    ring.advance(p.stages), slot.advance(p.slots);
  }
  wgmma_wait<0>();
  if (arrives) {
    mbarrier_arrive(done);
    if (last) mbarrier_arrive(done_slot);
  }
}

__device__ __forceinline__ void advance_ring(BarrierRing& ring, int places, int by) {
  ring.place += by;
  while (ring.place >= places) ring.place -= places, ring.parity ^= 1;
}

// Two warpgroups.
template <typename T, int kTaps, int kColumns>
__device__ __forceinline__ void make_planes(const ShufflePlanesParams& p, uint32_t base, unsigned char* bytes) {
  const ShufflePlanesBarriers barriers{base + p.barriers};
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0), warpgroup = warp / 4;
  unsigned char* const staging = bytes + p.staging + warp * ((16 >> p.taps_shift) * p.run_bytes);
  BarrierRing ring, slot;
  advance_ring(ring, p.stages, warpgroup * p.chunks);
  int turn = warpgroup;  // the first warpgroup begins without being told
  for (int index = blockIdx.x; index < p.items; index += gridDim.x) {
    const ShufflePlanesItem item = find_shuffle_planes_item(p, index);
    for (int tile = warpgroup; tile < p.part; tile += 2, ++turn) {
      const int row = (item.part * p.part + tile) * 64 + warp % 4 * 16;
      float sum[kColumns / 8][4];
      const T term = load_term<T>(p, row + threadIdx.x % 32 / 4 * 2);
      if (turn > 0) mbarrier_wait(barriers.turn(warpgroup), (turn - 1) & 1);
      multiply_planes<T, kColumns>(p, base, warpgroup, tile < 2, tile + 2 >= p.part, ring, slot, sum);
      advance_ring(ring, p.stages, p.chunks);  // past the other's
      store_planes<T, kTaps, kColumns>(p, item, sum, term, base + p.table, staging, row);
    }
    advance_ring(slot, p.slots, p.chunks);
  }
}

template <typename T, int kTaps, int kColumns>
__global__ void __launch_bounds__(kShufflePlanesThreads, 1)
    shuffle_planes_kernel(const __grid_constant__ CUtensorMap weights, const __grid_constant__ ShufflePlanesParams p) {
#ifdef FASTCONVT_WGMMA
  extern __shared__ __align__(1024) unsigned char bytes[];
  const uint32_t base = shared_address(bytes);
  const ShufflePlanesBarriers barriers{base + p.barriers};
  fill_planes_table<kTaps, kColumns>(p, base + p.table);
  if (threadIdx.x == 0) {
    for (int i = 0; i < p.stages; ++i) {
      mbarrier_init(barriers.full_stage(i), 1);
      mbarrier_init(barriers.empty_stage(i), 4);
    }
    for (int i = 0; i < p.slots; ++i) {
      mbarrier_init(barriers.full_slot(i), kShufflePlanesCopiers);
      mbarrier_init(barriers.empty_slot(i), 8);
    }
    mbarrier_init(barriers.turn(0), 4);
    mbarrier_init(barriers.turn(1), 4);
    fence_shared_writes();
  }
  __syncthreads();
  if (threadIdx.x >= 256) {
    if (threadIdx.x == 256) copy_weights(p, base, &weights);
    if (threadIdx.x >= 288) {
      clear_slots(p, base, kColumns / 8, threadIdx.x - 288);
      copy_inputs(p, base, threadIdx.x - 288);
    }
  } else {
    make_planes<T, kTaps, kColumns>(p, base, bytes);
    wait_for_bulk_reads();  // before the shared memory goes
  }
#endif
}

}  // namespace fastconvt::cuda
