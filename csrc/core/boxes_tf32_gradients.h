// Gradients in TF32 of dense layers from contiguous tensors as they lie: what is planned, refused and expected. Plain
// C++17: no Torch, no CUDA; csrc/cuda/boxes_tf32_* compute what this plans.
//
// A copy brings a box: what some positions see of the output's gradient, for some output channels. An element that a
// position multiplies with a term, (output channel, tap), lies there at the sum of two offsets, one of the position and
// one of the term, and comes to matrix units through registers. What it is multiplied with lies along the inner
// dimension already: the weight along terms, inputs along positions.
#pragma once

#include <algorithm>
#include <cmath>
#include <string>

#include "gemm_weight_gradient.h"
#include "gradient_gemm.h"
#include "problem.h"
#include "tf32_gradients.h"

namespace fastconvt {

constexpr int kBoxesHeader = 5 << 10;  // bytes of shared memory before the stages
constexpr int64_t kBoxesShared = 226 << 10;
constexpr int kBoxesMaxStages = 8;
constexpr int64_t kBoxesLongest = 64 << 10;  // positions of a partial sum at most, since matrix units truncate

// Positions of a copy: of width, height, depth and batch; axes are counted from the last one here.
struct BoxesUnit {
  int positions = 0;
  int box[4] = {};
  int span[3] = {};  // outputs that they see
  int lead = 0;      // outputs before the first one that is seen: copies begin at multiples of 16 bytes
  int channels = 0;  // output channels of a copy
  int64_t tiles[4] = {}, count = 0;
  int bytes = 0, pitch = 0;  // of a copy, and from one to the next in shared memory
  int turns = 1;             // of shared memory for what 32 lanes load at a time
};

struct BoxesTf32Plan {
  int input_tiles = 0, weight_tiles = 0;  // of eight input channels, of a block of either gradient
  int column_blocks = 0;                  // of the input's gradient
  int blocks = 0, input_blocks = 0;       // of the grid; of these, those that make the input's gradient
  int stage_bytes = 0, stages = 0, weight_stage_bytes = 0, weight_stages = 0;
  BoxesUnit input, weight;
  int depth_taps = 0;  // of a copy of the input's gradient
  int64_t items = 0, chunks = 0, input_splits = 1;
  // A unit of the weight's gradient is a run of a whole image's positions; of a row, but it begins up to two
  // positions earlier, since copies begin at multiples of 16 bytes.
  bool flat = false, shifted = false;
  int64_t steps = 0, row_blocks = 0, kinds = 0, splits = 1;
  double clocks = 0;
};

inline int64_t boxes_axis(const Problem& p, int a) { return a == 3 ? p.batch : p.axis[2 - a].in; }

// What follows from the positions of a copy; whether it can be.
inline bool boxes_unit(const Problem& p, const int (&box)[4], int channels, int depth_taps, BoxesUnit& u) {
  u.positions = 1, u.count = 1, u.channels = channels;
  int64_t bytes = 4 * int64_t{channels} * box[3];
  for (int a = 0; a < 4; ++a) {
    u.box[a] = box[a], u.positions *= box[a];
    u.tiles[a] = ceil_div(boxes_axis(p, a), int64_t{box[a]}), u.count *= u.tiles[a];
    if (a == 3) break;
    const Axis& axis = p.axis[2 - a];
    int64_t span = (box[a] - 1) * axis.stride + ((a == 2 ? depth_taps : axis.kernel) - 1) * axis.dilation + 1;
    if (a == 0) {
      u.lead = static_cast<int>((4 - axis.padding % 4) % 4);
      if (u.tiles[0] > 1 && box[0] * axis.stride % 4 != 0) return false;
      span = round_up(span + u.lead, int64_t{4});
    }
    if (span > 256) return false;
    u.span[a] = static_cast<int>(span), bytes *= span;
  }
  if (channels > 256 || bytes > (100 << 10)) return false;
  u.bytes = static_cast<int>(bytes), u.pitch = round_up(u.bytes, 128);
  return true;
}

// Output channels and taps of depth of a copy of 32 terms.
inline bool boxes_chunk(const Problem& p, int& channels, int& depth_taps) {
  const int64_t taps = p.kernel_positions(), plane = p.axis[1].kernel * p.axis[2].kernel;
  depth_taps = static_cast<int>(p.axis[0].kernel);
  if (taps <= 32) {
    channels = static_cast<int>(32 % taps == 0 ? 32 / taps : (32 + 2 * taps - 2) / taps);
    return true;
  }
  channels = 1;
  if (plane > 32 || 32 % plane != 0 || depth_taps % (32 / plane) != 0) return false;
  depth_taps = static_cast<int>(32 / plane);
  return true;
}

// Positions of the input's gradient whose copies are small; `rows` of a block.
inline bool boxes_input_unit(const Problem& p, int rows, int channels, int depth_taps, BoxesUnit& best) {
  double least = 0;
  for (int positions = 64; positions >= 16; positions /= 2) {
    for (int w = 4; w <= positions && (w == 4 || w < 2 * p.axis[2].in); w *= 2) {
      for (int h = 1; w * h <= positions && (h == 1 || h < 2 * p.axis[1].in); h *= 2) {
        for (int d = 1; w * h * d <= positions && (d == 1 || d < 2 * p.axis[0].in); d *= 2) {
          BoxesUnit u;
          if (!boxes_unit(p, {w, h, d, positions / (w * h * d)}, channels, depth_taps, u)) continue;
          if (rows / positions * u.pitch > (84 << 10)) continue;
          // Clocks of products, of the L2 cache, of copied lines of 128 bytes.
          const double rows =
              u.bytes / (4.0 * u.span[0]) * std::ceil(u.span[0] / 32.0 + (u.span[0] % 32 != 0 ? 0.5 : 0));
          const double copy = std::max(double(u.pitch) / 40 + 1.6 * positions, 2.8 * (rows + 0.5 * positions));
          const double cost =
              double(u.count) * (std::max(4.0 * positions, copy) + 0.1 * copy + (w < 8 ? 1.0 : 0.0) * positions);
          if (best.count == 0 || cost < least) best = u, least = cost;
        }
      }
    }
  }
  return best.count > 0;
}

// Whether positions outside a row meet outputs outside a row only.
inline bool boxes_keep_apart(const Problem& p) {
  const Axis& last = p.axis[2];
  return last.padding == 0 && last.dilation == 1 && last.kernel <= last.stride && last.out() == last.in * last.stride;
}

// In how many turns shared memory serves a load of 32 lanes, of eight things that are `many` and four others: terms and
// positions of the weight's gradient (`weight`), positions and terms of the input's.
inline int boxes_turns(const Problem& p, const BoxesUnit& u, int span, bool weight) {
  const auto position = [&](int i) {
    const int x = i % u.box[0], y = i / u.box[0] % u.box[1], z = i / (u.box[0] * u.box[1]) % u.box[2];
    return static_cast<int>(x * p.axis[2].stride + (y * p.axis[1].stride + z * p.axis[0].stride * u.span[1]) * span);
  };
  const int taps = static_cast<int>(p.kernel_positions()), width = static_cast<int>(p.axis[2].kernel);
  const int height = static_cast<int>(p.axis[1].kernel);
  const auto term = [&](int k) {
    const int channel = k / taps, tap = k % taps, row = tap / width, y = row % height, z = row / height;
    return static_cast<int>(tap % width * p.axis[2].dilation +
                            ((channel * u.span[2] + z * p.axis[0].dilation) * u.span[1] + y * p.axis[1].dilation) *
                                span);
  };
  int positions[8], terms[8];
  for (int i = 0; i < 8; ++i) positions[i] = position(i), terms[i] = term(i);
  int words[32][32], count[32] = {}, most = 0;  // of each bank
  for (int lane = 0; lane < 32; ++lane) {
    const int g = lane / 4, t = lane % 4, word = weight ? terms[g] + positions[t] : positions[g] + terms[t];
    int (&bank)[32] = words[word % 32], &held = count[word % 32];
    if (std::find(bank, bank + held, word) == bank + held) bank[held++] = word, most = std::max(most, held);
  }
  return most;
}

// Copies longer rows where that keeps banks apart and is worth it, of a block that has `rows` rows and a stage that has
// `copies` units.
inline void boxes_pad(const Problem& p, bool weight, int rows, int copies, BoxesUnit& u) {
  const int natural = u.span[0], row_bytes = u.bytes / natural;
  const auto clocks = [&](int span, int turns) {
    return double(rows) * turns + double(row_bytes) * span * copies / 38;
  };
  u.turns = boxes_turns(p, u, natural, weight);
  double least = clocks(natural, u.turns);
  for (int span = natural + 4; span < natural + 32 && span <= 256 && clocks(span, 1) < least; span += 4) {
    const int turns = boxes_turns(p, u, span, weight);
    if (clocks(span, turns) < least) least = clocks(span, turns), u.turns = turns, u.span[0] = span;
  }
  u.bytes = row_bytes * u.span[0], u.pitch = round_up(u.bytes, 128);
}

// Positions of the weight's gradient: a run of a row, or of a whole image.
inline bool boxes_weight_unit(const Problem& p, int channels, BoxesUnit& best, bool& flat, bool& shifted) {
  const int64_t width = p.axis[2].in, height = p.axis[1].in, depth = p.axis[0].in;
  double least = 0;
  const auto consider = [&](const int (&box)[4], bool is_flat) {
    BoxesUnit u;
    if (!boxes_unit(p, box, channels, static_cast<int>(p.axis[0].kernel), u)) return;
    if (shifted && !is_flat) {
      u.count /= u.tiles[0], u.tiles[0] = ceil_div(width + 2, int64_t{box[0]}), u.count *= u.tiles[0];
      if (p.axis[2].stride % 2 != 0) return;
    }
    if (32 / u.positions * u.pitch > (84 << 10)) return;
    const double rows =
        u.bytes / (4.0 * u.span[0]) * std::ceil(u.span[0] / 32.0 + (u.span[0] % 32 != 0 ? 0.5 : 0)) + 128;
    const double copy = std::max(double(u.pitch) / 40 + 12 * u.positions, 2.8 * rows);
    const double cost = double(u.count) * (std::max(32.0 * u.positions, copy) + 0.1 * copy);
    if (best.count == 0 || cost < least) best = u, least = cost, flat = is_flat;
  };
  shifted = width % 4 != 0;
  for (int run = 32; run >= 16; run /= 2) {
    consider({run, 1, 1, 1}, false);
    if (shifted || run % width != 0 || p.in_positions() % run != 0) continue;
    const int64_t rows = run / width, h = std::min(rows, height);
    if (rows % h != 0 || height % h != 0 || depth % (rows / h) != 0) continue;
    consider({static_cast<int>(width), static_cast<int>(h), static_cast<int>(rows / h), 1}, true);
  }
  return best.count > 0;
}

// Rows of a block, which has `tiles` times eight columns.
constexpr int boxes_tf32_block_rows(int tiles) { return tiles == 32 ? 128 : 256; }

template <bool kInput, bool kWeight>
BoxesTf32Plan boxes_tf32_plan_of(const Problem& p, int input_tiles, int weight_tiles) {
  constexpr int kProcessors = 132;
  BoxesTf32Plan t;
  int channels;
  if (!boxes_chunk(p, channels, t.depth_taps)) return t;
  const int rows = boxes_tf32_block_rows(input_tiles), weight_rows = boxes_tf32_block_rows(weight_tiles);
  const int64_t taps = p.kernel_positions(), inner = p.out_channels * taps;
  const int row_channels = static_cast<int>(weight_rows / taps);
  if (row_channels < 1 || !boxes_input_unit(p, rows, channels, t.depth_taps, t.input) ||
      !boxes_weight_unit(p, row_channels, t.weight, t.flat, t.shifted)) {
    return t;
  }
  boxes_pad(p, false, rows, rows / t.input.positions, t.input);
  boxes_pad(p, true, weight_rows, 32 / t.weight.positions, t.weight);
  t.input_tiles = input_tiles, t.weight_tiles = weight_tiles;
  t.column_blocks = static_cast<int>(ceil_div(p.in_channels, int64_t{input_tiles} * 8));
  const auto stages_of = [](int bytes, int& stage_bytes) {
    stage_bytes = round_up(bytes, 1024);
    return static_cast<int>(std::min<int64_t>((kBoxesShared - kBoxesHeader - 1024) / stage_bytes, kBoxesMaxStages));
  };
  const int input_bytes = rows / t.input.positions * t.input.pitch;
  const int weight_bytes = 32 / t.weight.positions * t.weight.pitch;
  t.stages = stages_of(input_bytes + input_tiles * 1024, t.stage_bytes);
  t.weight_stages = stages_of(weight_bytes + weight_tiles * 1024, t.weight_stage_bytes);
  if (std::min(t.stages, t.weight_stages) < 2) return t;
  // Clocks of a stage: of products, of shared memory, of the L2 cache, of copied lines of 128 bytes.
  const auto stage_of = [](const BoxesUnit& u, int tiles, int bytes, int lines) {
    const double rows = boxes_tf32_block_rows(tiles), area = rows * tiles / 4, loads = rows * (u.turns + 0.25);
    const double copied =
        bytes / (4.0 * u.span[0]) * std::ceil(u.span[0] / 32.0 + (u.span[0] % 32 != 0 ? 0.5 : 0)) + lines;
    const double all = bytes + tiles * 1024;
    return std::max({area, area / 2 + loads + all / 128, all / 38, 2.8 * copied});
  };
  const double apart = p.axis[2].out() % 16 == 0 ? 1 : 1.3;  // rows that begin within lines are copied more slowly
  const double input_stage =
      apart * stage_of(t.input, input_tiles, input_bytes, input_tiles * 8) + (input_tiles == 32 ? 80 : 320);
  const double weight_stage =
      apart * stage_of(t.weight, weight_tiles, weight_bytes, weight_tiles * 8 * 32 / t.weight.positions) +
      (weight_tiles == 32 ? 60 : 200);
  t.items = ceil_div(t.input.count, int64_t{rows / t.input.positions}) * t.column_blocks;
  t.chunks = ceil_div(inner, int64_t{32});
  t.steps = ceil_div(t.weight.count, int64_t{32 / t.weight.positions});
  t.row_blocks = ceil_div(p.out_channels, int64_t{row_channels}),
  t.kinds = t.row_blocks * ceil_div(p.in_channels, int64_t{weight_tiles} * 8);
  const int64_t fewest = ceil_div(t.steps * 32, kBoxesLongest);
  // Clocks to write and read a partial sum.
  const double weight_part = 8 * double(p.weight_elements()) / 1500, input_part = 8 * double(p.in_elements()) / 1500;
  const auto consider = [&](int input) {
    const int others = kProcessors - input;
    const int64_t splits = kWeight ? std::min(t.steps, std::max(fewest, others / t.kinds)) : 1;
    const int64_t input_splits =
        kInput ? std::max<int64_t>(1, std::min<int64_t>({input / t.items, t.chunks / 8, int64_t{8}})) : 1;
    double of_input = 0, of_weight = 0;
    if (kInput) {
      of_input = double(ceil_div(t.items * input_splits, int64_t{input})) *
                 (double(ceil_div(t.chunks, input_splits)) * input_stage + 8000);
    }
    if (kWeight) {
      of_weight = double(ceil_div(t.kinds * splits, int64_t{others})) *
                  (double(ceil_div(t.steps, splits)) * weight_stage + 5000);
    }
    const double clocks = std::max(of_input, of_weight) + (splits > 1 ? weight_part * double(splits) : 0) +
                          (input_splits > 1 ? input_part * double(input_splits) : 0);
    if (t.blocks > 0 && clocks >= t.clocks) return;
    t.clocks = clocks, t.splits = splits, t.input_splits = input_splits;
    t.input_blocks = static_cast<int>(std::min<int64_t>(input, t.items * input_splits));
    t.blocks = t.input_blocks + static_cast<int>(kWeight ? std::min<int64_t>(others, t.kinds * splits) : 0);
  };
  divide_processors<kInput, kWeight>(kProcessors, consider);
  return t;
}

template <bool kInput, bool kWeight>
BoxesTf32Plan boxes_tf32_plan(const Problem& p) {
  return fastest_tiles(p, [&](int tiles) { return boxes_tf32_plan_of<kInput, kWeight>(p, tiles, tiles); });
}

// Outputs of a channel beyond those that counted taps (see gemm_weight_counts()) meet; -1: too many.
inline int64_t boxes_uncounted(const Problem& p) {
  Problem counted = p;
  for (Axis& axis : counted.axis) axis.output_padding -= std::max<int64_t>(0, axis.out() - axis.in * axis.stride);
  if (!gemm_weight_counts(counted)) return -1;
  const int64_t rest = p.batch * (p.out_positions() - counted.out_positions());
  return rest <= (64 << 10) ? rest : -1;
}

inline std::string boxes_tf32_refusal(const Problem& p) {
  if (p.dtype != DType::kFloat32 || !p.allow_tf32) return "another precision than TF32";
  if (p.layout != Layout::kContiguous || p.weight_layout != Layout::kContiguous) return "channels_last tensors";
  if (p.groups != 1) return "groups";
  if (p.axis[2].kernel == 1) return "a kernel of 1 along the last axis";
  if (p.axis[2].out() % 4 != 0) return "rows of the output that are no multiples of 16 bytes";
  if (p.axis[2].in % 4 != 0 && (p.axis[2].in % 2 != 0 || p.in_positions() % 4 != 0 || !boxes_keep_apart(p))) {
    return "rows of the input that are no multiples of 16 bytes";
  }
  if (p.out_channels * p.kernel_positions() % 4 != 0) return "lines of the weight that are no multiples of 16 bytes";
  if (p.has_bias && boxes_uncounted(p) < 0) return "outputs that no tap or several ones reach first";
  std::string other = gradient_gemm_refusal(p);  // these take tensors that are not aligned
  if (other.empty()) other = gemm_weight_gradient_refusal(p);
  if (!other.empty()) return other;
  return last_result<boxes_tf32_plan<true, true>>(p).blocks == 0 ? "a kernel whose boxes do not fit" : "";
}

// Milliseconds of both gradients on an H200.
inline double boxes_tf32_cost_ms(const Problem& p) {
  const BoxesTf32Plan& t = last_result<boxes_tf32_plan<true, true>>(p);
  const double memory = 4 * double(p.out_elements() + 2 * p.in_elements()) / 4.1e9;
  const double small = p.in_positions() <= 64 && t.splits == 1 && t.input_splits <= 2 ? 0.82 : 1;  // images
  return 0.011 + std::max(1.8 * memory, small * t.clocks / 1.7e6);
}

}  // namespace fastconvt
