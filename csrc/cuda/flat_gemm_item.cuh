// What a block of the flat GEMM works on.
#pragma once

#include "device/barrier.cuh"
#include "device/dependent_launch.cuh"
#include "device/numeric.cuh"
#include "device/shared_address.cuh"
#include "flat_gemm_params.h"

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

// What a block makes, one after the other: items, or, kSplit, an equal share of all items' stages and chunks (units).
// Shares are made from their ends, so that what other blocks need is ready early, and a block waits for earlier ones.
template <bool kSplit>
struct FlatGemmSchedule {
  int at, end;
  int index;        // of the item
  int from, count;  // its stages and chunks

  __device__ __forceinline__ static int first_unit(const FlatGemmParams& p, int block) {
    return block * p.share + min(block, p.longer_shares);
  }
  __device__ __forceinline__ void begin(const FlatGemmParams& p) {
    at = kSplit ? first_unit(p, blockIdx.x + 1) : blockIdx.x;
    end = kSplit ? first_unit(p, blockIdx.x) : p.items;
  }
  __device__ __forceinline__ bool next(const FlatGemmParams& p) {
    if constexpr (kSplit) {
      if (at <= end) return false;
      from = at - 1;
      index = p.units(from);
      count = min(from + 1, at - end);
      from += 1 - count;
      at -= count;
    } else {
      if (at >= end) return false;
      index = at;
      from = 0, count = find_item(p, index).of(p).stages * p.chunks;
      at += gridDim.x;
    }
    return true;
  }
  __device__ __forceinline__ FlatGemmItem item(const FlatGemmParams& p) const { return find_item(p, index); }
};

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
