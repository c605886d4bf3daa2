// The gradients of layers of stride 2 and kernel 2 or 4 along the last axis as matrix products of contiguous tensors as
// they lie, in 16 bits: refusals, tiles and costs. Plain C++17: no Torch, no CUDA; csrc/cuda/pairs_* compute what this
// plans.
//
// Two neighbouring taps of an input position meet two neighbouring outputs, a pair, which one register of an operand
// holds in the weight's own order of taps. Rows of taps r = (channel, depth, height) stand for one row of outputs each.
#pragma once

#include <algorithm>
#include <numeric>
#include <string>

#include "gemm_weight_gradient.h"
#include "gradient_gemm.h"
#include "problem.h"

namespace fastconvt {

constexpr int kPairsPositions = 256;              // of an item of the input's gradient
constexpr int kPairsWeightPositions = 64;         // of a stage of the weight's
constexpr int kPairsRowBlock = 256;               // elements of a weight's row, of a block of the weight's gradient
constexpr int64_t kPairsLongestPart = 128 << 10;  // positions of a partial sum at most, about: matrix units truncate
constexpr int64_t kPairsShared = 226 << 10;       // bytes of a block
constexpr int kPairsHead = 2048;                  // of them, barriers, and what aligns the base
constexpr int kPairsMaxStages = 8;

struct PairsGradientTile {
  int unit = 0;               // neighbouring positions of a row whose outputs are copied at once: 64, 32 or 16
  int input_unit = 0;         // the same of inputs
  int margin = 0, pitch = 0;  // outputs that are copied before a unit's own, and in all, of a row
  int lead = 0;               // rows of the input are read from up to so many positions before their beginning
  int columns = 0;            // input channels of a block
  int64_t inner = 0;          // elements of a row of the weight, of an input channel
  int64_t column_blocks = 0;
  int64_t row_units = 0, items = 0;         // of the input's gradient
  int64_t input_blocks = 0;                 // that make them, if nothing else is made
  int64_t weight_row_units = 0, steps = 0;  // of the weight's: stages of all positions
  int64_t row_blocks = 0, kinds = 0, splits = 0;
  int64_t both_blocks = 0, both_splits = 0;         // the same if both are made
  int64_t beside_splits = 0, beside_lent = 0;       // and if parts may lie in the memory of the input's gradient
  int64_t lent = 0;                                 // of the splits: those that do
  double input_us = 0, weight_us = 0, both_us = 0;  // without what launches cost

  // As it is if both are made.
  PairsGradientTile both() const {
    PairsGradientTile t = *this;
    t.input_blocks = both_blocks, t.splits = both_splits;
    return t;
  }
  // As it is if the weight's is made before another family makes the input's.
  PairsGradientTile beside() const {
    PairsGradientTile t = *this;
    t.splits = beside_splits, t.lent = beside_lent;
    return t;
  }
};

inline int64_t pairs_row_taps(const Problem& p) { return p.axis[0].kernel * p.axis[1].kernel; }

// Whether rows of the input are read as rows of whole images, whose vectors of 16 bytes do not begin where rows do.
inline bool pairs_reads_images(const Problem& p) { return p.axis[2].in * p.element_size() % 16 != 0; }

// What tensors and taps must be like, whatever the element type.
inline std::string pairs_geometry_refusal(const Problem& p) {
  if (p.layout != Layout::kContiguous || p.weight_layout != Layout::kContiguous) return "channels_last";
  if (p.groups != 1) return "groups";
  const Axis& last = p.axis[2];
  if (last.stride != 2 || last.dilation != 1 || (last.kernel != 2 && last.kernel != 4)) {
    return "other than kernel 2 or 4 and stride 2 along the last axis";
  }
  if (last.padding != last.kernel / 2 - 1 || last.output_padding != 0) {
    return "a padding of the last axis, with which its output is not twice as long";
  }
  const int64_t rows = pairs_row_taps(p), room = 64 / last.kernel;
  if (rows > room || room % rows != 0) {
    return "other than 1, 2, 4, 8, 16 or 32 elements of the kernel along the other axes";
  }
  for (const Axis& a : p.axis) {
    if (a.kernel > 1 && a.dilation != 1) return "a dilation";
    if (a.stride > 1 << 10 || a.padding > 1 << 10) return "a stride or padding of more than 1024";
  }
  const int64_t vector = 16 / p.element_size();
  if (last.out() % vector != 0) return "rows of the output of no whole vectors of 16 bytes";
  if (pairs_reads_images(p) && (last.kernel != 2 || p.in_positions() % vector != 0)) {
    return "rows of the input of no whole vectors of 16 bytes";
  }
  if (p.out_channels * rows * last.kernel % vector != 0) return "odd channels";
  return "";
}

inline std::string pairs_gradient_refusal(const Problem& p) {
  if (p.element_size() != 2) return "float32 and float64";
  const std::string refusal = pairs_geometry_refusal(p);
  if (!refusal.empty()) return refusal;
  // Tensors that are not aligned are left to these.
  const std::string gemm = gradient_gemm_refusal(p);
  return gemm.empty() ? gemm_weight_gradient_refusal(p) : gemm;
}

constexpr int64_t kPairsProcessors = 132;

// Microseconds on an H200, by kernel, 2 or 4, and by columns, 64 or 128, for wide units and for those of 16 positions:
// of a stage of the input's gradient, and of one of the weight's.
constexpr double kPairsInputUs[2][2][2] = {{{0.5, 0.75}, {0.76, 1.0}}, {{0.55, 1.8}, {0.83, 2.4}}};
constexpr double kPairsWeightUs[2][2][2] = {{{0.5, 0.7}, {0.8, 1.0}}, {{0.65, 1.8}, {0.97, 2.6}}};

inline double pairs_item_us(const Problem& p, const PairsGradientTile& t) {
  const bool wide = t.columns == 128;
  const double stage = kPairsInputUs[p.axis[2].kernel == 4][wide][t.unit == 16];
  return double(ceil_div(t.inner, int64_t{64})) * stage + (wide ? 1.1 : 0.8);
}
inline double pairs_stage_us(const Problem& p, const PairsGradientTile& t) {
  return kPairsWeightUs[p.axis[2].kernel == 4][t.columns == 128][t.unit == 16];
}
// Of the second pass.
inline double pairs_reduction_us(const Problem& p, int64_t splits) {
  return splits == 1 ? 0 : 3 + double(splits * p.weight_elements()) * 8 / 5e6;
}

inline int64_t pairs_fewest_parts(const PairsGradientTile& t) {
  return ceil_div(t.steps * kPairsWeightPositions, kPairsLongestPart);
}

// The weight's gradient alone: parts take no more memory than copies of all tensors, which cuDNN makes, beside what
// lies in the memory of the input's gradient, if that is made afterwards.
inline void pairs_limit_parts(const Problem& p, PairsGradientTile& t) {
  const int64_t elements = p.in_elements() + p.out_elements() + p.weight_elements(), part = 4 * p.weight_elements();
  const int64_t most = elements * p.element_size() / (part + 4 * t.inner);
  const int64_t lent = p.in_elements() * p.element_size() / part;
  const int64_t fewest = std::max<int64_t>(1, pairs_fewest_parts(t));
  t.beside_splits = std::min(t.splits, std::max(fewest, most + lent));
  t.beside_lent = t.beside_splits > 1 ? std::min(t.beside_splits, lent) : 0;
  t.splits = std::min(t.splits, std::max(fewest, most));
}

// How gradients share the multiprocessors: one after the other or, better mostly, side by side, so that the output's
// gradient comes from memory about once.
inline void pairs_share(const Problem& p, PairsGradientTile& t) {
  const double item = pairs_item_us(p, t), stage = pairs_stage_us(p, t);
  const int64_t fewest = pairs_fewest_parts(t);
  t.input_blocks = std::min(t.items, kPairsProcessors);
  t.splits = std::min(t.steps, std::max({fewest, int64_t{1}, kPairsProcessors / t.kinds}));
  t.input_us = double(ceil_div(t.items, t.input_blocks)) * item;
  t.weight_us = double(ceil_div(t.steps, t.splits) * ceil_div(t.kinds * t.splits, kPairsProcessors)) * stage +
                pairs_reduction_us(p, t.splits);
  t.both_blocks = t.input_blocks, t.both_splits = t.splits;
  t.both_us = 1.02 * (t.input_us + t.weight_us + 4);
  // Side by side, the input's gradient waits for memory a little more. The balance counts: both then walk through the
  // output's gradient together, and the second to read it finds it in the L2 cache.
  const double waiting = t.columns == 64 ? 1 : p.axis[2].kernel == 2 ? 1.1 : 1.05;
  const double input = waiting * double(t.items) * item, weight = double(t.steps) * double(t.kinds) * stage;
  const double even = double(kPairsProcessors) * weight / (input + weight) / double(t.kinds);
  for (int64_t splits = std::max({fewest, int64_t{1}, int64_t(0.6 * even)});
       splits <= std::min(t.steps, int64_t(1.4 * even) + 2) && splits * t.kinds <= kPairsProcessors * 5 / 6; ++splits) {
    const int64_t blocks = std::min(t.items, kPairsProcessors - splits * t.kinds);
    const double us =
        std::max(waiting * item * double(ceil_div(t.items, blocks)), stage * double(ceil_div(t.steps, splits))) +
        pairs_reduction_us(p, splits);
    if (us < t.both_us) t.both_us = us, t.both_blocks = blocks, t.both_splits = splits;
  }
}

inline PairsGradientTile pairs_gradient_tile_of(const Problem& p, int unit, int columns) {
  PairsGradientTile t;
  const int64_t rows = p.batch * p.axis[0].in * p.axis[1].in, width = p.axis[2].in;
  t.unit = unit, t.columns = columns;
  // Two words a position reach one output further. Copies begin at whole vectors, and are faster from multiples of 32
  // bytes on; odd multiples of 32 bytes keep banks apart.
  t.margin = p.axis[2].kernel == 2 ? 0 : 16;
  t.pitch = p.axis[2].kernel == 2 ? 2 * unit : unit == 64 ? 176 : unit == 32 ? 112 : 80;
  const int64_t vector = 16 / p.element_size();
  t.lead = static_cast<int>(vector - std::gcd(width, vector));
  t.inner = p.out_channels * pairs_row_taps(p) * p.axis[2].kernel;
  t.column_blocks = ceil_div(p.in_channels, int64_t{columns});
  t.row_units = ceil_div(width, int64_t{unit}), t.weight_row_units = ceil_div(width + t.lead, int64_t{unit});
  t.input_unit = t.weight_row_units * unit % 64 == 0 && t.lead == 0 ? 64 : unit;
  t.items = ceil_div(rows * t.row_units, int64_t{kPairsPositions / unit}) * t.column_blocks;
  t.steps = ceil_div(rows * t.weight_row_units, int64_t{kPairsWeightPositions / unit});
  t.row_blocks = ceil_div(t.inner, int64_t{kPairsRowBlock});
  t.kinds = t.row_blocks * t.column_blocks;
  pairs_share(p, t);
  pairs_limit_parts(p, t);
  return t;
}

inline PairsGradientTile pairs_gradient_tile(const Problem& p) {
  const int64_t width = p.axis[2].in;
  int unit = 32;
  if (double(round_up(width, 16)) < 0.6 * double(round_up(width, 32))) unit = 16;
  if (p.axis[2].kernel == 4 && round_up(width, 64) == round_up(width, 32)) unit = 64;
  PairsGradientTile narrow = pairs_gradient_tile_of(p, unit, 64);
  // Also where memory bounds it, and where small layers then fill more multiprocessors.
  const bool bound = p.in_channels <= 128 && p.axis[2].kernel == 2 && narrow.inner <= 512 && narrow.lead == 0;
  if (p.in_channels <= 64 || bound || narrow.items + narrow.kinds <= kPairsProcessors) return narrow;
  return pairs_gradient_tile_of(p, unit, 128);
}

// Milliseconds on an H200, of both.
inline double pairs_gradients_cost_ms(const Problem& p) {
  const PairsGradientTile& t = last_result<pairs_gradient_tile>(p);
  const double memory = 2 * (1.6 * double(p.out_elements()) + 2 * double(p.in_elements())) / 3.7e9;
  return 0.009 + (p.has_bias ? 0.002 : 0) + std::max(t.both_us / 1e3, memory);
}
// The share of each, as the gradients by matrix products share theirs: whoever makes one then makes the other.
inline double pairs_input_gradient_cost_ms(const Problem& p) {
  const double input = gradient_gemm_cost_ms(p), weight = gemm_weight_gradient_cost_ms(p);
  return pairs_gradients_cost_ms(p) * input / (input + weight);
}
inline double pairs_weight_gradient_cost_ms(const Problem& p) {
  return pairs_gradients_cost_ms(p) - pairs_input_gradient_cost_ms(p);
}

}  // namespace fastconvt
