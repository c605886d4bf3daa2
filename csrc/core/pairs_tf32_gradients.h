// Gradients in TF32 of layers with kernel and stride 2 along the last axis, from contiguous tensors as they lie: what
// is planned, refused and expected. Plain C++17: no Torch, no CUDA; csrc/cuda/pairs_tf32_* compute what this plans.
//
// A word is two neighbouring outputs, the taps of one input position. Words of an output channel and a tap of depth and
// height are neighbours along the width, so the output's gradient comes to matrix units through registers. What it is
// multiplied with lies along the inner dimension already: the weight along (output channel, tap), inputs along
// positions.
#pragma once

#include <algorithm>
#include <string>

#include "gemm_weight_gradient.h"
#include "gradient_gemm.h"
#include "problem.h"
#include "tf32_gradients.h"

namespace fastconvt {

// How blocks share the work; 132 multiprocessors are assumed, so that results do not depend on the GPU.
struct PairsTf32Plan {
  int input_tiles = 0, weight_tiles = 0;  // of eight input channels, of a block of either gradient
  int column_blocks = 0;                  // of the input's gradient
  int blocks = 0, input_blocks = 0;       // of the grid; of these, those that make the input's gradient
  int64_t runs_of_row = 0, runs = 0, items = 0, chunks = 0;
  bool flat = false;  // inputs are read as rows of whole images
  bool wide = false;  // the two runs of a step are neighbours
  int64_t weight_runs_of_row = 0, steps = 0, row_blocks = 0, kinds = 0, splits = 1;
  double clocks = 0;
};

constexpr int64_t kPairsLongest = 64 << 10;  // positions of a partial sum at most, since matrix units truncate

// Taps of depth and height.
inline int64_t pairs_tf32_rows(const Problem& p) { return p.axis[0].kernel * p.axis[1].kernel; }

// Rows of a block, which has `tiles` times eight columns.
constexpr int pairs_tf32_block_rows(int tiles) { return tiles == 32 ? 128 : 256; }

template <bool kInput, bool kWeight>
PairsTf32Plan pairs_tf32_plan_of(const Problem& p, int input_tiles, int weight_tiles) {
  constexpr int kProcessors = 132;
  PairsTf32Plan t;
  t.input_tiles = input_tiles, t.weight_tiles = weight_tiles;
  // Clocks of a stage; rows that begin within lines of 128 bytes are copied more slowly.
  const double apart = p.axis[2].in % 16 == 0 ? 1 : p.axis[2].in % 8 == 0 ? 1.1 : 1.5;
  const double input_stage = apart * (input_tiles == 32 ? 1150 : input_tiles == 16 ? 1270 : 900);
  const double weight_stage = apart * (weight_tiles == 32 ? 1380 : weight_tiles == 16 ? 1450 : 1000);
  const int64_t inner = p.out_channels * pairs_tf32_rows(p) * 2, width = p.axis[2].in;
  t.column_blocks = static_cast<int>(ceil_div(p.in_channels, int64_t{input_tiles} * 8));
  const int64_t lines = p.batch * p.axis[0].in * p.axis[1].in;
  t.runs_of_row = ceil_div(width, int64_t{16}), t.runs = lines * t.runs_of_row;
  t.items = ceil_div(t.runs, int64_t{pairs_tf32_block_rows(input_tiles) / 16}) * t.column_blocks;
  t.chunks = ceil_div(inner, int64_t{32});
  t.flat = width % 4 != 0;
  t.weight_runs_of_row = ceil_div(width + (t.flat ? 2 : 0), int64_t{16});
  t.wide = !t.flat && t.weight_runs_of_row % 2 == 0;
  t.steps = ceil_div(lines * t.weight_runs_of_row, int64_t{2});
  t.row_blocks = ceil_div(inner, int64_t{pairs_tf32_block_rows(weight_tiles)});
  t.kinds = t.row_blocks * ceil_div(p.in_channels, int64_t{weight_tiles} * 8);
  const int64_t fewest = ceil_div(t.steps * 32, kPairsLongest);
  const double part = 8 * double(p.weight_elements()) / 1500;  // clocks to write and read a partial sum
  const auto consider = [&](int input) {
    const int others = kProcessors - input;
    const int64_t splits = kWeight ? std::min(t.steps, std::max(fewest, others / t.kinds)) : 1;
    double of_input = 0, of_weight = 0;
    if (kInput)
      of_input = double(ceil_div(t.items, int64_t{input})) *
                 (double(t.chunks) * input_stage + (input_tiles == 8 ? 3000 : 6000));
    if (kWeight) {
      of_weight = double(ceil_div(t.kinds * splits, int64_t{others})) *
                  (double(ceil_div(t.steps, splits)) * weight_stage + 3000);
    }
    const double clocks = std::max(of_input, of_weight) + (splits > 1 ? part * double(splits) : 0);
    if (t.blocks > 0 && clocks >= t.clocks) return;
    t.clocks = clocks, t.splits = splits;
    t.input_blocks = static_cast<int>(std::min<int64_t>(input, t.items));
    t.blocks = t.input_blocks + static_cast<int>(kWeight ? std::min<int64_t>(others, t.kinds * splits) : 0);
  };
  divide_processors<kInput, kWeight>(kProcessors, consider);
  return t;
}

template <bool kInput, bool kWeight>
PairsTf32Plan pairs_tf32_plan(const Problem& p) {
  return fastest_tiles(p, [&](int tiles) { return pairs_tf32_plan_of<kInput, kWeight>(p, tiles, tiles); });
}

inline std::string pairs_tf32_refusal(const Problem& p) {
  if (p.dtype != DType::kFloat32 || !p.allow_tf32) return "another precision than TF32";
  if (p.layout != Layout::kContiguous || p.weight_layout != Layout::kContiguous) return "channels_last tensors";
  if (p.groups != 1) return "groups";
  const Axis& last = p.axis[2];
  if (last.kernel != 2 || last.stride != 2 || last.padding != 0 || last.output_padding != 0 || last.dilation != 1) {
    return "a last axis whose kernel and stride are not 2";
  }
  for (const Axis& axis : p.axis) {
    if (axis.dilation != 1 && axis.kernel > 1) return "a dilation";
  }
  const int64_t rows = pairs_tf32_rows(p);
  if (rows > 16 || 16 % rows != 0) return "taps of depth and height that 16 is no multiple of";
  if (p.out_channels * rows % 2 != 0) return "an odd number of output channels";
  if (last.in % 2 != 0 || (last.in % 4 != 0 && p.in_positions() % 4 != 0)) return "rows of an odd length";
  if (p.has_bias && !gemm_weight_counts(p)) return "outputs that no tap or several ones reach first";
  std::string other = gradient_gemm_refusal(p);  // these take tensors that are not aligned
  return other.empty() ? gemm_weight_gradient_refusal(p) : other;
}

// Milliseconds of both gradients on an H200.
inline double pairs_tf32_cost_ms(const Problem& p) {
  const PairsTf32Plan& t = last_result<pairs_tf32_plan<true, true>>(p);
  const double memory = 4 * double(p.out_elements() + 2 * p.in_elements()) / 4.1e9;
  return 0.009 + std::max(1.45 * memory, 1.05 * t.clocks / 1.7e6) + (t.splits > 1 || p.has_bias ? 0.003 : 0);
}

}  // namespace fastconvt
