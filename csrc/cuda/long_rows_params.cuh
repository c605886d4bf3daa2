// Long rows: parameters, and how the roles of a block see them.
#pragma once

#include "../core/long_rows.h"
#include "device/fast_divide.h"
#include "epilogue.cuh"
#include "params.h"
#include "rectifier.h"
#include "rows_persistent_fragment.cuh"
#include "rows_ring.cuh"

namespace fastconvt::cuda {

struct LongRowsParams {
  const void* input;
  const void* weight;
  const void* bias;  // or null
  void* output;
  Rectifier rectify;
  Strides in, out;
  LongRowsTile tile;
  int in_width, out_width, padding;
  int group_in, group_out;        // channels of a group
  int in_channels, out_channels;  // of merged groups
  int items;                      // tiles of all batch entries
  int granule;                    // bytes that a copy of inputs moves
  FastDivide by_tiles, by_group_in, by_group_out;
};

template <typename T, bool kSplit_, int kSteps_, int kKernel_, int kStride_, int kDilation_>
struct LongRowsTraits : TappedPhases<kKernel_, kStride_, kDilation_> {
  using Element = T;
  static constexpr bool kSplit = kSplit_;  // float32 as two TF32 terms, by three products
  // Steps of input channels, whose inputs a maker then keeps for all blocks of output channels; or 0: any number.
  static constexpr int kSteps = kSteps_;
  static constexpr int kKernel = kKernel_;
  static constexpr int kStride = kStride_;
  static constexpr int kDilation = kDilation_;
  static constexpr int kReach = (kKernel - 1) * kDilation / kStride;  // bases that taps read back
  static_assert(kReach <= 4);
  static constexpr int kStep = long_rows_step(sizeof(T));
  static constexpr int kHalo = long_rows_halo(sizeof(T));
  static constexpr int kStrips = long_rows_strips(sizeof(T));
  static constexpr int kTiles = 4;                // MMAs of a strip
  static constexpr int kVector = 16 / sizeof(T);  // elements
  static constexpr int kSector = kLongRowsSector / sizeof(T);
};
inline constexpr int kLongRowsThreads = 32 * (kLongRowsMakers + 2);  // and a storer and a feeder

// A lane's share of the left operand of an MMA.
template <typename T>
struct alignas(16) LongRowsLeft {
  MmaLeft<T> part[4 / sizeof(T)];
};

// Elements from the last address that is a multiple of `alignment` elements; addresses count elements modulo 2^32.
__device__ inline int long_rows_skew(uint32_t at, int alignment) { return static_cast<int>(at) & (alignment - 1); }

// 16 output channels.
struct LongRowsBlock {
  int group;     // merged groups
  int first;     // channel of the group
  int channels;  // that exist
};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

// What the roles have in common.
template <class Traits>
struct LongRowsRole {
  using Of = Traits;
  using T = typename Traits::Element;

  const LongRowsParams& p;
  unsigned char* const shared;
  const int lane;
  int set;  // of channel blocks
  int first_item, item_step;

  __device__ LongRowsRole(const LongRowsParams& p, unsigned char* shared)
      : p(p), shared(shared), lane(threadIdx.x % 32) {
    set = static_cast<int>(blockIdx.x) % p.tile.sets;
    first_item = static_cast<int>(blockIdx.x) / p.tile.sets;
    item_step = static_cast<int>(gridDim.x) / p.tile.sets;
  }

  __device__ LongRowsLeft<T>* weights() const { return reinterpret_cast<LongRowsLeft<T>*>(shared); }
  __device__ float* terms() const { return reinterpret_cast<float*>(shared + p.tile.terms); }
  __device__ T* inputs(int buffer) const {
    return reinterpret_cast<T*>(shared + p.tile.inputs + buffer * p.tile.input_bytes);
  }
  __device__ T* outputs(int stage) const {
    return reinterpret_cast<T*>(shared + p.tile.outputs + stage * p.tile.output_bytes);
  }
  __device__ uint64_t* barrier(int kind, int place) const {
    return reinterpret_cast<uint64_t*>(shared + p.tile.barriers) + kind * kLongRowsRing + place;
  }
  __device__ uint64_t* full(int buffer) const { return barrier(0, buffer); }
  __device__ uint64_t* empty(int buffer) const { return barrier(1, buffer); }
  __device__ uint64_t* staged(int stage) const { return barrier(2, stage); }
  __device__ uint64_t* free(int stage) const { return barrier(3, stage); }

  // The blocks of output channels that the block of threads makes, one after the other.
  __device__ LongRowsBlock first_block() const {
    const int of_group = min(p.tile.blocks, p.tile.channel_blocks), sets = p.tile.channel_blocks / of_group;
    const int group = sets == 1 ? set * p.tile.groups : set / sets;
    const int first = set % sets * of_group * kLongRowsChannels;
    return {group, first, min(kLongRowsChannels, p.out_channels - first)};
  }
  // Returns true if a group begins.
  __device__ bool advance(LongRowsBlock& block) const {
    block.first += kLongRowsChannels;
    const bool next = block.first >= p.out_channels;
    if (next) block.first = 0, ++block.group;
    block.channels = min(kLongRowsChannels, p.out_channels - block.first);
    return next;
  }
  // Output 0 of a channel of a block, in the entry of the batch.
  __device__ T* channel_row(int batch, const LongRowsBlock& block, int channel) const {
    return static_cast<T*>(p.output) + batch * p.out.batch +
           (static_cast<int64_t>(block.group) * p.out_channels + block.first + channel) * p.out.channel;
  }
  // Where it stands in memory, in elements, modulo 2^32.
  __device__ uint32_t channel_origin(int batch, const LongRowsBlock& block) const {
    return static_cast<uint32_t>(reinterpret_cast<uintptr_t>(p.output) / sizeof(T)) +
           static_cast<uint32_t>(batch) * static_cast<uint32_t>(p.out.batch) +
           static_cast<uint32_t>(block.group * p.out_channels + block.first) * static_cast<uint32_t>(p.out.channel);
  }
  // The position of phase 0 of the tile's first base.
  __device__ int first_output(int tile) const {
    return (p.tile.base + tile * p.tile.advance) * Traits::kStride - p.padding;
  }
};

#endif

}  // namespace fastconvt::cuda
