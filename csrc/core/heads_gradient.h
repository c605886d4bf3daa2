// The gradients of a transposed convolution with few (output channel, tap) pairs a group, on matrix units: tiles,
// refusals and costs. Plain C++17: no Torch, no CUDA; csrc/cuda/heads_{input,weight}_gradient.* compute what this
// plans.
//
// Both gradients are products with one matrix that is never in memory: P[pair][position], the output's gradient that
// the input at `position` meets in a tap. A block stages the output's gradient around a box of positions; an element of
// P lies there at a sum of two offsets, one of its position and one of its pair. The input's gradient is the weights,
// (channel, pair), times P; the weight's is the inputs, (channel, position), times P transposed.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "problem.h"

namespace fastconvt {

inline constexpr int kHeadsGradientWarps = 4;         // of a block
inline constexpr int64_t kHeadsGradientMaxBox = 512;  // positions
inline constexpr int64_t kHeadsGradientMaxRows = 1024;
inline constexpr int64_t kHeadsGradientShared = 227 * 1024;
inline constexpr int64_t kHeadsGradientMaxStages = 4;
inline constexpr int64_t kHeadsGradientRingBytes = 5 * 64;  // what the boxes of a block's stages are
inline constexpr int64_t kHeadsGradientUnit = 64;           // input channels that a warp multiplies at a time
inline constexpr int64_t kHeadsGradientMaxChannels = 128;
// The weight's sums of a warp, in tiles of 16 channels by 8 pairs: for up to 16 channels, and for more.
inline constexpr int64_t kHeadsNarrowColumns = 10, kHeadsWideColumns = 8;
inline constexpr int64_t kHeadsGradientMaxPairs = 512;

struct HeadsGradientTile {
  int64_t box[3] = {1, 1, 1};
  int64_t tiles[3] = {1, 1, 1};               // boxes along each axis
  int64_t grads[3] = {1, 1, 1};               // extents of the output's gradient that is staged
  int64_t positions = 32;                     // of a box, rounded up
  int64_t channels = 16, channel_chunks = 1;  // of the input, in a block
  int64_t pairs = 1, pair_chunks = 1;         // in a block
  int64_t column = 1;  // staged elements of a place of the width; channels_last: the group's output channels
  int64_t rows = 1;    // staged; contiguous: for each output channel
  int64_t row_pitch = 0, grad_bytes = 0;
  int64_t input_pitch = 0, input_bytes = 0;  // the weight's gradient stages inputs, too
  int64_t bias_items = 0;                    // sums of 32 lanes that add up to the bias's gradient
  int64_t fragments = 0;                     // bytes of the weights
  int64_t fixed_bytes = 0;                   // all but the stages
  int64_t stages = 0;                        // 0: there is no tile
  int64_t shared_bytes = 0;
  int64_t blocks = 1;      // of a multiprocessor
  double cycles = 0;       // of a multiprocessor for a box, about
  double slow_copies = 1;  // where runs begin anywhere
};

inline bool heads_gradient_split(const Problem& p) { return p.dtype == DType::kFloat32 && !p.allow_tf32; }

// Blocks of a multiprocessor: what registers allow.
inline int64_t heads_gradient_blocks(const Problem& p, bool of_weight) {
  return (of_weight ? p.element_size() == 4 : heads_gradient_split(p)) ? 3 : 4;
}

inline int64_t heads_gradient_boxes(const Problem& p, const HeadsGradientTile& t) {
  return p.batch * t.tiles[0] * t.tiles[1] * t.tiles[2];
}

// (group, channel chunk, pair chunk): a block keeps one.
inline int64_t heads_gradient_kinds(const Problem& p, const HeadsGradientTile& t) {
  return p.groups * t.channel_chunks * t.pair_chunks;
}

// Whether each output is one position's in exactly one of the taps from the padding on, as many as the stride, of each
// axis: the bias's gradient is a sum of products' right operands then. Those are long sums in float32, which strict
// float32 does not allow.
inline bool heads_bias_by_pairs(const Problem& p) {
  if (heads_gradient_split(p)) return false;
  for (const Axis& a : p.axis) {
    if (a.dilation != 1 && a.kernel != 1) return false;
    if (a.kernel < a.padding + a.stride || a.kernel + a.output_padding > a.stride + 2 * a.padding) return false;
  }
  return true;
}

// Whether the bias's gradient is that of a channel of ones in the tile of the weight's: one that the group leaves free.
inline bool heads_bias_by_ones(const Problem& p, const HeadsGradientTile& t) {
  return heads_bias_by_pairs(p) && p.in_channels_per_group() < t.channels;
}

// Words from `least` on that are 12 or 20 modulo 32, so that a few rows lie in banks of their own.
inline int64_t heads_gradient_pitch(int64_t least) {
  for (int64_t words = round_up(least, int64_t{4});; words += 4) {
    if (words % 32 == 12 || words % 32 == 20) return words;
  }
}

// Everything that follows from the box; `budget` is the shared memory of a block.
inline void heads_gradient_finish(const Problem& p, bool of_weight, int64_t budget, HeadsGradientTile& t) {
  const int64_t size = p.element_size(), unit = 16 / size;
  const bool channels_last = p.layout == Layout::kChannelsLast, split = heads_gradient_split(p);
  for (int a = 0; a < 3; ++a) {
    const Axis& axis = p.axis[a];
    t.tiles[a] = ceil_div(axis.in, t.box[a]);
    t.grads[a] = (t.box[a] - 1) * axis.stride + (axis.kernel - 1) * axis.dilation + 1;
    // With the weight's gradient goes the bias's: each output belongs to one box.
    if (!of_weight) continue;
    t.grads[a] += std::max<int64_t>(0, axis.output_padding - axis.padding);
    t.grads[a] = std::max(t.grads[a], t.box[a] * axis.stride);
  }
  t.positions = round_up(t.box[0] * t.box[1] * t.box[2], int64_t{32});
  t.rows = t.grads[0] * t.grads[1] * (channels_last ? 1 : p.out_channels_per_group());
  const int64_t words = ceil_div((t.grads[2] * t.column + 2 * unit) * size, int64_t{4});
  t.row_pitch = heads_gradient_pitch(words) * 4 / size;
  t.grad_bytes = t.rows * t.row_pitch * size;
  if (of_weight) {
    t.input_pitch = channels_last ? t.channels + 8 : t.positions + unit;
    t.input_bytes = (channels_last ? t.positions : t.channels) * t.input_pitch * size;
  }
  t.fixed_bytes = t.fragments + t.positions * 12 + t.rows * 16 + round_up(t.pairs, int64_t{16}) * 4 +
                  t.bias_items * 256 + t.box[0] * t.box[1] * 16 + kHeadsGradientRingBytes;
  const int64_t stage = t.grad_bytes + t.input_bytes;
  t.stages = std::min((budget - t.fixed_bytes) / stage, kHeadsGradientMaxStages);
  if (t.stages < 2 || t.rows > kHeadsGradientMaxRows) t.stages = 0;
  const int64_t tiles = t.channels > 16 ? 2 * kHeadsWideColumns : kHeadsNarrowColumns;
  t.shared_bytes = t.fixed_bytes + std::max(t.stages * stage, of_weight ? tiles * 512 * kHeadsGradientWarps : 0);
  if (t.shared_bytes > budget) t.stages = 0;
  // What a warp issues for a box: the product, and its share of the copies.
  const double copies = double(t.grad_bytes / 16) / (32 * kHeadsGradientWarps);
  const double inputs = double(t.input_bytes / 16) / (32 * kHeadsGradientWarps);
  double product;
  if (of_weight) {
    const int64_t columns = ceil_div(t.pairs, int64_t{8}), rows = std::min<int64_t>(2, t.channels / 16);
    const int64_t row_warps = ceil_div(t.channels, 16 * rows);
    const double step = double(columns) * (split ? 18 + 10.0 * rows : 10 + 3.0 * rows) + 26.0 * rows;
    product = step * double(ceil_div(t.positions / 16, kHeadsGradientWarps / row_warps));
  } else {
    const double chunks = double(ceil_div(t.pairs, int64_t{16})), rows = double(t.channels / 16);
    const double groups = double(ceil_div(t.channels, kHeadsGradientUnit));
    product = (chunks * (split ? 70 : 44) + (chunks * (split ? 46 : 12) + 26) * rows / groups + 60) *
              double(ceil_div(t.positions / 32 * int64_t(groups), int64_t{kHeadsGradientWarps}));
  }
  const double issued = (of_weight ? 400 : 200) + product + 14 * copies + 8 * inputs;
  // Memory takes short runs badly.
  const int64_t run = t.box[2] < p.axis[2].in ? t.box[2] : t.box[1] * t.box[2];
  const bool side_by_side = channels_last && p.groups == 1 && t.channel_chunks == 1;
  const double run_bytes = double(channels_last ? (side_by_side ? run : 1) * t.channels : run) * double(size);
  const double bytes = double(t.positions * std::min(t.channels, p.in_channels_per_group()) * size);
  // Where runs begin decides how many bytes move at a time, most of all to memory.
  const int64_t rows = t.tiles[1] == 1 && t.box[0] == 1 ? p.axis[1].in : t.box[1];
  const int64_t begins = t.tiles[2] > 1 ? t.box[2] | p.axis[2].in : rows * p.axis[2].in | p.in_positions();
  const int64_t step = size * (channels_last ? p.in_channels : begins);
  const int narrow = step % 16 == 0 ? 0 : step % 8 == 0 ? 1 : step % 4 == 0 ? 2 : 3;
  t.slow_copies = size == 2 && narrow >= 2 ? 1.4 : 1;
  const double slower = of_weight ? 1 + 0.15 * narrow : 1 + 1.3 * narrow;
  t.cycles = std::max(issued / 0.6, bytes / 19 * (slower + 4096 / (run_bytes * run_bytes)) + double(t.grad_bytes) / 38);
  if (!of_weight && t.stages < 4) t.cycles *= t.stages == 2 ? 1.18 : 1.05;
  // Rows of the output's gradient of an odd length are copied by single elements of 16 bits, each after a load.
  const bool apart = channels_last && p.groups > 1;
  const int64_t row = apart ? t.column : p.axis[2].out() * (channels_last ? p.out_channels : 1);
  const int64_t moved = t.tiles[2] > 1 && !apart ? t.box[2] * p.axis[2].stride * t.column : 0;
  if (size == 2 && (row | moved) % 2 != 0) {
    t.cycles += double(t.grad_bytes / 2) / (32 * kHeadsGradientWarps) * (t.grads[0] * t.grads[1] > 1 ? 80 : 15);
  }
}

// The box with the least work in the fullest rounds of blocks.
inline void heads_gradient_choose_box(const Problem& p, bool of_weight, int64_t blocks, HeadsGradientTile& tile) {
  const int64_t budget = kHeadsGradientShared / blocks - 1024, width = p.axis[2].in;
  tile.blocks = blocks;
  HeadsGradientTile best{};
  double least = 0;
  const auto even = [width](int64_t most) { return round_up(ceil_div(width, ceil_div(width, most)), int64_t{8}); };
  int64_t before = 0;
  for (const int64_t columns : {width, int64_t{128}, even(128), int64_t{64}, even(64), int64_t{32}}) {
    HeadsGradientTile t = tile;
    t.box[2] = columns;
    if (columns > std::min<int64_t>(width, 256) || columns == before) continue;
    before = columns;
    for (const int64_t height : {1, 2, 3, 4, 5, 6, 8, 10, 12, 16}) {
      if (height > p.axis[1].in || height * t.box[2] > kHeadsGradientMaxBox) break;
      for (const int64_t depth : {1, 2, 4}) {
        if (depth > p.axis[0].in || depth * height * t.box[2] > kHeadsGradientMaxBox) break;
        t.box[0] = depth, t.box[1] = height;
        heads_gradient_finish(p, of_weight, budget, t);
        if (t.stages == 0) break;
        const double rounds = double(heads_gradient_boxes(p, t) * heads_gradient_kinds(p, t)) / double(132 * blocks);
        const double cost = (rounds > 4 ? rounds + 0.5 : double(int64_t(rounds + 0.999))) * t.cycles;
        if (best.stages == 0 || cost < least) best = t, least = cost;
      }
    }
  }
  tile = best;
}

inline HeadsGradientTile heads_gradient_tile(const Problem& p, bool of_weight, int64_t most_channels) {
  HeadsGradientTile t{};
  const int64_t in = p.in_channels_per_group(), pairs = p.out_channels_per_group() * p.kernel_positions();
  t.column = p.layout == Layout::kChannelsLast ? p.out_channels_per_group() : 1;
  t.channel_chunks = ceil_div(in, kHeadsGradientMaxChannels);
  t.channels = round_up(ceil_div(in, t.channel_chunks), int64_t{16});
  t.pairs = pairs;
  if (of_weight) {
    // Two tiles of 16 channels a warp, by one, two or four warps.
    if (t.channels > 16) t.channels = in > 64 && most_channels > 64 ? 128 : in > 32 ? 64 : 32;
    t.channel_chunks = ceil_div(in, t.channels);
    const int64_t most = 8 * (t.channels > 16 ? kHeadsWideColumns : kHeadsNarrowColumns);
    t.pair_chunks = ceil_div(pairs, most);
    t.pairs = round_up(ceil_div(pairs, t.pair_chunks), int64_t{8});
    const int64_t out = p.out_channels_per_group();
    const int64_t items = p.layout == Layout::kChannelsLast ? ceil_div(out, int64_t{32}) : out;
    if (!heads_bias_by_pairs(p)) t.bias_items = items * ceil_div(int64_t{kHeadsGradientWarps}, items);
  } else {
    const int64_t bytes = heads_gradient_split(p) ? 128 : p.element_size() == 4 ? 64 : 32;  // of a channel and 16 pairs
    // A lane of 16 bits and channels_last has channels of two tiles of 16.
    if (p.element_size() == 2 && p.layout == Layout::kChannelsLast) t.channels = round_up(t.channels, int64_t{32});
    t.fragments = t.channels * ceil_div(pairs, int64_t{16}) * bytes;
  }
  HeadsGradientTile found = t;
  for (int64_t blocks = heads_gradient_blocks(p, of_weight); blocks >= 1; --blocks) {
    found = t;
    heads_gradient_choose_box(p, of_weight, blocks, found);
    if (found.stages > 0) break;
  }
  return found;
}

inline HeadsGradientTile heads_gradient_tile(const Problem& p, bool of_weight) {
  const HeadsGradientTile t = heads_gradient_tile(p, of_weight, kHeadsGradientMaxChannels);
  if (!of_weight || t.channels <= 64) return t;
  const HeadsGradientTile half = heads_gradient_tile(p, of_weight, 64);
  const auto cost = [&](const HeadsGradientTile& x) {
    return x.cycles * double(heads_gradient_boxes(p, x) * x.channel_chunks);
  };
  return t.stages == 0 || (half.stages > 0 && cost(half) < 1.25 * cost(t)) ? half : t;
}

// Whether each block of the input's gradient, with the weight's `shared_bytes` if these are more, leaves room for one
// of the weight's when it ends: blocks that begin early would scatter otherwise, and not all fit at once.
inline bool heads_gradients_overlap(const HeadsGradientTile& input, const HeadsGradientTile& weight) {
  const int64_t bytes = std::max(input.shared_bytes, weight.shared_bytes) + 1024;
  return std::min(input.stages, weight.stages) > 0 && weight.blocks <= input.blocks &&
         input.blocks * bytes <= kHeadsGradientShared;
}

inline std::string heads_gradient_refusal(const Problem& p, bool of_weight, HeadsGradientTile& t) {
  constexpr int64_t kMaxAttribute = 4096, kMaxSize = int64_t{1} << 30;
  if (p.dtype == DType::kFloat64) return "float64";
  for (const Axis& axis : p.axis) {
    if (std::max({axis.kernel, axis.stride, axis.padding, axis.dilation, axis.output_padding}) > kMaxAttribute) {
      return "a kernel, stride, padding or dilation of more than 4096";
    }
    if (std::max(axis.in, axis.out()) >= kMaxSize) return "an axis of 2^30 or more";
    if (std::min(axis.in, axis.out()) < 1) return "an empty problem";
  }
  if (std::min({p.batch, p.in_channels, p.out_channels}) < 1) return "an empty problem";
  if (std::max({p.batch, p.in_channels, p.out_channels}) >= kMaxSize) return "a batch or channels of 2^30 or more";
  if (double(p.out_channels_per_group()) * double(p.kernel_positions()) > double(kHeadsGradientMaxPairs)) {
    return "more than 512 pairs of an output channel of a group and a tap";
  }
  constexpr double kMaxPlane = double(kMaxSize);
  const bool channels_last = p.layout == Layout::kChannelsLast;
  const auto volume = [](double depth, double height, double width) { return depth * height * width; };
  if (volume(p.axis[0].in, p.axis[1].in, p.axis[2].in) >= kMaxPlane ||
      double(p.axis[2].out()) * double(channels_last ? p.out_channels : 1) >= kMaxPlane) {
    return "2^30 or more positions";
  }
  if (of_weight && double(p.weight_elements()) >= double(1 << 26)) return "a weight of 2^26 or more elements";
  t = heads_gradient_tile(p, of_weight);
  if (t.stages == 0) return "a kernel that does not fit shared memory";
  if (double(p.batch) * double(t.tiles[0]) * double(t.tiles[1]) * double(t.tiles[2]) >= double(kMaxSize)) {
    return "2^30 or more tiles";
  }
  if (double(p.groups) * double(t.channel_chunks * t.pair_chunks) > 65535) return "too many groups";
  return "";
}

inline std::string heads_input_gradient_refusal(const Problem& p) {
  HeadsGradientTile tile{};
  return heads_gradient_refusal(p, false, tile);
}
inline std::string heads_weight_gradient_refusal(const Problem& p) {
  HeadsGradientTile tile{};
  return heads_gradient_refusal(p, true, tile);
}

// Milliseconds on an H200: whole rounds of blocks, launches and what a block prepares.
inline double heads_gradient_ms(const Problem& p, const HeadsGradientTile& t) {
  const double resident = double(132 * t.blocks);
  const double rounds = double(heads_gradient_boxes(p, t) * heads_gradient_kinds(p, t)) / resident;
  const double whole = rounds > 4 ? rounds + 0.5 : double(int64_t(rounds + 0.999));
  return whole * double(t.blocks) * t.cycles / 1.7e6 * t.slow_copies;
}

// Groups that are interleaved in memory take longer.
inline double heads_gradient_penalty(const Problem& p) {
  if (p.out_channels_per_group() >= 32) return 3;  // what the family is not made for
  return p.layout == Layout::kChannelsLast && p.groups > 1 ? 1.8 : 1;
}

inline double heads_input_gradient_cost_ms(const Problem& p) {
  if (p.in_elements() == 0) return 0;
  const double ms = heads_gradient_ms(p, heads_gradient_tile(p, false));
  const bool many = p.out_channels_per_group() * p.kernel_positions() >= 200;  // pairs
  return 0.008 + (heads_gradient_split(p) ? (many ? 2.2 : 1.5) : 1.2) * heads_gradient_penalty(p) * ms;
}
inline double heads_weight_gradient_cost_ms(const Problem& p) {
  if (p.in_elements() == 0) return 0;
  const HeadsGradientTile t = heads_gradient_tile(p, true);
  const bool narrow = t.channels == 16 && (p.element_size() == 4 || t.pairs <= 40);
  const double slower = heads_gradient_split(p) ? (narrow ? 1.18 : 1.4)
                        : p.element_size() == 4 ? 1.3
                        : narrow                ? 0.85
                                                : 1.05;
  return 0.014 + slower * heads_gradient_penalty(p) * heads_gradient_ms(p, t);
}

}  // namespace fastconvt
