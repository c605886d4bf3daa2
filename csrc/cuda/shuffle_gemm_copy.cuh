// Copies of the shuffle GEMM from global to shared memory: inputs and weights through barriers, by a single thread (or,
// what tensor copies cannot read, by several).
#pragma once

#include <cuda.h>

#include "device/barrier.cuh"
#include "device/elect.cuh"
#include "device/prefetch_map.cuh"
#include "device/tensor_copy.cuh"
#include "shuffle_gemm_product.cuh"
#include "shuffle_gemm_store.cuh"

namespace fastconvt::cuda {

// In shared memory: of every stage, that it is full and that it is empty; that a warpgroup's turn has come; that
// resident weights are there.
struct ShuffleGemmBarriers {
  uint32_t address;
  __device__ __forceinline__ uint32_t full(int stage) const { return address + stage * 8; }
  __device__ __forceinline__ uint32_t empty(int stage) const { return full(kShuffleGemmMaxStages + stage); }
  __device__ __forceinline__ uint32_t turn(int warpgroup) const { return full(2 * kShuffleGemmMaxStages + warpgroup); }
  __device__ __forceinline__ uint32_t weights(int chunk) const { return turn(4 + chunk); }
};

struct ShuffleGemmRing {
  int place = 0, parity = 0;
  __device__ __forceinline__ void advance(int places, int by = 1) {
    place += by;
    while (place >= places) place -= places, parity ^= 1;
  }
};

// Where inputs of a tile begin.
struct ShuffleGemmSource {
  int position, n, slice;  // of boxes, channels_last: position in a line, line, slice
};
template <bool kContiguous, bool kBoxes>
__device__ __forceinline__ ShuffleGemmSource find_source(const ShuffleGemmParams& p, int tile) {
  ShuffleGemmSource source{tile, 0, 0};
  if constexpr (!kContiguous && kBoxes) {
    source.n = p.across(source.position);
    source.slice = p.down(source.n);
    source.position *= p.box_width.divisor, source.n *= p.box_height;
    return source;
  }
  if (kContiguous && !p.flat) source.n = p.image(source.position);
  source.position *= 64;
  return source;
}

// Inputs of a tile, one chunk of channels.
template <bool kContiguous, bool kBoxes>
__device__ __forceinline__ void load_inputs(const CUtensorMap* map, uint32_t to, const ShuffleGemmSource& from,
                                            int chunk, int group, uint32_t barrier) {
  if constexpr (kContiguous) {
    load_box(to, map, from.position, chunk * 64, group, from.n, barrier);
  } else if constexpr (kBoxes) {
    load_box(to, map, chunk * 64, group, from.position, from.n, from.slice, barrier);
  } else {
    load_box(to, map, chunk * 64, group, from.position, 0, barrier);
  }
}
// Weights of a block of columns, one chunk of channels: at once, or where columns are no multiple of 64 that many.
template <int kColumns>
__device__ __forceinline__ void load_weights(const ShuffleGemmParams& p, const CUtensorMap* map, uint32_t to,
                                             const ShuffleGemmItem& item, int chunk, uint32_t barrier) {
  if (p.whole_weights) {
    load_box(to, map, 0, chunk * 64, item.block * (kColumns / 64), item.group, barrier);
  } else {
#pragma unroll 1
    for (int b = 0; b < kColumns / 64; ++b) {
      load_box(to + b * 8192, map, item.block * kColumns + b * 64, chunk * 64, 0, item.group, barrier);
    }
  }
}

// Copies the inputs of all items, as soon as there is a place. One thread: what it does between two copies is kept
// short, since products wait for it.
template <bool kContiguous, bool kBoxes>
__device__ __forceinline__ void copy_inputs(const ShuffleGemmParams& p, uint32_t base, const CUtensorMap* map) {
  const ShuffleGemmBarriers barriers{base + p.barriers};
  constexpr int kPlace = 8192;
  const int of_tile = !kContiguous && kBoxes ? p.box_positions * 128 : kPlace;
  ShuffleGemmRing ring;
  for (int index = blockIdx.x; index < p.items; index += gridDim.x) {
    const ShuffleGemmItem item = find_shuffle_gemm_item(p, index);
    const int tile = item.first_tile;
    const int bytes = tile + p.sharing > p.tiles ? of_tile : p.sharing * of_tile;
    const ShuffleGemmSource from = find_source<kContiguous, kBoxes>(p, tile);
    const ShuffleGemmSource second = find_source<kContiguous, kBoxes>(p, tile + 1);
    for (int chunk = 0; chunk < p.chunks; ++chunk, ring.advance(p.stages)) {
      const uint32_t to = base + p.ring + ring.place * p.stage_bytes, full = barriers.full(ring.place);
      mbarrier_wait(barriers.empty(ring.place), ring.parity ^ 1);
      mbarrier_arrive_expecting(full, bytes);
      load_inputs<kContiguous, kBoxes>(map, to, from, chunk, item.group, full);
      if (bytes > of_tile) load_inputs<kContiguous, kBoxes>(map, to + kPlace, second, chunk, item.group, full);
    }
  }
}
// The same of weights, by another thread; resident ones once.
template <int kColumns>
__device__ __forceinline__ void copy_weights(const ShuffleGemmParams& p, uint32_t base, const CUtensorMap* map) {
  const ShuffleGemmBarriers barriers{base + p.barriers};
  constexpr int kBytes = kColumns * 128;
  ShuffleGemmRing ring;
  for (int index = blockIdx.x; index < p.items; index += gridDim.x) {
    const ShuffleGemmItem item = find_shuffle_gemm_item(p, index);
    for (int chunk = 0; chunk < p.chunks; ++chunk, ring.advance(p.stages)) {
      const uint32_t stage = base + p.ring + ring.place * p.stage_bytes + p.sharing * 8192;
      const uint32_t to = p.resident ? base + chunk * kBytes : stage;
      const uint32_t full = p.resident ? barriers.weights(chunk) : barriers.full(ring.place);
      if (!p.resident) mbarrier_wait(barriers.empty(ring.place), ring.parity ^ 1);
      mbarrier_arrive_expecting(full, kBytes);
      load_weights<kColumns>(p, map, to, item, chunk, full);
    }
    if (p.resident) break;
  }
}

// Resident weights that tensor copies cannot read, as these would place them: a block of columns of all channels. All
// threads that multiply. A function of its own: inlined, it took registers and instructions from kernels without it.
template <int kColumns, int kThreads>
__device__ __noinline__ void copy_weights_by_hand(const unsigned short* weights, int channels, int columns, int chunks,
                                                  int block, uint32_t base) {
  for (int i = threadIdx.x; i < chunks * 64 * kColumns; i += kThreads) {
    const int local = i % kColumns, row = i / kColumns, chunk = row / 64, in_chunk = row % 64;
    const int column = block * kColumns + local;
    const bool exists = row < channels && column < columns;
    const unsigned short value = exists ? __ldg(weights + static_cast<int64_t>(row) * columns + column) : 0;
    const uint32_t at = chunk * (kColumns * 128) + local / 64 * 8192 + in_chunk * 128 +
                        ((local % 64 / 8 ^ in_chunk % 8) << 4) + local % 8 * 2;
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(base + at), "h"(value) : "memory");
  }
  fence_shared_writes();
}

}  // namespace fastconvt::cuda
