// The filter-bank family: what a block is told (csrc/core/filter_bank.h).
#pragma once

#include "../core/filter_bank.h"
#include "device/fast_divide.h"
#include "device/numeric.cuh"
#include "device/shared_address.cuh"
#include "params.h"
#include "rectifier.h"

namespace fastconvt::cuda {

enum class FilterBankPrecision : int { kFloat32, kTf32, k16Bits };

struct FilterBankParams {
  const void* input;
  const void* weight;
  const void* bias;  // or null
  void* output;
  Rectifier rectify;
  Strides in, out;
  int batch, groups, group_in, group_out;
  int length, kernel, stride, padding;  // of the axis
  int64_t outputs;
  int first_base, bases;
  int first_input, lead;  // position of an item's first place; places before that of the last tap
  int rows, taps;
  int row_tiles, loops;  // FilterBankTile
  int split_bits;        // the logarithm of FilterBankTile::splits
  int chunks, stages, slots;
  int held, pitch, stage_bytes;
  int sums;  // bytes from the first stage to the sums
  int64_t weight_channel, weight_bytes;
  int prefetchers;   // blocks that bring the weight to the L2 cache
  bool store_pairs;  // two rows are one access to the output
  // What feeders read at a time: contiguous 0 or 1, a position or two; channels_last: bytes of channels.
  int input_bytes;
  int feed_lanes, feed_groups;  // contiguous: threads side by side, and how many times
  FastDivide by_stride, by_row_blocks, by_column_tiles, by_span;
};

template <typename T_, FilterBankPrecision kPrecision, bool kPairs_>
struct FilterBankTraits {
  using Element = T_;
  static constexpr bool kPairs = kPairs_;                                      // two rows are one access to the weight
  static constexpr bool kThree = kPrecision == FilterBankPrecision::kFloat32;  // products for one
  static constexpr bool kRounds = kPrecision == FilterBankPrecision::kTf32;
  static constexpr int kColumns = kThree ? 80 : 160;
  // Two warpgroups multiply: they share the rows, or the stages.
  static constexpr int kRows = kThree ? 128 : 64;
  static constexpr int kStageStep = kThree ? 1 : 2;
  static constexpr int kMakers = 256, kFeeders = kThree ? 128 : 256;
  static constexpr int kMakerRegisters = kThree ? 216 : 176, kFeederRegisters = kThree ? 72 : 80;
  static constexpr int kVector = 16 / sizeof(T_);    // channels
  static constexpr int kStepChannels = 2 * kVector;  // of a product
};

// What a block makes: the first tile, of a group, and its stages.
struct FilterBankBlock {
  int row, column, group;  // the first ones
  int splits, rank, first_stage, end_stage;
  __device__ FilterBankBlock(const FilterBankParams& p, int rows, int columns) {
    splits = 1 << p.split_bits, rank = blockIdx.x & (splits - 1);
    first_stage = p.stages * rank >> p.split_bits, end_stage = p.stages * (rank + 1) >> p.split_bits;
    int at = blockIdx.x >> p.split_bits, rest = p.by_row_blocks(at);
    row = at * rows * p.loops;
    group = p.by_column_tiles(rest);
    column = rest * columns;
  }
};

// An item of the batch and a base, of a column of the problem or of a place: an input that columns reach.
struct FilterBankPlace {
  int item, base;
  __device__ FilterBankPlace(const FilterBankParams& p, int column) {
    item = p.by_span(column);
    base = column;
  }
};

// Barriers in shared memory: of every slot, that it is full and that it is empty.
struct FilterBankBarriers {
  uint32_t address;
  __device__ __forceinline__ uint32_t full(int slot) const { return address + slot * 16; }
  __device__ __forceinline__ uint32_t empty(int slot) const { return address + slot * 16 + 8; }
};

}  // namespace fastconvt::cuda
