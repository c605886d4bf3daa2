// The filter-bank family: 1D transposed convolutions with long kernels and large strides, such as the inverse
// short-time Fourier transform. What it can make, and the tile of a block. Plain C++17: no Torch, no CUDA.
//
// One matrix product: rows are pairs of an output channel and a phase, as they stand in the weight; columns are bases
// (problem.h); the inner dimension is (input channel, tap of the phase). A tap moves all columns alike. The columns of
// all items of the batch stand in one row, with as many idle ones between them as a tap may reach back.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "problem.h"

namespace fastconvt {

inline constexpr int kFilterBankChunks = 8;  // of 32 bytes of input channels, in a stage
inline constexpr int64_t kFilterBankShared = 227 * 1024;
inline constexpr int64_t kFilterBankSums = 40 * 1024;  // bytes of sums that groups and blocks add
inline constexpr int64_t kFilterBankBarriers = 128;    // bytes

inline bool filter_bank_is_strict(const Problem& p) { return p.dtype == DType::kFloat32 && !p.allow_tf32; }

struct FilterBankTile {
  int64_t rows, columns;  // of a block
  int64_t row_tiles, column_tiles;
  int64_t span;   // columns from one item of the batch to the next
  int64_t taps;   // of a phase, at most
  bool pairs;     // inputs are read two at a time
  int64_t lead;   // places before the first one, so that no pair is torn
  int64_t held;   // places: inputs that the columns of a block reach
  int64_t pitch;  // bytes from 16 bytes of channels of all of them to the next
  int64_t stage_bytes, slots, shared_bytes;
  int64_t chunks;  // of 32 bytes of channels
  int64_t stages;
  int64_t splits;  // blocks that share a tile's stages; a power of two
  int64_t loops;   // row tiles that a block makes from inputs that stay
  int64_t row_blocks() const { return ceil_div(row_tiles, loops); }
  int64_t blocks(const Problem& problem) const { return row_blocks() * column_tiles * problem.groups * splits; }
};

// Milliseconds on an H200, fitted.
inline double filter_bank_time(const Problem& problem, const FilterBankTile& t) {
  const bool strict = filter_bank_is_strict(problem), wide = problem.element_size() == 4;
  // Products and copies of a chunk.
  const double products = (strict ? 2.14e-4 : wide ? 0.95e-4 : 1.05e-4) * double(t.taps);
  const double copies = strict ? 5e-4 : 3.2e-4;
  const double rounds = double(ceil_div(t.blocks(problem), t.splits > 1 ? int64_t{128} : int64_t{132}));
  const int64_t stages = ceil_div(t.stages, t.splits);
  const double chunks = double(t.splits > 1 ? std::min(t.chunks, stages * kFilterBankChunks) : t.chunks);
  // channels_last: outputs of several channels are apart.
  const double layout = problem.layout != Layout::kChannelsLast ? 1
                        : problem.out_channels == 1             ? 1.08
                        : wide                                  ? 1.2
                                                                : 1.4;
  const double block = (strict ? 0.0062 : 0.0088) + chunks * std::max(products, copies) +
                       double(t.loops - 1) * (0.004 + chunks * products);
  return (strict ? 0.0025 : 0.0055) + (t.splits > 1 ? 0.002 : 0) + layout * rounds * block;
}

// How many blocks share a tile, or how many tiles a block makes.
inline void filter_bank_share(const Problem& problem, FilterBankTile& t, int64_t shared_rest) {
  t.splits = 1, t.loops = 1;
  double least = filter_bank_time(problem, t);
  const auto consider = [&](int64_t splits, int64_t loops) {
    FilterBankTile other = t;
    other.splits = splits, other.loops = loops;
    const double time = filter_bank_time(problem, other);
    if (time < least) least = time, t.splits = splits, t.loops = loops;
  };
  for (int64_t splits = 2; splits <= std::min<int64_t>(t.stages, 8); splits *= 2) consider(splits, 1);
  const int64_t resident = shared_rest + std::max<int64_t>(t.stages, 2) * t.stage_bytes + kFilterBankSums;
  if (resident <= kFilterBankShared) {
    for (int64_t loops = 2; loops <= std::min<int64_t>(t.row_tiles, 16); ++loops) consider(1, loops);
  }
  if (t.loops > 1) t.slots = std::max<int64_t>(t.stages, 2);
  t.shared_bytes = shared_rest + t.slots * t.stage_bytes + (t.loops > 1 ? kFilterBankSums : 0);
}

inline FilterBankTile filter_bank_tile(const Problem& problem) {
  const Axis& axis = problem.axis[2];
  const bool strict = filter_bank_is_strict(problem);
  FilterBankTile t{};
  t.rows = strict ? 128 : 64, t.columns = strict ? 80 : 160;
  const int64_t bases = axis.base(axis.out() - 1) - axis.base(0) + 1;
  t.row_tiles = ceil_div(problem.out_channels_per_group() * axis.stride, t.rows);
  t.taps = ceil_div(axis.kernel, axis.stride);
  t.pairs = problem.layout == Layout::kContiguous && axis.in % 2 == 0;
  t.lead = t.pairs ? (axis.base(0) - (t.taps - 1)) & 1 : 0;
  t.span = bases + t.taps - 1 + t.lead;
  t.held = t.columns + t.taps - 1 + t.lead;
  if (t.pairs) t.span = round_up(t.span, int64_t{2}), t.held = round_up(t.held, int64_t{2});
  t.column_tiles = ceil_div((problem.batch - 1) * t.span + bases, t.columns);
  t.pitch = (round_up(t.held - 1, int64_t{8}) + 1) * 16;  // an odd number of 16 bytes keeps banks apart
  t.stage_bytes = kFilterBankChunks * 2 * t.pitch * (strict ? 2 : 1);
  t.chunks = ceil_div(problem.in_channels_per_group() * problem.element_size(), int64_t{32});
  t.stages = ceil_div(t.chunks, int64_t{kFilterBankChunks});
  const int64_t rest = kFilterBankBarriers + round_up(t.held * 4, int64_t{128});  // with positions of all places
  t.slots = std::min((kFilterBankShared - rest) / t.stage_bytes, std::max<int64_t>(t.stages, 2));
  t.slots = std::min<int64_t>(t.slots, 6);
  filter_bank_share(problem, t, rest);
  return t;
}

// Milliseconds on an H200, of what is not refused.
inline double filter_bank_cost_ms(const Problem& problem) {
  if (problem.out_elements() == 0) return 0;
  return filter_bank_time(problem, filter_bank_tile(problem));
}

// "" if the family can make the call, else a reason; the tile of what it can make.
inline std::string filter_bank_refusal(const Problem& problem, FilterBankTile& t) {
  if (problem.dtype == DType::kFloat64) return "float64";
  if (!problem.axis[0].is_trivial() || !problem.axis[1].is_trivial()) return "two or three dimensions";
  const Axis& axis = problem.axis[2];
  if (axis.dilation != 1 && axis.kernel != 1) return "a dilation";
  if (axis.in >= int64_t{1} << 24 || axis.padding >= int64_t{1} << 28 || axis.stride > 65536 || axis.kernel > 65536) {
    return "a long axis, or a large kernel, stride or padding";
  }
  if (problem.batch >= int64_t{1} << 24 || problem.in_channels >= 65536 || problem.out_channels >= 65536) {
    return "a large batch or many channels";
  }
  if (problem.in_channels_per_group() * problem.element_size() < 64) return "few input channels a group";
  if (problem.out_channels_per_group() * axis.stride < 32) return "few output channels and a small stride";
  if (problem.out_elements() == 0) return "";
  if (problem.in_positions() == 0) return "an empty input";
  if (problem.out_channels_per_group() * axis.kernel >= int64_t{1} << 26) return "a large kernel";
  t = filter_bank_tile(problem);
  // A group of makers frees a stage only when it has the next one.
  if (t.slots < std::min<int64_t>(std::max<int64_t>(t.stages, 2), filter_bank_is_strict(problem) ? 2 : 3)) {
    return "many taps a phase";
  }
  if (double(t.span) * double(problem.batch) >= 2e9 || double(t.blocks(problem)) >= 2e9) {
    return "too many tiles";
  }
  return "";
}

inline std::string filter_bank_refusal(const Problem& problem) {
  FilterBankTile tile{};
  return filter_bank_refusal(problem, tile);
}

}  // namespace fastconvt
