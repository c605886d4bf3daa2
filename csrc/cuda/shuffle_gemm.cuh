// The shuffle GEMM, device side. See core/shuffle_gemm.h. Blocks are persistent: one thread copies, two warpgroups
// multiply 64 positions by the same columns each and store. They multiply in turns, so that one stores meanwhile.
#pragma once

#include <cuda.h>

#include "device/barrier.cuh"
#include "device/dependent_launch.cuh"
#include "device/wgmma.cuh"
#include "shuffle_gemm_product.cuh"
#include "shuffle_gemm_repair.cuh"

namespace fastconvt::cuda {

inline constexpr int kShuffleGemmThreads = 384;

// In shared memory: of every stage, that it is full and that it is empty; that a warpgroup's turn has come; that
// resident weights are there.
struct ShuffleGemmBarriers {
  uint32_t address;
  __device__ __forceinline__ uint32_t full(int stage) const { return address + stage * 8; }
  __device__ __forceinline__ uint32_t empty(int stage) const { return full(kShuffleGemmMaxStages + stage); }
  __device__ __forceinline__ uint32_t turn(int warpgroup) const { return full(2 * kShuffleGemmMaxStages + warpgroup); }
  __device__ __forceinline__ uint32_t weights(int chunk) const { return turn(2 + chunk); }
};

struct ShuffleGemmRing {
  int place = 0, parity = 0;
  __device__ __forceinline__ void advance(int places, int by = 1) {
    place += by;
    while (place >= places) place -= places, parity ^= 1;
  }
};

// A box of a tensor of four dimensions. Coordinates may lie outside: zeros are there.
__device__ __forceinline__ void load_box(uint32_t target, const CUtensorMap* map, int x, int y, int z, int u,
                                         uint32_t barrier) {
#ifdef FASTCONVT_SHUFFLE_GEMM
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], "
      "[%6];" ::"r"(target),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(u), "r"(barrier)
      : "memory");
#endif
}

// Inputs of a tile, one chunk of channels.
template <bool kContiguous>
__device__ __forceinline__ void load_inputs(const ShuffleGemmParams& p, const CUtensorMap* map, uint32_t to, int tile,
                                            int chunk, int group, uint32_t barrier) {
  if constexpr (kContiguous) {
    int in_image = tile;
    const int n = p.flat ? 0 : p.image(in_image);
    load_box(to, map, in_image * 64, chunk * 64, group, n, barrier);
  } else {
    load_box(to, map, chunk * 64, group, tile * 64, 0, barrier);
  }
}
template <int kColumns>
__device__ __forceinline__ void load_weights(const ShuffleGemmParams& p, const CUtensorMap* map, uint32_t to,
                                             const ShuffleGemmItem& item, int chunk, uint32_t barrier) {
#pragma unroll
  for (int b = 0; b < kColumns / 64; ++b) {
    load_box(to + b * 8192, map, item.block * kColumns + b * 64, chunk * 64, item.group, 0, barrier);
  }
}

// Copies what all items need, as soon as there is a place. One thread.
template <bool kContiguous, int kColumns>
__device__ __forceinline__ void copy_items(const ShuffleGemmParams& p, uint32_t base, const CUtensorMap* inputs,
                                           const CUtensorMap* weights) {
  const ShuffleGemmBarriers barriers{base + p.barriers};
  constexpr int kInputBytes = 8192, kWeightBytes = kColumns * 128;
  ShuffleGemmRing ring;
  bool first = p.resident && !p.by_hand;
  for (int index = blockIdx.x; index < p.items; index += gridDim.x) {
    const ShuffleGemmItem item = find_shuffle_gemm_item(p, index);
    const int tile = item.pair * 2, tiles = min(2, p.tiles - tile);
    for (int i = 0; i < (p.resident ? tiles * p.chunks : p.chunks); ++i, ring.advance(p.stages)) {
      const uint32_t to = base + p.ring + ring.place * p.stage_bytes, full = barriers.full(ring.place);
      mbarrier_wait(barriers.empty(ring.place), ring.parity ^ 1);
      if (p.resident) {
        const int half = i >= p.chunks, chunk = i - half * p.chunks;
        if (first && half == 0) {
          mbarrier_arrive_expecting(barriers.weights(chunk), kWeightBytes);
          load_weights<kColumns>(p, weights, base + chunk * (kColumns * 128), item, chunk, barriers.weights(chunk));
        }
        mbarrier_arrive_expecting(full, kInputBytes);
        load_inputs<kContiguous>(p, inputs, to, tile + half, chunk, item.group, full);
      } else {
        mbarrier_arrive_expecting(full, tiles * kInputBytes + kWeightBytes);
#pragma unroll 1
        for (int half = 0; half < tiles; ++half) {
          load_inputs<kContiguous>(p, inputs, to + half * 8192, tile + half, i, item.group, full);
        }
        load_weights<kColumns>(p, weights, to + 16384, item, i, full);
      }
    }
    first = false;
  }
}

// Resident weights that tensor copies cannot read, as these would place them. Two warpgroups.
template <typename T, int kColumns>
__device__ __forceinline__ void copy_weights_by_hand(const ShuffleGemmParams& p, uint32_t base,
                                                     const ShuffleGemmItem& item) {
  const unsigned short* const source =
      static_cast<const unsigned short*>(p.weight) + static_cast<int64_t>(item.group) * p.group_in * p.columns;
  for (int i = threadIdx.x; i < p.chunks * 64 * kColumns; i += 256) {
    const int local = i % kColumns, row = i / kColumns, chunk = row / 64, in_chunk = row % 64;
    const int column = item.block * kColumns + local;
    const bool exists = row < p.group_in && column < p.columns;
    const unsigned short value = exists ? __ldg(source + static_cast<int64_t>(row) * p.columns + column) : 0;
    const uint32_t at = chunk * (kColumns * 128) + local / 64 * 8192 + in_chunk * 128 +
                        ((local % 64 / 8 ^ in_chunk % 8) << 4) + local % 8 * 2;
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(base + at), "h"(value) : "memory");
  }
  fence_shared_writes();
}

// What bias adds to columns, of the block's or of all, and where the first of each two goes, from a position's first
// output; contiguous: where its row of taps does.
template <typename T, bool kContiguous, int kColumns>
__device__ __forceinline__ void fill_tables(const ShuffleGemmParams& p, uint32_t base, const ShuffleGemmItem& first) {
  const int blocks = p.column_blocks.divisor;
  const int count = (p.resident ? 1 : p.groups.divisor * blocks) * kColumns;
  for (int i = threadIdx.x; i < count; i += 256) {
    const int part = i / kColumns, group = p.resident ? first.group : part / blocks;
    int column = (p.resident ? first.block : part % blocks) * kColumns + i % kColumns;
    float term = 0;
    if (p.bias != nullptr && column < p.columns) {
      const int quotient = p.channel_columns(column);
      term = to_accumulator(
          __ldg(static_cast<const T*>(p.bias) + group * p.group_out + (kContiguous ? quotient : column)));
    }
    store_shared(base + p.terms + i * 4, __float_as_uint(term));
    if (i % 2 == 0) {
      column = (p.resident ? first.block : part % blocks) * kColumns + i % kColumns;
      int64_t offset = -1;
      if (column < p.columns) {
        offset = kContiguous ? group * static_cast<int64_t>(p.group_out) * p.plane +
                                   find_output_row(p, column / p.width_step, p.width_step)
                             : group * p.group_out + find_output_column(p, column);
      }
      store_shared(base + p.offsets + i * 2, static_cast<uint32_t>(offset));
    }
  }
}

// The sums of an item's tile; after the products of chunk `hand_over` the other warpgroup may multiply.
template <typename T, bool kContiguous, int kColumns>
__device__ __forceinline__ void multiply_item(const ShuffleGemmParams& p, uint32_t base, int warpgroup, bool wait,
                                              int hand_over, ShuffleGemmRing& ring, float (&sum)[kColumns / 8][4]) {
  const ShuffleGemmBarriers barriers{base + p.barriers};
  const bool arrives = threadIdx.x % 32 == 0;
  uint32_t done = 0;
#pragma unroll 1
  for (int chunk = 0; chunk < p.chunks; ++chunk) {
    if (wait) mbarrier_wait(barriers.weights(chunk), 0);
    mbarrier_wait(barriers.full(ring.place), ring.parity);
    const uint32_t stage = base + p.ring + ring.place * p.stage_bytes;
    const uint32_t a = stage + (p.resident ? 0 : warpgroup * 8192);
    const uint32_t b = p.resident ? base + chunk * (kColumns * 128) : stage + 16384;
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const uint64_t rows = kContiguous ? swizzled_operand(a + k * 2048, 8192) : swizzled_operand(a + k * 32, 16);
      start_swizzled_product<T, kContiguous, kColumns>(sum, rows, swizzled_operand(b + k * 2048, 8192), chunk | k);
    }
    wgmma_commit();
    if (p.takes_turns && chunk == hand_over && arrives) mbarrier_arrive(barriers.turn(warpgroup ^ 1));
    wgmma_wait<1>();
    if (arrives && done != 0) mbarrier_arrive(done);
    done = barriers.empty(ring.place);
    ring.advance(p.stages);
  }
  wgmma_wait<0>();
  if (arrives) mbarrier_arrive(done);
}

// Makes all items' outputs. Two warpgroups.
template <typename T, bool kContiguous, int kTaps, int kColumns, bool kRectify>
__device__ __forceinline__ void make_items(const ShuffleGemmParams& p, uint32_t base) {
  const ShuffleGemmBarriers barriers{base + p.barriers};
  const int warpgroup = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0);
  const uint32_t staging = base + p.staging + warpgroup * kShuffleGemmStaging;
  const ShuffleGemmItem start = find_shuffle_gemm_item(p, blockIdx.x);
  if (p.by_hand) copy_weights_by_hand<T, kColumns>(p, base, start);
  fill_tables<T, kContiguous, kColumns>(p, base, start);
  asm volatile("bar.sync 1, 256;" ::: "memory");
  ShuffleGemmRing ring;
  if (p.resident && warpgroup == 1) ring.advance(p.stages, p.chunks);
  bool wait = p.resident && !p.by_hand;
  int turn = warpgroup;  // the first warpgroup begins without being told
  for (int index = blockIdx.x; index < p.items; index += gridDim.x, ++turn) {
    const ShuffleGemmItem item = find_shuffle_gemm_item(p, index);
    const int tile = item.pair * 2 + warpgroup;
    if (p.resident && tile >= p.tiles) break;  // nobody waits for it
    float sum[kColumns / 8][4];
    if (p.takes_turns && turn > 0) mbarrier_wait(barriers.turn(warpgroup), (turn - 1) & 1);
    const int hand_over = warpgroup == 0 ? p.hand_over : p.chunks - 1;
    multiply_item<T, kContiguous, kColumns>(p, base, warpgroup, wait, hand_over, ring, sum);
    wait = false;
    if (p.resident) ring.advance(p.stages, p.chunks);
    if (tile >= p.tiles) continue;
    const int part = p.resident ? 0 : item.group * p.column_blocks.divisor + item.block;
    const uint32_t terms = base + p.terms + part * (kColumns * 4), offsets = base + p.offsets + part * (kColumns * 2);
    uint32_t mark;
    if constexpr (kContiguous) {
      mark = store_rows<T, kTaps, kColumns, kRectify>(p, sum, staging, terms, offsets, tile, item.block, warpgroup);
    } else {
      mark = store_pixels<T, kColumns, kRectify>(p, sum, staging, terms, offsets, tile, item.block);
    }
    if (any_of_warpgroup(warpgroup, is_marked(mark))) {
      repair_tile<T, kContiguous, kColumns>(p, tile, item.group, item.block);
    }
  }
}

// kTaps: of the last axis; 0: channels_last.
template <typename T, int kTaps, int kColumns, bool kRectify>
__global__ void __launch_bounds__(kShuffleGemmThreads, 1)
    shuffle_gemm_kernel(const __grid_constant__ CUtensorMap inputs, const __grid_constant__ CUtensorMap weights,
                        const __grid_constant__ ShuffleGemmParams p) {
#ifdef FASTCONVT_SHUFFLE_GEMM
  constexpr bool kContiguous = kTaps != 0;
  extern __shared__ __align__(1024) unsigned char bytes[];
  const uint32_t base = shared_address(bytes);
  if (threadIdx.x >= 256) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x == 256) {
      const ShuffleGemmBarriers barriers{base + p.barriers};
      for (int i = 0; i < p.stages; ++i) {
        mbarrier_init(barriers.full(i), 1);
        mbarrier_init(barriers.empty(i), p.resident ? 4 : 8);
      }
      mbarrier_init(barriers.turn(0), 4);
      mbarrier_init(barriers.turn(1), 4);
      for (int i = 0; p.resident && i < p.chunks; ++i) mbarrier_init(barriers.weights(i), 1);
      fence_shared_writes();
    }
    __syncwarp();
    asm volatile("bar.arrive 8, 384;" ::: "memory");
    if (threadIdx.x == 256) {
      wait_for_previous_grid();  // for packed tensors
      copy_items<kContiguous, kColumns>(p, base, &inputs, &weights);
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    asm volatile("bar.sync 8, 384;" ::: "memory");
    make_items<T, kContiguous, kTaps, kColumns, kRectify>(p, base);
  }
#endif
}

}  // namespace fastconvt::cuda
