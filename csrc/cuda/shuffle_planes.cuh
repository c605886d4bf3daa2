// The shuffle GEMM over planes, device side. See core/shuffle_planes.h. Blocks are persistent: one thread copies
// weights, three warps inputs, and three warpgroups multiply 64 rows by the same positions each, in turns, so that
// the others store meanwhile.
#pragma once

#include "device/copy_groups.cuh"
#include "device/dependent_launch.cuh"
#include "device/elect.cuh"
#include "device/registers.cuh"
#include "shuffle_planes_pack.cuh"
#include "shuffle_planes_product.cuh"
#include "shuffle_planes_store.cuh"

namespace fastconvt::cuda {

inline constexpr int kShufflePlanesCopiers = 96;
template <int kColumns>
inline constexpr int kShufflePlanesTeams = shuffle_planes_teams(kColumns);
template <int kColumns>
inline constexpr int kShufflePlanesThreads = kShufflePlanesTeams<kColumns> * 128 + 128;

// In shared memory: of every stage of weights and slot of inputs, that it is full and that it is empty; that a
// warpgroup's turn has come; that a tile's weights end soon.
struct ShufflePlanesBarriers {
  uint32_t address;
  __device__ __forceinline__ uint32_t full_stage(int i) const { return address + i * 8; }
  __device__ __forceinline__ uint32_t empty_stage(int i) const { return full_stage(kShufflePlanesMaxStages + i); }
  __device__ __forceinline__ uint32_t full_slot(int i) const { return full_stage(2 * kShufflePlanesMaxStages + i); }
  __device__ __forceinline__ uint32_t empty_slot(int i) const { return full_slot(kShufflePlanesMaxSlots + i); }
  __device__ __forceinline__ uint32_t turn(int warpgroup) const {
    return full_slot(2 * kShufflePlanesMaxSlots + warpgroup);
  }
  __device__ __forceinline__ uint32_t empty_buffer(int i) const { return turn(3 + i); }
  __device__ __forceinline__ uint32_t near_end() const { return empty_buffer(2); }  // how many, a word
};

// Weights of all items, 64 rows by 64 channels at a time. One thread.
__device__ __forceinline__ void copy_weights(const ShufflePlanesParams& p, uint32_t base) {
  const ShufflePlanesBarriers barriers{base + p.barriers};
  BarrierRing ring;
  wait_for_previous_grid();  // that has packed them
  int near = 0;
  ShufflePlanesWork work = find_first_work(p, blockIdx.x, gridDim.x);
  while (find_work(p, work)) {
    const unsigned char* from = static_cast<const unsigned char*>(p.packed) +
                                static_cast<int64_t>(work.row_tile) * p.chunks * kShufflePlanesStage;
#pragma unroll 1
    for (int left = work.count; left > 0; --left) {
      if (left == min(work.count, kShufflePlanesNear)) {
        asm volatile("st.volatile.shared.b32 [%0], %1;" ::"r"(barriers.near_end()), "r"(++near) : "memory");
      }
#pragma unroll 1
      for (int chunk = 0; chunk < p.chunks; ++chunk, ring.advance(p.stages), from += kShufflePlanesStage) {
        const uint32_t full = barriers.full_stage(ring.place);
        mbarrier_wait(barriers.empty_stage(ring.place), ring.parity ^ 1);
        mbarrier_arrive_expecting(full, kShufflePlanesStage);
        bulk_load(base + ring.place * kShufflePlanesStage, from, kShufflePlanesStage, full);
      }
    }
  }
}

// 64 channels of a tile's inputs, `channels` of which exist, to blocks of 8 by 8: a lane copies up to two pieces of
// eight channels at a time, since the instructions between copies count.
template <int kBytes>
__device__ __forceinline__ void copy_chunk(const ShufflePlanesParams& p, uint32_t to, const unsigned char* from,
                                           int channels, int count, int thread) {
  const int64_t channel_bytes = p.input_channel * 2;
  const int bytes = count * 2;
  const unsigned char* line = from + thread / 32 * 8 * channel_bytes;
#pragma unroll 1
  for (int first = thread / 32 * 8; first < 64; first += kShufflePlanesCopiers / 4) {
#pragma unroll 1
    for (int byte = thread % 32 * kBytes; byte < bytes; byte += 64 * kBytes) {
      const uint32_t target = to + byte / 16 * p.pitch + byte % 16 + first * 16, second = target + 2 * kBytes * p.pitch;
      const bool both = byte + 32 * kBytes < bytes;
      const unsigned char* source = line + byte;
      if (first + 8 <= channels) {
#pragma unroll
        for (int i = 0; i < 8; ++i, source += channel_bytes) {
          copy_or_zero<kBytes>(target + i * 16, source, true);
          if (both) copy_or_zero<kBytes>(second + i * 16, source + 32 * kBytes, true);
        }
      } else {
#pragma unroll 1
        for (int i = 0; i < 8; ++i, source += channel_bytes) {
          const bool exists = first + i < channels;
          copy_or_zero<kBytes>(target + i * 16, exists ? source : from, exists);
          if (both) copy_or_zero<kBytes>(second + i * 16, exists ? source + 32 * kBytes : from, exists);
        }
      }
    }
    line += kShufflePlanesCopiers / 4 * channel_bytes;
  }
}

__device__ __forceinline__ const unsigned char* find_inputs(const ShufflePlanesParams& p,
                                                            const ShufflePlanesItem& item) {
  const int64_t at = static_cast<int64_t>(item.n) * p.in_channels * p.input_channel + item.depth * p.input_plane +
                     static_cast<int64_t>(item.tile) * p.lines * p.width.divisor;
  return static_cast<const unsigned char*>(p.input) + 2 * at;
}

// Asks for a tile's inputs in the second-level cache.
__device__ __forceinline__ void prefetch_tile(const ShufflePlanesParams& p, int tile, int thread) {
  const ShufflePlanesItem item = find_shuffle_planes_item(p, tile);
  const unsigned char* const from = find_inputs(p, item);
  const int bytes = item.count * 2, lines = bytes / 128 + 1, step = kShufflePlanesCopiers / lines;
  const int first = thread / lines, byte = min((thread - first * lines) * 128, bytes - 1);
  if (first >= step) return;
  for (int channel = first; channel < p.in_channels; channel += step) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(from + byte + channel * (p.input_channel * 2)));
  }
}

// Columns that no copy reaches are finite, too.
__device__ __forceinline__ void clear_slots(const ShufflePlanesParams& p, uint32_t base, int thread) {
  const int first = p.lines * p.width.divisor / 8, blocks = p.slot_bytes / p.pitch;
  for (int slot = 0; slot < p.slots; ++slot) {
    for (int block = first; block < blocks; ++block) {
      const uint32_t to = base + p.slots_begin + slot * p.slot_bytes + block * p.pitch + thread * 16;
      if (thread < 64) asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(to), "r"(0) : "memory");
    }
  }
  asm volatile("bar.sync 1, %0;" ::"n"(kShufflePlanesCopiers) : "memory");
}

// Until a word of shared memory is no less.
__device__ __forceinline__ void wait_for_count(uint32_t word, int count) {
  for (int seen = 0;;) {
    asm volatile("ld.volatile.shared.b32 %0, [%1];" : "=r"(seen) : "r"(word) : "memory");
    if (seen >= count) return;
    __nanosleep(100);
  }
}

// Inputs of all items, 64 channels at a time. Three warps. If there is no room for a whole next tile, it is asked for
// when this one's weights end soon: before, outputs would push it out of the cache again.
__device__ __forceinline__ void copy_inputs(const ShufflePlanesParams& p, uint32_t base, int thread) {
  const ShufflePlanesBarriers barriers{base + p.barriers};
  BarrierRing ring;
  int near = 0;
  ShufflePlanesWork work = find_first_work(p, blockIdx.x, gridDim.x);
  bool any = find_work(p, work);
  if (any) prefetch_tile(p, work.tile, thread);
  clear_slots(p, base, thread);
  while (any) {
    const ShufflePlanesItem item = find_shuffle_planes_item(p, work.tile);
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
    any = find_work(p, work);
    if (any) {
      ++near;
      if (p.slots < 2 * p.chunks) wait_for_count(barriers.near_end(), near);
      prefetch_tile(p, work.tile, thread);
    }
  }
}

__device__ __forceinline__ void advance_ring(BarrierRing& ring, int places, int by) {
  ring.place += by;
  while (ring.place >= places) ring.place -= places, ring.parity ^= 1;
}

// The sums of 64 rows; `first`, `last`: of the warpgroup's tiles of an item.
template <typename T, int kColumns>
__device__ __forceinline__ void multiply_planes(const ShufflePlanesParams& p, uint32_t base, uint32_t next_turn,
                                                bool first, bool last, BarrierRing& ring, BarrierRing slot,
                                                float (&sum)[kColumns / 8][4]) {
  const ShufflePlanesBarriers barriers{base + p.barriers};
  const bool arrives = threadIdx.x % 32 == 0;
  uint32_t done[2] = {}, done_slot[2] = {};  // to release: after the products before the last ones, and these
  const auto release = [&](int i) {
    if (!arrives || done[i] == 0) return;
    mbarrier_arrive(done[i]);
    if (last) mbarrier_arrive(done_slot[i]);
  };
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
    if (chunk + 1 == p.chunks && arrives) mbarrier_arrive(next_turn);
    wgmma_wait<2>();
    release(0);
    done[0] = done[1], done_slot[0] = done_slot[1];
    done[1] = barriers.empty_stage(ring.place), done_slot[1] = barriers.empty_slot(slot.place);
    ring.advance(p.stages), slot.advance(p.slots);
  }
  advance_ring(ring, p.stages, (kShufflePlanesTeams<kColumns> - 1) * p.chunks);  // past the others'
  wgmma_wait<1>();
  release(0);
  wgmma_wait<0>();
  release(1);
}

// Slots of a tile that a warpgroup has no rows of.
__device__ __forceinline__ void skip_slots(const ShufflePlanesParams& p, uint32_t base, BarrierRing slot) {
  const ShufflePlanesBarriers barriers{base + p.barriers};
  for (int chunk = 0; chunk < p.chunks; ++chunk, slot.advance(p.slots)) {
    mbarrier_wait(barriers.full_slot(slot.place), slot.parity);
    if (threadIdx.x % 32 == 0) mbarrier_arrive(barriers.empty_slot(slot.place));
  }
}

// All warpgroups that multiply.
template <typename T, int kTaps, int kColumns>
__device__ __forceinline__ void make_planes(const ShufflePlanesParams& p, uint32_t base) {
  constexpr int kTeams = kShufflePlanesTeams<kColumns>;
  const ShufflePlanesBarriers barriers{base + p.barriers};
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0), warpgroup = warp / 4;
  const uint32_t staging = base + p.staging + warp % 4 * ((16 >> p.taps_shift) * p.run_bytes);
  const uint32_t next_turn = barriers.turn(warpgroup + 1 == kTeams ? 0 : warpgroup + 1);
  if (warpgroup == 0) find_planes_places<kTaps, kColumns>(p, base + p.places);
  const int pair = find_pair<kTaps>(p);
  BarrierRing ring, slot;
  advance_ring(ring, p.stages, warpgroup * p.chunks);
  // The buffer that a warp staged in last is another warpgroup's next, or, of two warpgroups, its own.
  const auto release_buffer = [&](int made) {
    if (made < kTeams) return;
    if (elect_one()) {
      wait_for_bulk_reads();
      if (kTeams == 3) mbarrier_arrive(barriers.empty_buffer((made - 3) & 1));
    }
    __syncwarp();
  };
  __syncthreads();
  ShufflePlanesPlaces<kColumns> places;
  places.begin(base + p.places);
  int made = warpgroup;     // of the block, 64 rows each
  int of_tile = warpgroup;  // the warpgroup's next ones
  ShufflePlanesWork work = find_first_work(p, blockIdx.x, gridDim.x);
  while (find_work(p, work)) {
    const ShufflePlanesItem item = find_shuffle_planes_item(p, work.tile);
    if (of_tile >= work.count) skip_slots(p, base, slot);
    for (; of_tile < work.count; of_tile += kTeams, made += kTeams) {
      const int row = (work.row_tile + of_tile) * 64 + warp % 4 * 16;
      float sum[kColumns / 8][4];
      const T term = load_term<T>(p, row + find_pair_row<kTaps>(p));
      const int64_t target = find_planes_run(p, item, row >> p.taps_shift, kTaps);
      const int turn = made / kTeams + (warpgroup > 0);  // the first warpgroup begins without being told
      if (kTeams == 3) release_buffer(made);
      if (turn > 0) mbarrier_wait(barriers.turn(warpgroup), (turn - 1) & 1);
      multiply_planes<T, kColumns>(p, base, next_turn, of_tile < kTeams, of_tile + kTeams >= work.count, ring, slot,
                                   sum);
      if (kTeams == 2) release_buffer(made);
      if (kTeams == 3 && made >= 2) mbarrier_wait(barriers.empty_buffer(made & 1), (made / 2 - 1) & 1);
      store_planes<T, kTaps, kColumns>(p, item, sum, to_accumulator(term), target, pair, places,
                                       staging + (made & 1) * p.buffer_bytes, row);
    }
    of_tile -= work.count;
    advance_ring(slot, p.slots, p.chunks);
  }
  if (kTeams == 3) release_buffer(made);
}

template <typename T, int kTaps, int kColumns>
__global__ void __launch_bounds__(kShufflePlanesThreads<kColumns>, 1)
    shuffle_planes_kernel(const __grid_constant__ ShufflePlanesParams p) {
#ifdef FASTCONVT_WGMMA
  constexpr int kTeams = kShufflePlanesTeams<kColumns>;
  extern __shared__ __align__(1024) unsigned char bytes[];
  const uint32_t base = shared_address(bytes);
  if (threadIdx.x >= kTeams * 128) {
    lower_registers<56>();
    const ShufflePlanesBarriers barriers{base + p.barriers};
    const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32 % 4, 0);
    const bool one = elect_one();
    if (one) {
      // By all four, since it takes a thread long.
#pragma unroll 1
      for (int i = warp; i < p.stages; i += 4) {
        mbarrier_init(barriers.full_stage(i), 1);
        mbarrier_init(barriers.empty_stage(i), 4);
      }
#pragma unroll 1
      for (int i = warp; i < p.slots; i += 4) {
        mbarrier_init(barriers.full_slot(i), kShufflePlanesCopiers);
        mbarrier_init(barriers.empty_slot(i), kTeams * 4);
      }
      if (warp < kTeams) mbarrier_init(barriers.turn(warp), 4);
      if (warp < 2) mbarrier_init(barriers.empty_buffer(warp), 4);
      if (warp == 3) {
        asm volatile("st.volatile.shared.b32 [%0], %1;" ::"r"(barriers.near_end()), "r"(0) : "memory");
      }
      fence_shared_writes();
    }
    __syncwarp();
    __syncthreads();
    if (warp > 0) {
      copy_inputs(p, base, threadIdx.x % 128 - 32);
    } else if (one) {
      copy_weights(p, base);
    }
  } else {
    raise_registers<kTeams == 2 ? 224 : 152>();
    // The shuffle keeps the compiler from finding the address out again between products.
    make_planes<T, kTaps, kColumns>(p, __shfl_sync(~0u, base, 0));
    wait_for_bulk_reads();  // before the shared memory goes
  }
#endif
}

}  // namespace fastconvt::cuda
