// What a block of the flat GEMM works on.
#pragma once

#include "device/numeric.cuh"
#include "device/shared_address.cuh"
#include "flat_gemm_params.h"
#include "phase_gemm_barrier.cuh"

namespace fastconvt::cuda {

constexpr int kFlatGemmGroup = 128;  // threads of a warpgroup: two that multiply, one or two that load
// Float32 leaves registers for one that loads.
template <bool kThree>
constexpr int kFlatGemmLoaders = (kThree ? 1 : 2) * kFlatGemmGroup;
template <bool kThree>
constexpr int kFlatGemmThreads = 2 * kFlatGemmGroup + kFlatGemmLoaders<kThree>;

struct FlatGemmItem {
  int group, channel_block, index_of_class;
  int first;  // position
  __device__ __forceinline__ const FlatGemmClass& of(const FlatGemmParams& p) const {
    return p.of_class[index_of_class];
  }
};

__device__ __forceinline__ FlatGemmItem find_item(const FlatGemmParams& p, int index) {
  FlatGemmItem item;
  int rest = p.channel_blocks(index);
  item.channel_block = index;
  index = rest;
  rest = p.class_count(index);
  item.index_of_class = index;
  item.group = p.tiles(rest);
  item.first = rest * p.cells;
  return item;
}

// Coordinates of a position: batch entry, then one an axis.
struct FlatGemmPlace {
  int n, at[3];
};
__device__ __forceinline__ FlatGemmPlace find_place(const FlatGemmParams& p, int position) {
  FlatGemmPlace place;
#pragma unroll
  for (int a = 2; a >= 0; --a) {
    place.at[a] = position;
    position = p.axis[a].pitch(place.at[a]);
  }
  place.n = position;
  return place;
}

// In shared memory.
struct FlatGemmBarriers {
  uint32_t address;
  int stages;
  __device__ __forceinline__ uint32_t full(int stage) const { return address + stage * 8; }
  __device__ __forceinline__ uint32_t empty(int stage) const { return address + (stages + stage) * 8; }
};

// Warpgroups that work together, by a barrier of their own, wait for each other.
template <int kThreads>
__device__ __forceinline__ void meet_group(int barrier) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(kThreads) : "memory");
}

}  // namespace fastconvt::cuda
