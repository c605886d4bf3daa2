// The input's gradient of layers with few input positions and many weights, as one matrix product of contiguous tensors
// as they lie, in float32 and TF32: refusals, tiles and costs. Plain C++17: no Torch, no CUDA;
// csrc/cuda/few_input_gradient.* compute what this plans.
//
// Rows are input channels, columns input positions, the inner dimension is the weight's own: output channels by taps.
#pragma once

#include <algorithm>
#include <string>

#include "problem.h"

namespace fastconvt {

constexpr int64_t kFewPositions = 1024;
constexpr int kFewInner = 32;  // of a stage
constexpr int kFewMaxTaps = 128, kFewMaxKernel = 32;

// Channels and positions of a block, its stages, and blocks of a multiprocessor at once.
struct FewInputShape {
  int rows, columns, stages, resident;
};
constexpr FewInputShape kFewInputShapes[] = {{64, 32, 6, 2}, {64, 64, 5, 2}};

struct FewInputTile {
  int shape = 0;
  int splits = 1;  // blocks of a cluster, which share the inner dimension
  int64_t row_blocks = 0, column_blocks = 0;
  int steps = 0;  // stages of all of the inner dimension
  double clocks = 0;
};

// Clocks of a stage, of a multiprocessor that does nothing else: what copies take, mostly.
inline double few_input_step_clocks(const Problem& p, int shape) {
  const bool split = !p.allow_tf32;
  const double apart = p.axis[2].kernel >= 4 ? 0.92 : 1;  // of taps that are copied
  return apart * (shape == 0 ? (split ? 1350 : 1150) : (split ? 2600 : 2250));
}
// Clusters of some blocks that an H200 runs at once, for each block of a multiprocessor.
inline int64_t few_input_clusters(int splits) { return splits == 1 ? 132 : splits == 2 ? 66 : splits == 4 ? 30 : 15; }

inline FewInputTile few_input_tile(const Problem& p) {
  FewInputTile t{};
  const int64_t positions = p.batch * p.in_positions();
  t.shape = positions > kFewInputShapes[0].columns;
  const FewInputShape shape = kFewInputShapes[t.shape];
  t.row_blocks = ceil_div(p.in_channels, int64_t{shape.rows});
  t.column_blocks = ceil_div(positions, int64_t{shape.columns});
  t.steps = static_cast<int>(ceil_div(p.out_channels * p.kernel_positions(), int64_t{kFewInner}));
  int best = 1;
  for (int splits = 1; splits <= 8; splits *= 2) {
    const int64_t blocks = t.row_blocks * t.column_blocks * splits;
    if (splits > 1 && (t.steps < 4 * splits || blocks > few_input_clusters(splits) * splits * shape.resident)) break;
    const double rounds = std::max(1.0, double(blocks) / 132);
    const double clocks = rounds * double(ceil_div(t.steps, splits)) * few_input_step_clocks(p, t.shape) + 7000 +
                          (splits > 1 ? 1500 + 300 * splits : 0);
    if (splits == 1 || clocks < t.clocks) best = splits, t.clocks = clocks;
  }
  t.splits = best;
  return t;
}

inline std::string few_input_gradient_refusal(const Problem& p) {
  if (p.dtype != DType::kFloat32) return "other than float32";
  if (p.layout != Layout::kContiguous || p.weight_layout != Layout::kContiguous) return "channels_last";
  if (p.groups != 1) return "groups";
  if (std::min({p.batch, p.in_channels, p.out_channels}) < 1) return "an empty problem";
  for (const Axis& axis : p.axis) {
    if (std::min(axis.in, axis.out()) < 1) return "an empty problem";
    if (axis.kernel > kFewMaxKernel) return "a kernel of more than 32 elements along an axis";
    if (std::max({axis.stride, axis.padding, axis.dilation}) > 4096) return "a stride or padding of more than 4096";
  }
  if (p.kernel_positions() > kFewMaxTaps) return "a kernel of more than 128 elements";
  if (double(p.batch) * double(p.in_positions()) > double(kFewPositions)) return "more than 1024 input positions";
  if (double(p.out_elements()) >= double(1 << 30) || double(p.weight_elements()) >= double(1 << 30)) {
    return "2^30 or more elements";
  }
  if (p.in_channels < 16 || p.out_channels * p.kernel_positions() < 64) return "few channels";
  return "";
}

// Milliseconds on an H200.
inline double few_input_gradient_cost_ms(const Problem& p) {
  const double memory = 4.0 * double(p.out_elements() + p.in_elements() + p.weight_elements()) / 3e9;
  return 0.002 + std::max(last_result<few_input_tile>(p).clocks / 1.7e6, memory);
}

}  // namespace fastconvt
