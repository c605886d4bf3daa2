// The gradients of a transposed convolution of rows (1D and 2D) with few channels a group, on matrix units: tiles,
// refusals and costs. Plain C++17: no Torch, no CUDA; csrc/cuda/rows_{input,weight}_gradient.* compute what this plans.
//
// Along the height, input row y and output row j meet in tap t where j = y * stride - padding + t * dilation. Both
// kernels stage rows of the output's gradient in shared memory and visit only rows that have a tap.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <string>

#include "problem.h"

namespace fastconvt {

constexpr int kRowsWarps = 4;                    // of a block
constexpr int64_t kRowsSharedBytes = 99 * 1024;  // of a block, on every GPU that has asynchronous copies
constexpr int64_t kRowsTargetBytes[] = {72 * 1024, kRowsSharedBytes};  // so that three, or two, blocks fit an H200

// How many lanes of a warp share a bank, at worst, when lane (row, k) of a fragment, 8 rows by 4, reads the element
// row_place(row) + k_place(k). Lanes that read the same word do not conflict.
template <typename RowPlace, typename KPlace>
int bank_conflicts(int64_t element_size, RowPlace row_place, KPlace k_place) {
  int64_t words[32];
  int worst = 0, count[32] = {};
  for (int lane = 0; lane < 32; ++lane) {
    words[lane] = (row_place(lane / 4) + k_place(lane % 4)) * element_size / 4;
    bool seen = false;
    for (int i = 0; i < lane; ++i) seen = seen || words[i] == words[lane];
    if (!seen) worst = std::max(worst, ++count[words[lane] % 32]);
  }
  return worst;
}

// The pitch from `least` elements on, in units of 16 bytes, with the fewest conflicts(pitch).
template <typename Conflicts>
int64_t best_pitch(int64_t element_size, int64_t least, Conflicts conflicts) {
  const int64_t unit = 16 / element_size, first = ceil_div(least, unit) * unit;
  int64_t best = first;
  int fewest = 33;
  for (int64_t pitch = first; pitch < first + 8 * unit && fewest > 1; pitch += unit) {
    const int found = conflicts(pitch);
    if (found < fewest) fewest = found, best = pitch;
  }
  return best;
}

// Elements of a staged row of the output's gradient that `positions` neighbouring inputs read, and of an input row.
// Copies move 16 bytes, so a row may begin anywhere in the first ones.
inline int64_t rows_columns(const Problem& p, int64_t positions) {
  const int64_t unit = 16 / p.element_size();
  const Axis& width = p.axis[2];
  return (positions - 1) * width.stride + (width.kernel - 1) * width.dilation + unit;
}
inline int64_t rows_input_columns(const Problem& p, int64_t positions) { return positions + 16 / p.element_size() - 1; }

// The skew of channel `channel` of the output's gradient, but for a constant.
inline int64_t rows_skew(const Problem& p, int64_t channel) {
  return p.layout == Layout::kChannelsLast ? 0 : channel * p.out_positions() % (16 / p.element_size());
}

// Input gradient. A block makes tiles of `rows` x `positions` inputs of 8 channels, its warps 4 rows by 32 positions
// each. The reduction runs over rows of the output's gradient; in a row, over chunks of `channels` output channels; in
// a chunk, over (tap of the width, channel) pairs, `steps` times 8 of them. Groups of few channels are merged: a block
// makes `merged` of them as one, with weights 0 between them.
struct RowsInputGradientTile {
  int64_t merged = 1;
  int64_t in_channels = 1, out_channels = 1;  // of merged groups
  int64_t warps_x = 1;
  int64_t positions = 32;
  int64_t rows = 4;
  int64_t channels = 1;
  int64_t chunks = 1;
  int64_t steps = 1;
  int64_t columns = 0;     // elements of a staged row and channel that are filled
  int64_t pitch = 0;       // elements between channels
  int64_t row_step = 1;    // distance of output rows that may have a tap
  int64_t candidates = 1;  // such rows of a block
  int64_t max_rows = 1;    // of those that do have one
  int64_t stages = 2;
  int64_t weight_words = 0;
  int64_t shared_bytes = 0;
};

// Everything that follows from `channels`.
inline void finish_rows_input_gradient_tile(const Problem& p, int64_t channels, RowsInputGradientTile& t) {
  const Axis& width = p.axis[2];
  const int64_t size = p.element_size();
  t.chunks = ceil_div(t.out_channels, channels);
  const int64_t unit = 16 / size;  // so that all channels that a lane reads have one skew
  t.channels = ceil_div(ceil_div(t.out_channels, t.chunks), unit) * unit;
  t.steps = ceil_div(t.channels * width.kernel, 8);
  t.pitch = best_pitch(size, t.columns, [&](int64_t pitch) {
    return bank_conflicts(
        size, [&](int row) { return row * width.stride; },
        [&](int k) { return k % t.channels * pitch + k / t.channels * width.dilation + rows_skew(p, k % t.channels); });
  });
  t.weight_words = p.axis[1].kernel * t.chunks * t.steps * 128;
  const int64_t fixed = 4 * t.weight_words + 32 * t.steps + t.max_rows * (4 + 2 * t.rows) + 32;
  const int64_t stage = size * t.channels * t.pitch;
  for (const int64_t target : kRowsTargetBytes) {
    t.stages = std::min<int64_t>(4, (target - fixed) / stage);
    if (t.stages >= 2) break;
  }
  t.shared_bytes = fixed + t.stages * stage;
}

inline RowsInputGradientTile rows_input_gradient_tile(const Problem& p) {
  constexpr int64_t kRows = 4, kPositions = 32, kChannels = 8;  // of a warp
  constexpr int64_t kSteps = 8;                                 // of a stage, at least
  constexpr int64_t kMergedWeights = 24 * 1024;
  const Axis &height = p.axis[1], &width = p.axis[2];
  RowsInputGradientTile t;
  const int64_t weights = 64 * p.out_channels_per_group() * height.kernel * width.kernel;  // bytes as fragments
  for (int64_t merged = 2; merged * p.in_channels_per_group() <= kChannels; ++merged) {
    if (p.groups % merged == 0 && merged * weights <= kMergedWeights) t.merged = merged;
  }
  t.in_channels = t.merged * p.in_channels_per_group();
  t.out_channels = t.merged * p.out_channels_per_group();
  t.warps_x = width.in > 2 * kPositions ? 4 : width.in > kPositions ? 2 : 1;
  t.positions = kPositions * t.warps_x;
  t.rows = kRows * (kRowsWarps / t.warps_x);
  t.columns = rows_columns(p, t.positions);
  t.row_step = std::gcd(height.stride, height.dilation);
  t.candidates = ((t.rows - 1) * height.stride + (height.kernel - 1) * height.dilation) / t.row_step + 1;
  t.max_rows = std::min(t.candidates, t.rows * height.kernel);
  for (int64_t channels = 8 * ceil_div(kSteps, width.kernel);; channels /= 2) {
    finish_rows_input_gradient_tile(p, std::min(channels, t.out_channels), t);
    if (t.stages >= 2 || channels == 1) return t;
  }
}

// Weight gradient. Of each of `groups` groups a block has `out_channels` output channels times the taps of a row
// (matrix rows), by `in_channels` input channels times the height's taps of one phase (matrix columns), and sums over
// `positions` inputs of a row at a time, row after row. Each staged row of the output's gradient meets a ring of input
// rows. The warps share groups and positions.
struct RowsWeightGradientTile {
  int64_t groups = 1;  // 1, 2 or 4
  int64_t positions = 32;
  int64_t out_channels = 1;
  int64_t in_channels = 1;
  int64_t out_chunks = 1;
  int64_t in_chunks = 1;
  int64_t classes = 1;                          // of the height's taps: those of one phase
  int64_t max_taps = 1;                         // of a class
  int64_t matrix_rows = 1, matrix_columns = 1;  // in units of 16 and 8
  int64_t columns = 0;                          // elements of a staged row and channel
  int64_t grad_pitch = 0, input_pitch = 0;
  int64_t reach = 1;  // input rows that one row of the output's gradient meets
  int64_t stages = 2;
  int64_t input_slots = 2;
  int64_t shared_bytes = 0;
};

// Everything that follows from `positions`.
inline void finish_rows_weight_gradient_tile(const Problem& p, int64_t positions, RowsWeightGradientTile& t) {
  const Axis& width = p.axis[2];
  const int64_t size = p.element_size();
  t.positions = positions;
  t.columns = rows_columns(p, positions);
  t.grad_pitch = best_pitch(size, t.columns, [&](int64_t pitch) {
    return bank_conflicts(
        size,
        [&](int row) {
          const int64_t channel = row / width.kernel % t.out_channels;
          return channel * pitch + row % width.kernel * width.dilation + rows_skew(p, channel);
        },
        [&](int k) { return k * width.stride; });
  });
  t.input_pitch = best_pitch(size, rows_input_columns(p, positions), [&](int64_t pitch) {
    return bank_conflicts(size, [&](int row) { return row * pitch; }, [](int k) { return k; });
  });
  const int64_t row = size * t.groups * t.out_channels * t.grad_pitch;
  const int64_t input_row = size * t.groups * t.in_channels * t.input_pitch;
  for (t.stages = 4; t.stages > 2; --t.stages) {
    if (t.stages * row + (t.reach + t.stages - 1) * input_row <= kRowsSharedBytes) break;
  }
  t.input_slots = t.reach + t.stages - 1;
  t.shared_bytes = t.stages * row + t.input_slots * input_row;
}

inline RowsWeightGradientTile rows_weight_gradient_tile(const Problem& p) {
  constexpr int64_t kMatrixRows = 80, kMatrixColumns = 24;  // of a warp's registers
  constexpr int64_t kChannels = 16;                         // of a block with several groups
  const Axis &height = p.axis[1], &width = p.axis[2];
  RowsWeightGradientTile t;
  t.classes = std::min(height.kernel, height.tap_step());
  t.max_taps = ceil_div(height.kernel, height.tap_step());
  const int64_t out = p.out_channels_per_group(), in = p.in_channels_per_group();
  t.out_chunks = ceil_div(out, std::max<int64_t>(1, std::min(out, kMatrixRows / width.kernel)));
  t.out_channels = ceil_div(out, t.out_chunks);
  t.in_chunks = ceil_div(in, std::max<int64_t>(1, std::min(in, kMatrixColumns / t.max_taps)));
  t.in_channels = ceil_div(in, t.in_chunks);
  for (int64_t groups = 2; groups <= 4; groups *= 2) {
    if (p.groups % groups == 0 && groups * std::max(out, in) <= kChannels && t.out_chunks * t.in_chunks == 1) {
      t.groups = groups;
    }
  }
  t.matrix_rows = ceil_div(t.out_channels * width.kernel, 16);
  t.matrix_columns = ceil_div(t.in_channels * t.max_taps, 8);
  t.reach = (t.max_taps - 1) * (height.dilation / std::gcd(height.stride, height.dilation)) + 1;
  for (int64_t positions = width.in > 64 ? 128 : width.in > 32 ? 64 : 32;; positions /= 2) {
    finish_rows_weight_gradient_tile(p, positions, t);
    if (t.shared_bytes <= kRowsSharedBytes || positions == 32) return t;
  }
}

// Blocks of a part of the weight's sums; and how many parts may be: those of strict float32, for which cuDNN needs no
// workspace, lie in the memory of the input's gradient.
inline int64_t rows_weight_gradient_blocks(const Problem& p, const RowsWeightGradientTile& t) {
  return p.groups / t.groups * t.classes * t.out_chunks * t.in_chunks;
}
inline int64_t rows_weight_gradient_most_parts(const Problem& p) {
  if (p.dtype != DType::kFloat32 || p.allow_tf32) return int64_t{1} << 30;
  return std::max<int64_t>(1, p.in_elements() / std::max<int64_t>(1, p.weight_elements()));
}

// Both kernels.
inline std::string rows_gradient_refusal(const Problem& p) {
  constexpr int64_t kMaxAttribute = 4096, kMaxSize = int64_t{1} << 30;
  const Axis& depth = p.axis[0];
  if (p.dtype == DType::kFloat64) return "float64";
  if (depth.in != 1 || depth.kernel != 1 || depth.out() != 1 || depth.padding != 0) return "three spatial axes";
  for (int a = 1; a < 3; ++a) {
    const Axis& axis = p.axis[a];
    if (std::max({axis.kernel, axis.stride, axis.padding, axis.dilation}) > kMaxAttribute || axis.kernel > 64) {
      return "a kernel of more than 64, or a stride, padding or dilation of more than 4096";
    }
    if (std::max(axis.in, axis.out()) >= kMaxSize) return "an axis of 2^30 or more";
  }
  if (std::max({p.batch, p.in_channels, p.out_channels}) >= kMaxSize) return "a batch or channels of 2^30 or more";
  const auto plane = [&](int64_t height, int64_t width, int64_t channels) {
    return double(height) * double(width) * double(p.layout == Layout::kChannelsLast ? channels : 1);
  };
  if (std::max(plane(p.axis[1].in, p.axis[2].in, p.in_channels),
               plane(p.axis[1].out(), p.axis[2].out(), p.out_channels)) >= double(int64_t{1} << 31)) {
    return "a plane of 2^31 or more elements";
  }
  return "";
}

// Tiles of the input gradient.
inline double rows_input_gradient_tiles(const Problem& p, const RowsInputGradientTile& t) {
  return double(p.batch) * double(p.groups / t.merged) * double(ceil_div(t.in_channels, 8)) *
         double(ceil_div(p.axis[1].in, t.rows)) * double(ceil_div(p.axis[2].in, t.positions));
}

inline std::string rows_input_gradient_refusal(const Problem& p) {
  const std::string refusal = rows_gradient_refusal(p);
  if (!refusal.empty()) return refusal;
  const RowsInputGradientTile t = rows_input_gradient_tile(p);
  if (t.candidates > 4096) return "a height whose stride or kernel reaches over more than 4096 rows";
  if (t.stages < 2) return "a kernel and output channels of a group that do not fit shared memory";
  if (rows_input_gradient_tiles(p, t) >= double(1 << 30)) return "more than 2^30 tiles";
  return "";
}

inline std::string rows_weight_gradient_refusal(const Problem& p) {
  const std::string refusal = rows_gradient_refusal(p);
  if (!refusal.empty()) return refusal;
  if (ceil_div(p.axis[1].kernel, p.axis[1].tap_step()) > 24) return "more than 24 taps a phase of the height";
  if (rows_weight_gradient_tile(p).shared_bytes > kRowsSharedBytes) return "rows that do not fit shared memory";
  if (double(p.weight_elements()) >= double(1 << 28)) return "a weight of 2^28 or more elements";
  if (double(p.batch) * double(p.axis[1].out()) * double(p.axis[2].in) >= double(int64_t{1} << 36)) {
    return "more than 2^36 positions";
  }
  return "";
}

// Milliseconds on an H200. Both kernels are bound by the instructions that they issue, so the costs count these: per
// warp, then divided by what 132 multiprocessors issue; 15 layers are within a third of it. `staged` elements of a row
// are copied by 16 bytes a lane, or one by one.
inline double rows_staging_instructions(const Problem& p, double staged) {
  const bool one_by_one = p.layout == Layout::kChannelsLast;
  return staged / (32 * kRowsWarps) * (one_by_one ? 15 : 3.5 / (16.0 / double(p.element_size())));
}

inline double rows_instructions_ms(double warps, double instructions) {
  constexpr double kSchedulers = 528, kIssued = 0.92e9;  // a second, of one scheduler
  return warps / kSchedulers * instructions / kIssued * 1e3;
}

// The fewest bytes: rows of the output's gradient that have a tap, and the input or its gradient.
inline double rows_gradient_bytes_ms(const Problem& p) {
  double rows = 0;
  const Axis& height = p.axis[1];
  for (int64_t r = 0; r < height.stride; ++r) rows += height.num_taps(r) > 0 ? double(height.num_outputs(r)) : 0;
  const double grad = double(p.batch) * double(p.out_channels) * rows * double(p.axis[2].out());
  return double(p.element_size()) * (grad + double(p.in_elements())) / 3.6e12 * 1e3;
}

inline double rows_input_gradient_cost_ms(const Problem& p) {
  const RowsInputGradientTile t = rows_input_gradient_tile(p);
  const bool split = p.dtype == DType::kFloat32 && !p.allow_tf32;
  const double kResident = 396;  // blocks
  const double waves = double(int64_t(rows_input_gradient_tiles(p, t) / kResident) + 1);
  const int64_t pairs_of_tile = std::min(t.rows, p.axis[1].in) * p.axis[1].kernel;  // (y, kh)
  const double rows = double(std::min(t.max_rows, pairs_of_tile) * t.chunks);
  const double pairs = double(pairs_of_tile * t.chunks) / double(kRowsWarps / t.warps_x);
  const double steps = rows * double(t.steps) * (split ? 52 : 42) + pairs * double(t.steps) * (split ? 16 : 11);
  const double staging = rows * (240 + 1.3 * rows_staging_instructions(p, double(t.channels * t.columns)));
  const double compute = rows_instructions_ms(waves * kResident * kRowsWarps, steps + staging + 900);
  const double layout = p.layout == Layout::kChannelsLast && p.element_size() == 2 ? 1.3 : 1;
  return 0.005 + layout * std::max(compute, rows_gradient_bytes_ms(p));
}

inline double rows_weight_gradient_cost_ms(const Problem& p) {
  const RowsWeightGradientTile t = rows_weight_gradient_tile(p);
  const bool split = p.dtype == DType::kFloat32 && !p.allow_tf32;
  const Axis& height = p.axis[1];
  double rows = 0;  // of the output's gradient that have a tap
  for (int64_t r = 0; r < height.stride; ++r) rows += height.num_taps(r) > 0 ? double(height.num_outputs(r)) : 0;
  const double m = t.matrix_rows > 2 ? 5 : double(t.matrix_rows), n = double(t.matrix_columns);
  const double pairs = m > 2 ? 1 : 0.75;  // two steps at a time
  const double step = pairs * (split ? m * (20 + 5 * n) + 10 * n + 10 : m * (12 + 3 * n) + 5 * n + 10);
  const double steps = double(t.positions * t.groups) / (8 * kRowsWarps);
  const double staged = double(t.groups) * double(t.out_channels * t.columns + t.in_channels * t.positions);
  const double blocks = double(p.groups / t.groups * t.out_chunks * t.in_chunks);
  const double segments = double(ceil_div(p.axis[2].in, t.positions));
  const int64_t wanted = std::max<int64_t>(1, 264 / rows_weight_gradient_blocks(p, t));
  const double idle = double(wanted) / double(std::min(wanted, rows_weight_gradient_most_parts(p)));
  const double compute = idle * rows_instructions_ms(double(p.batch) * segments * rows * blocks * kRowsWarps,
                                                     450 + rows_staging_instructions(p, staged) + steps * step);
  const bool channels_last = p.layout == Layout::kChannelsLast;
  const double layout = !channels_last ? 1.3 : p.element_size() == 2 ? 2.4 : 1.45;  // as measured on 75 layers
  return 0.016 + layout * std::max(compute, rows_gradient_bytes_ms(p));
}

}  // namespace fastconvt
