// The 16-bit GEMM of transposed convolutions whose taps never overlap, kernel == stride on every axis: what it can
// make, and the tile of a block. Plain C++17: no Torch, no CUDA.
//
// Every output has one tap, so a layer is one matrix product: rows are positions, the inner dimension input channels,
// columns (output channel, tap), or (tap, output channel) where weights are channels_last. Both operands are read as
// they lie in memory, by tensor copies; the store shuffles.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>

#include "problem.h"

namespace fastconvt {

inline constexpr int kShuffleGemmChunk = 64;  // input channels of a stage, and positions of a tile
inline constexpr int kShuffleGemmColumns[] = {256, 128, 64};
inline constexpr int kShuffleGemmMaxStages = 24;
inline constexpr int64_t kShuffleGemmShared = 227 * 1024;
inline constexpr int kShuffleGemmStaging = 8192;  // bytes of a warpgroup's outputs on their way to memory
inline constexpr int kShuffleGemmMaxTerms = 8192;
inline constexpr int kShuffleGemmBlocks = 132;  // that run at once on an H200

struct ShuffleGemmTile {
  int columns;    // of a tile: of kShuffleGemmColumns
  bool resident;  // a block's weights stay, else they come with the inputs
  bool by_hand;   // weights that tensor copies cannot read
  int chunks;     // of input channels, in a group
  bool packed;    // contiguous inputs that tensor copies cannot read
  int column_blocks;
  int stages, stage_bytes;
  int64_t tiles, items;  // of positions; a pair of tiles by a column block
  // Shared memory in bytes: where each part begins; resident weights come first.
  int ring, staging, terms, offsets, barriers, shared_bytes;
  double cost_ms;
};

// Whether tensor copies cannot read the inputs: contiguous planes of sizes that are no multiple of 16 bytes. Planes of
// all samples of a channel are put side by side first.
inline bool shuffle_gemm_packs(const Problem& p) {
  return p.layout == Layout::kContiguous && p.in_positions() % 8 != 0;
}

inline int64_t shuffle_gemm_tiles(const Problem& p, bool packed) {
  return p.layout == Layout::kContiguous && !packed ? p.batch * ceil_div(p.in_positions(), int64_t{64})
                                                    : ceil_div(p.batch * p.in_positions(), int64_t{64});
}

// Outputs of neighbouring columns that are neighbours in memory, channels_last.
inline int64_t shuffle_gemm_run(const Problem& p) {
  return p.groups == 1 ? p.axis[2].kernel * p.out_channels : p.out_channels_per_group();
}

// Everything that follows from columns and resident; false if they do not suit the problem.
inline bool finish_shuffle_gemm_tile(const Problem& p, ShuffleGemmTile& t) {
  const bool contiguous = p.layout == Layout::kContiguous;
  const int64_t columns = p.out_channels_per_group() * p.kernel_positions(), in = p.in_channels_per_group();
  t.by_hand = columns % 8 != 0;
  t.chunks = static_cast<int>(ceil_div(in, int64_t{kShuffleGemmChunk}));
  t.packed = shuffle_gemm_packs(p);
  t.column_blocks = static_cast<int>(ceil_div(columns, int64_t{t.columns}));
  const int64_t parts = t.column_blocks * p.groups;
  if (contiguous && p.axis[2].kernel > 4) {
    if (t.columns != 128) return false;
  } else if (t.columns > 64 && columns <= t.columns / 2) {
    return false;
  }
  if (t.resident ? parts > kShuffleGemmBlocks : t.by_hand) return false;
  const int64_t weights = t.resident ? int64_t{t.chunks} * t.columns * 128 : 0;
  const int64_t terms = t.resident ? t.columns : parts * t.columns;
  if (weights >= kShuffleGemmShared || terms > kShuffleGemmMaxTerms) return false;
  // Resident: a stage is of one warpgroup's inputs, else of both's, and of the weights.
  t.stage_bytes = t.resident ? 8192 : 16384 + t.columns * 128;
  const int fixed = static_cast<int>(weights + terms * 6) + 2 * kShuffleGemmStaging + 1024;
  t.stages = static_cast<int>(std::min<int64_t>((kShuffleGemmShared - fixed) / t.stage_bytes, kShuffleGemmMaxStages));
  if (t.stages < (t.resident ? 4 : 2)) return false;
  t.ring = static_cast<int>(weights);
  t.staging = t.ring + t.stages * t.stage_bytes;
  t.terms = t.staging + 2 * kShuffleGemmStaging;
  t.offsets = static_cast<int>(t.terms + terms * 4);
  t.barriers = static_cast<int>(t.offsets + terms * 2);
  t.shared_bytes = t.barriers + 1024;
  t.tiles = shuffle_gemm_tiles(p, t.packed);
  t.items = ceil_div(t.tiles, int64_t{2}) * parts;
  return true;
}

// Milliseconds on an H200. In clocks of a multiprocessor: a chunk's products of both warpgroups, bound by shared memory
// where columns are few, what one of them needs to store besides, and an item's share of memory and of copies.
inline double shuffle_gemm_tile_cost_ms(const Problem& p, const ShuffleGemmTile& t) {
  const bool contiguous = p.layout == Layout::kContiguous;
  const int64_t columns = p.out_channels_per_group() * p.kernel_positions(), parts = t.column_blocks * p.groups;
  const int64_t run = contiguous ? p.axis[2].in * p.axis[2].kernel : shuffle_gemm_run(p);
  const double blocks = t.resident ? double(kShuffleGemmBlocks / parts * parts) : double(kShuffleGemmBlocks);
  const double rounds = std::ceil(double(t.items) / blocks);
  double products = t.chunks * (std::max(4.44 * t.columns, 600.0) + (contiguous ? 12 : 0));
  double copies = t.chunks * double(t.resident ? 16384 : 16384 + t.columns * 128) / 82;
  const double used =
      double(t.column_blocks == 1 ? std::min<int64_t>(t.columns, round_up(columns, int64_t{64})) : t.columns);
  double store = 1020 + (contiguous ? 13.2 : 11.9) * used;
  if (run % 8 != 0) store *= contiguous ? 1.48 : 1.43;
  double memory = p.bytes() / double(t.items) / 15.6;
  const double first = t.chunks * (343 + (t.columns * 128 + (t.resident ? 0 : 16384)) / 72.0) + products / 2 + store;
  // Weights that come with the inputs keep them flowing; what is resident leaves few stages for long sums.
  if (!t.resident && t.columns == 256) memory *= 0.63;
  if (t.resident && t.stages < 2 * t.chunks) products *= 1.28;
  if (t.resident && t.columns == 64) products *= 1.16, copies *= 1.16;
  const double made = t.resident ? std::max(products, products / 2 + store) : products + 0.72 * store;
  const double item = std::max({made, memory, copies});
  const double packing = t.packed ? 0.0037 + 2.0 * double(p.in_elements() * p.element_size()) / 3e9 : 0;
  const double cost = std::max((first + (rounds - 1) * item) / 1.755e6, p.bytes() / 3.4e9);
  return 0.0057 + cost + packing;
}

inline ShuffleGemmTile find_shuffle_gemm_tile(const Problem& problem) {
  ShuffleGemmTile best{};
  best.cost_ms = 2e9;
  for (const int columns : kShuffleGemmColumns) {
    for (const bool resident : {false, true}) {
      ShuffleGemmTile t{};
      t.columns = columns, t.resident = resident;
      if (!finish_shuffle_gemm_tile(problem, t)) continue;
      t.cost_ms = shuffle_gemm_tile_cost_ms(problem, t);
      if (t.cost_ms < best.cost_ms) best = t;
    }
  }
  return best;
}
inline ShuffleGemmTile shuffle_gemm_tile(const Problem& p) { return last_result<find_shuffle_gemm_tile>(p); }

// "" if the family can make the call, else a reason. Outputs that are not aligned to 16 bytes are made slowly.
inline std::string shuffle_gemm_refusal(const Problem& p) {
  if (p.element_size() != 2) return "not 16 bits";
  for (const Axis& axis : p.axis) {
    if (axis.kernel != axis.stride) return "kernel and stride differ";
    if (axis.padding != 0 || axis.output_padding != 0) return "padding or output padding";
    if (axis.kernel > 1 && axis.dilation != 1) return "dilation";
  }
  const int64_t in = p.in_channels_per_group(), out = p.out_channels_per_group(), width = p.axis[2].kernel;
  if (in < 8) return "fewer than 8 input channels a group";
  if (p.out_elements() == 0 || out < 1) return "no elements";
  constexpr double kLimit = double(1 << 30);
  if (double(p.batch) * double(p.in_positions()) >= kLimit) return "2^30 input positions";
  if (double(p.batch) * double(p.in_channels) >= kLimit) return "2^30 channels of all samples";
  if (double(p.out_channels) * double(p.out_positions()) >= 2 * kLimit) return "samples of 2^31 elements";
  if (double(p.in_channels) * double(out) * double(p.kernel_positions()) >= kLimit) return "a weight of 2^30 elements";
  if (double(p.in_channels) * double(p.in_positions()) >= double(int64_t{1} << 38))
    return "an input of 2^38 elements a sample";
  if (p.layout == Layout::kContiguous) {
    if (width != 2 && width != 4 && width != 8 && width != 16)
      return "contiguous with a kernel other than 2, 4, 8, 16 wide";
  } else {
    if (p.weight_layout != p.layout && p.kernel_positions() != 1 && out != 1)
      return "channels_last with a contiguous weight";
    if (in % 8 != 0) return "channels_last with input channels a group that are no multiple of 8";
    if (shuffle_gemm_run(p) % 2 != 0) return "channels_last with odd runs of outputs";
  }
  if (shuffle_gemm_tile(p).cost_ms >= 1e9) return "too many columns or groups";
  return "";
}

inline double shuffle_gemm_cost_ms(const Problem& p) { return shuffle_gemm_tile(p).cost_ms; }

}  // namespace fastconvt
