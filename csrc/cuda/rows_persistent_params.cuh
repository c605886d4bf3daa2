// The persistent row family: parameters and items of work.
#pragma once

#include "../core/rows_persistent.h"
#include "device/fast_divide.h"
#include "device/numeric.cuh"
#include "params.h"
#include "rectifier.h"
#include "rows_mma_height.h"
#include "rows_ring.cuh"

namespace fastconvt::cuda {

// Rows of a phase without taps are constants. A row is joined to the neighbour's if that is long enough and one of the
// two is a constant.
struct RowsPersistentPhase : RowsMmaPhase {
  bool joined_before, joined_after;
};

struct RowsPersistentParams {
  const void* input;
  const void* weight;
  const void* bias;  // or null
  void* output;
  Rectifier rectify;
  unsigned* arrivals;  // zero, or null: then blocks do not wait for one another
  Strides in, out;
  RowsPersistentTile tile;
  RowsPersistentPhase phase[kRowsMmaMaxStride];
  int in_height, out_height, height_kernel, height_stride, height_padding;
  int tap_step, back_step;  // between the taps of a phase of the height, and between what they read
  int before, after;        // 1 if constants alone come before an image's bases, and after them
  int in_width, out_width, padding;
  int group_in, group_out;        // channels of a group
  int in_channels, out_channels;  // of merged groups
  int sets;                       // channel blocks and segments: what an input chunk is made into
  FastDivide by_sets, by_blocks, by_parts, by_channel_blocks, by_group_in, by_group_out;
  int least_bases;  // of a part
  int items;        // chunks of all sets
  int granule;      // bytes that a copy of inputs moves
};

template <typename T, bool kSplit_, int kKernel_, int kStride_, int kDilation_>
struct RowsPersistentTraits : TappedPhases<kKernel_, kStride_, kDilation_> {
  using Element = T;
  static constexpr bool kSplit = kSplit_;  // float32 as two TF32 terms, by three products
  static constexpr int kKernel = kKernel_;
  static constexpr int kStride = kStride_;
  static constexpr int kDilation = kDilation_;
  static constexpr int kReach = (kKernel - 1) * kDilation / kStride;  // bases that taps read back
  static constexpr int kTapStep = kStride / std::gcd(kStride, kDilation);
  // In 16 bits an MMA has 16 terms: two taps of a phase, or, where a phase has only one, two steps.
  static constexpr bool kPairsSteps = sizeof(T) == 2 && kKernel <= kTapStep;
  static constexpr int kVector = 16 / sizeof(T);  // elements
  static constexpr int kSector = kRowsPersistentSector / sizeof(T);
  static constexpr int kLine = 128 / sizeof(T);
  static constexpr int kTiles = rows_persistent_tiles(sizeof(T), kStride_);
  static constexpr int kMaxThreads =
      32 * (rows_persistent_makers(kSplit, kStride) + kRowsPersistentStorers + kRowsPersistentFeeders);
};

__device__ inline bool has_input_row(const RowsPersistentParams& p, int y) {
  return static_cast<unsigned>(y) < static_cast<unsigned>(p.in_height);
}

// Elements from the last address that is a multiple of `alignment` elements.
template <typename T>
__device__ inline int misalignment(const T* at, int alignment) {
  return static_cast<int>(reinterpret_cast<uintptr_t>(at) / sizeof(T)) & (alignment - 1);
}

// Neighbouring bases of the height in one image, for a channel block and a segment.
template <typename T>
struct RowsPersistentItem {
  int block;         // of channels, over all groups
  int channels;      // output channels of the block
  int column;        // base of the last axis where the segment starts
  int base;          // of the height, the first one
  int count;         // bases
  bool first, last;  // of the image
  const T* input;    // the group's first channel
  T* output;         // the block's first channel

  RowsPersistentItem() = default;
  // What reads the same inputs is neighbours, then what writes next to each other: both happen at the same time.
  __device__ RowsPersistentItem(const RowsPersistentParams& p, int index) {
    block = index;
    int part = p.by_sets(block);
    const int segment = p.by_blocks(block);
    column = p.tile.base + segment * p.tile.columns;
    const int batch = p.by_parts(part);
    const int least = p.least_bases, more = p.tile.bases - least * p.tile.parts;
    count = least + (part < more ? 1 : 0);
    base = p.tile.first_base + part * least + min(part, more);
    first = part == 0;
    last = part + 1 == p.tile.parts;
    int channel = block;
    const int group = p.by_channel_blocks(channel);
    channel *= kRowsMmaChannels;
    channels = min(kRowsMmaChannels, p.out_channels - channel);
    input = static_cast<const T*>(p.input) + batch * p.in.batch + group * p.in_channels * p.in.channel;
    output = static_cast<T*>(p.output) + batch * p.out.batch + (group * p.out_channels + channel) * p.out.channel;
  }
};
static_assert(sizeof(RowsPersistentItem<float>) <= kRowsPersistentItemBytes);

}  // namespace fastconvt::cuda
