// Columns of wide blocks of the overlap-add family, and their weights' way to shared memory.
//
// Columns are numbered as a cell's outputs lie in memory: (channel, residues) where tensors are contiguous, (residues,
// channel) where channels come last. An item's 32 columns are four tiles of eight.
#pragma once

#include "overlap_add_stage.cuh"

namespace fastconvt::cuda {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800

struct OverlapAddWideColumn {
  int residue[3], channel;
  bool exists;

  __device__ __forceinline__ OverlapAddWideColumn(const OverlapAddParams& p, int column) {
    int rest = column;
    exists = rest < p.wide_columns;
    if (p.channels_last) {
      channel = rest;
      rest = p.by_group_out(channel);
    }
#pragma unroll
    for (int a = 2; a >= 0; --a) {
      residue[a] = rest;
      rest = p.axis[a].by_stride(residue[a]);
    }
    if (!p.channels_last) channel = rest;
  }
};

// A lane's sums of a row of an item are eight elements, two of each column tile. The columns are dealt out so that a
// vector's are a lane's, at least two, and those of four lanes lie side by side.
__device__ __forceinline__ constexpr int overlap_add_dealt(int vector) { return vector > 1 ? vector : 2; }
__device__ __forceinline__ int overlap_add_wide_element(int element, int dealt) {
  return (element / dealt * 4 + static_cast<int>(threadIdx.x) % 4) * dealt + element % dealt;
}
// Where a column's weights stand among those of a block: in the order of tiles.
__device__ __forceinline__ int overlap_add_wide_place(int column, int dealt) {
  const int of_set = column % kOverlapAddWideColumns, run = of_set % (4 * dealt);
  const int element = of_set / (4 * dealt) * dealt + run % dealt;
  return column - of_set + element / 2 * 8 + run / dealt * 2 + element % 2;
}

// All weights of a block's columns: granule by granule, 16 bytes a column; strictly three terms, one after the other.
template <typename T, OverlapAddPrecision kPrecision>
class OverlapAddWideWeights {
  static constexpr bool kStrict = kPrecision == OverlapAddPrecision::kFloat32;
  static constexpr int kHalves = 4 / sizeof(T), kWords = kStrict ? 8 : 4;
  static constexpr int kChannels = kWords * kHalves, kGranules = 16 / kChannels;  // of a granule; on their way

  const OverlapAddParams& p;
  const uint32_t target;
  const int first, columns;  // of the block
  const T* const weight;

 public:
  __device__ OverlapAddWideWeights(const OverlapAddParams& p, const OverlapAddBlock& block, uint32_t target)
      : p(p),
        target(target),
        first(block.first_column * kOverlapAddWideColumns),
        columns(p.block_sets * kOverlapAddWideColumns),
        weight(static_cast<const T*>(p.weight) + static_cast<int64_t>(block.group) * p.group_in * p.weight_channel) {}

  // A thread takes a column's weights of an offset; neighbouring threads take neighbouring taps.
  __device__ void copy() const {
    int width = columns, first_of_width = 0, list = columns;
    if (p.channels_last) {
      first_of_width = first / p.group_out;
      width = (first + columns - 1) / p.group_out - first_of_width + 1;
      list = width * p.group_out;
    }
    int offset = threadIdx.x / list, index = threadIdx.x - offset * list;
    const int offsets = p.axis[0].reach * p.axis[1].reach * p.axis[2].reach;
#pragma unroll 1
    while (offset < offsets) {
      int column = index;
      if (p.channels_last) column = (first_of_width + index % width) * p.group_out + index / width - first;
      if (static_cast<unsigned>(column) < static_cast<unsigned>(columns)) copy_column(column, offset);
      for (index += blockDim.x; index >= list; index -= list) ++offset;
    }
    const int used = offsets * p.channel_granules;
    if (used < p.all_granules) {
      for (int i = threadIdx.x; i < columns * kTerms; i += blockDim.x) {
        const uint32_t zeros[4] = {};
        overlap_add_store(target + (used * columns * kTerms + i) * 16, zeros);
      }
    }
  }

 private:
  static constexpr int kTerms = kStrict ? 3 : 1;

  // Index of the tap of the group's first channel; -1: there is none.
  __device__ __forceinline__ int find_tap(int column, int offset) const {
    const OverlapAddWideColumn at(p, first + column);
    int tap[3];
    bool exists = at.exists;
#pragma unroll
    for (int a = 2; a >= 0; --a) {
      int of_axis = offset;
      offset = p.axis[a].by_reach(of_axis);
      tap[a] = at.residue[a] - p.axis[a].stride * (p.axis[a].low + of_axis);
      exists = exists && static_cast<unsigned>(tap[a]) < static_cast<unsigned>(p.axis[a].kernel);
    }
    return exists ? at.channel * p.taps + (tap[0] * p.axis[1].kernel + tap[1]) * p.axis[2].kernel + tap[2] : -1;
  }

  __device__ __forceinline__ void copy_column(int column, int offset) const {
    const int tap = find_tap(column, offset), of_channel = static_cast<int>(p.weight_channel);
    const int channels = tap >= 0 ? p.group_in : 0;
    uint32_t index = tap;
    uint32_t to = target + (offset * p.channel_granules * kTerms * columns +
                            overlap_add_wide_place(column, overlap_add_dealt(p.vector))) *
                               16;
#pragma unroll 1
    for (int channel = 0; channel < p.group_in; channel += kGranules * kChannels) {
      uint32_t raw[kGranules][kChannels];
#pragma unroll
      for (int g = 0; g < kGranules; ++g) {
#pragma unroll
        for (int c = 0; c < kChannels; ++c, index += of_channel) {
          const bool exists = channel + g * kChannels + c < channels;
          if constexpr (kHalves == 1) {
            raw[g][c] = exists ? __ldg(reinterpret_cast<const uint32_t*>(weight) + index) : 0u;
          } else {
            raw[g][c] = overlap_add_load_half(weight + index, exists);
          }
        }
      }
#pragma unroll
      for (int g = 0; g < kGranules; ++g) {
        if (channel + g * kChannels < p.group_in) store_granule(to, raw[g]);
        to += kTerms * columns * 16;
      }
    }
  }

  __device__ __forceinline__ void store_granule(uint32_t to, const uint32_t (&raw)[kChannels]) const {
    uint32_t word[kTerms][4];
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      if constexpr (kStrict) {
        overlap_add_split_pair(raw[2 * w], raw[2 * w + 1], word[0][w], word[1][w], word[2][w]);
      } else if constexpr (kHalves == 2) {
        word[0][w] = raw[2 * w] | raw[2 * w + 1] << 16;
      } else {
        word[0][w] = overlap_add_round(raw[w]);
      }
    }
#pragma unroll
    for (int i = 0; i < kTerms; ++i) overlap_add_store(to + i * columns * 16, word[i]);
  }
};

#endif

}  // namespace fastconvt::cuda
