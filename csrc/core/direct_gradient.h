// The gradients of a transposed convolution with few channels a group, by multiply-adds: what the kernels can make.
// Plain C++17: no Torch, no CUDA; csrc/cuda/direct_{input,weight}_gradient.* compute what this accepts.
//
// Both read the output's gradient as it lies, each thread for positions of its own: a (output channel, tap) pair lies
// at the sum of two offsets, the position's and the pair's, and neighbouring lanes have neighbouring positions.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "heads_gradient.h"
#include "problem.h"

namespace fastconvt {

inline constexpr int kDirectGradientThreads = 128;  // of a block
inline constexpr int64_t kDirectGradientMaxPairs = 512;
// Products that float32 adds one by one: more would lose accuracy on data that are all alike.
inline constexpr int64_t kDirectGradientChain = 32;

inline int64_t direct_gradient_pairs(const Problem& p) { return p.out_channels_per_group() * p.kernel_positions(); }

// The input's gradient: channels and positions of a thread, such chunks of channels of a group, and units of positions
// of a channel that a block makes at a time.
struct DirectInputGradientTile {
  int64_t channels, positions, chunks, units;
};

inline DirectInputGradientTile direct_input_gradient_tile(const Problem& p) {
  const int64_t in = p.in_channels_per_group();
  const int64_t channels = in <= 4 ? 4 : in <= 8 || (in > 16 && in <= 24) ? 8 : 16, positions = 2;
  return {channels, positions, ceil_div(in, channels), ceil_div(p.in_positions(), kDirectGradientThreads * positions)};
}

// The weight's gradient, on matrix units: 16-channel and 8-pair tiles of a warp, and how many such chunks a group has.
struct DirectWeightGradientTile {
  int64_t rows = 1, columns = 8;
  int64_t channel_chunks = 1, pair_chunks = 1, pairs = 8;
  int64_t chunks = 1;  // of 16 positions of a channel
};

inline DirectWeightGradientTile direct_weight_gradient_tile(const Problem& p) {
  const int64_t in = p.in_channels_per_group(), pairs = direct_gradient_pairs(p);
  DirectWeightGradientTile t{};
  t.rows = in <= 16 ? 1 : in <= 32 || p.element_size() == 4 ? 2 : 4;
  t.columns = t.rows == 1 ? 8 : 4;
  t.channel_chunks = ceil_div(in, 16 * t.rows);
  t.pair_chunks = ceil_div(pairs, 8 * t.columns);
  t.pairs = round_up(ceil_div(pairs, t.pair_chunks), int64_t{8});
  t.chunks = ceil_div(p.in_positions(), int64_t{16});
  return t;
}
inline int64_t direct_weight_gradient_kinds(const Problem& p, const DirectWeightGradientTile& t) {
  return p.groups * t.channel_chunks * t.pair_chunks;
}

inline std::string direct_gradient_refusal(const Problem& p, bool of_weight) {
  constexpr int64_t kMaxAttribute = 4096, kMaxSize = int64_t{1} << 30;
  if (p.dtype == DType::kFloat64) return "float64";
  if (p.layout == Layout::kChannelsLast) return "channels_last";
  double taps = 0, positions = 1, outputs = 1;
  for (const Axis& axis : p.axis) {
    if (std::max({axis.kernel, axis.stride, axis.padding, axis.dilation, axis.output_padding}) > kMaxAttribute) {
      return "a kernel, stride, padding or dilation of more than 4096";
    }
    if (std::min(axis.in, axis.out()) < 1) return "an empty problem";
    taps += double(axis.kernel), positions *= double(axis.in), outputs *= double(axis.out());
  }
  if (std::min({p.batch, p.in_channels, p.out_channels}) < 1) return "an empty problem";
  if (taps > 32) return "more than 32 taps along all axes together";
  if (double(p.out_channels_per_group()) * double(p.kernel_positions()) > double(kDirectGradientMaxPairs)) {
    return "more than 512 pairs of an output channel of a group and a tap";
  }
  if (std::max({p.batch, p.in_channels, p.out_channels}) >= kMaxSize || positions >= double(kMaxSize)) {
    return "a batch, channels or positions of 2^30 or more";
  }
  if (outputs * double(p.out_channels_per_group() * p.element_size()) >= double(int64_t{1} << 31)) {
    return "output channels of a group of 2^31 bytes or more";
  }
  if (double(p.batch) * positions >= double(kMaxSize) * 32) return "2^35 or more positions";
  if (!of_weight) {
    const DirectInputGradientTile t = direct_input_gradient_tile(p);
    return double(p.groups * t.chunks) > 65535 ? "too many groups" : "";
  }
  if (double(p.weight_elements()) >= double(1 << 26)) return "a weight of 2^26 or more elements";
  const DirectWeightGradientTile t = direct_weight_gradient_tile(p);
  if (positions * 64 >= double(kMaxSize)) return "channels of 2^24 positions or more";
  if (double(p.batch) * double(t.chunks) >= double(kMaxSize)) return "2^30 or more tiles";
  if (double(direct_weight_gradient_kinds(p, t) + p.out_channels) > 65535) return "too many groups or channels";
  return "";
}

inline std::string direct_input_gradient_refusal(const Problem& p) { return direct_gradient_refusal(p, false); }
inline std::string direct_weight_gradient_refusal(const Problem& p) { return direct_gradient_refusal(p, true); }

// Milliseconds on an H200, fitted: what a warp issues, or waits for, by what it makes.
inline double direct_input_gradient_cost_ms(const Problem& p) {
  const DirectInputGradientTile t = direct_input_gradient_tile(p);
  const bool halves = p.element_size() == 2;
  const double warps = double(p.batch * t.units * p.groups * t.chunks) * kDirectGradientThreads / 32;
  const double pair =
      double(t.positions) * (halves ? 9.2 + 1.71 * double(t.channels) : 14.4 + 1.33 * double(t.channels));
  const double cycles = (halves ? 243 : 123) + double(direct_gradient_pairs(p)) * pair;
  const double bytes = double((p.in_elements() + p.out_elements()) * p.element_size());
  return 0.011 + std::max(warps * cycles / (4 * 132 * 1.7e6), bytes / 3.2e9);
}
inline double direct_weight_gradient_cost_ms(const Problem& p) {
  const DirectWeightGradientTile t = direct_weight_gradient_tile(p);
  const double cycles = p.element_size() == 4 ? (t.rows == 1 ? 1680 : 1350)
                        : t.rows == 1         ? 780
                        : t.rows == 2         ? 1080
                                              : 1550;
  const double chunks = double(p.batch * t.chunks * direct_weight_gradient_kinds(p, t));
  const double bytes = double((p.in_elements() + p.out_elements()) * p.element_size());
  return 0.010 + std::max(chunks * cycles / (4 * 132 * 1.7e6), bytes / 3e9);
}

}  // namespace fastconvt
