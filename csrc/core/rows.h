// The row kernels' side of the plan: which problems they make, and what that costs. Plain C++17: no Torch, no CUDA.
#pragma once

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>

#include "problem.h"

namespace fastconvt {

// The last axis of a problem as the kernels are compiled for it.
struct RowShape {
  int kernel, stride, dilation;
};

// The closed list that plan and launcher share.
inline constexpr RowShape kRowShapes[] = {{5, 3, 1}, {3, 2, 2}, {3, 2, 3}, {4, 2, 1}, {5, 3, 2}, {3, 2, 1}, {2, 2, 1}};
constexpr int kNumRowShapes = sizeof(kRowShapes) / sizeof(kRowShapes[0]);

// Index of the problem's last axis in the list, or -1.
inline int row_shape_index(const Problem& p) {
  const Axis& axis = p.axis[2];
  for (int i = 0; i < kNumRowShapes; ++i) {
    const RowShape& shape = kRowShapes[i];
    if (axis.kernel == shape.kernel && axis.stride == shape.stride && axis.dilation == shape.dilation) return i;
  }
  return -1;
}

// Columns (bases of the last axis) of one block of the kernel, and the outputs beyond them that it can make besides.
constexpr int kRowColumns = 256;
constexpr int kRowTailOutputs = 8;

constexpr int64_t row_tail_columns(int64_t stride) { return kRowTailOutputs / stride; }

// Blocks' worth of columns that a row is cut in.
inline int64_t row_segments(const Axis& axis) {
  const int64_t bases = (axis.out() - 1 + axis.padding) / axis.stride - axis.padding / axis.stride + 1;
  const int64_t beyond = bases - row_tail_columns(axis.stride);
  return std::max<int64_t>(1, (beyond + kRowColumns - 1) / kRowColumns);
}

// What both families of row kernels refuse, in any layout; empty if nothing.
inline std::string row_shape_refusal(const Problem& p) {
  if (p.dtype != DType::kFloat32) return "a dtype other than float32";
  const Axis &depth = p.axis[0], &height = p.axis[1], &width = p.axis[2];
  if (depth.in != 1 || depth.kernel != 1 || depth.out() != 1 || depth.padding != 0) return "three spatial axes";
  if (row_shape_index(p) < 0) {
    return "a kernel of " + std::to_string(width.kernel) + " with stride " + std::to_string(width.stride) +
           " and dilation " + std::to_string(width.dilation) + " along the last axis";
  }
  constexpr int64_t kMaxAttribute = int64_t{1} << 28, kMaxSize = int64_t{1} << 30;
  const int64_t extent = (height.kernel - 1) * height.dilation;
  if (height.stride >= 1 << 15) return "a stride of 2^15 or more along the height";
  if (std::max({height.kernel, height.stride, height.padding, height.dilation, extent, width.padding}) >=
      kMaxAttribute) {
    return "a kernel, stride, padding or dilation of 2^28 or more";
  }
  const int64_t size = std::max({height.in, height.out(), width.in, width.out(), p.batch});
  if (std::max({size, p.in_channels, p.out_channels, p.in_channels * height.kernel}) >= kMaxSize) {
    return "a size or channels of 2^30 or more";
  }
  if (double(height.stride) * double(width.out()) >= double(kMaxSize)) return "rows of 2^30 constants";
  const double blocks = double(p.batch) * double(p.groups) * double((p.out_channels_per_group() + 3) / 4) *
                        double(height.out()) * double(row_segments(width));
  return blocks >= double(kMaxSize) ? "more than 2^30 rows of outputs" : "";
}

// Why the row kernels for channels_last cannot make the call; empty if they can.
inline std::string rows_refusal(const Problem& p) {
  return p.layout == Layout::kChannelsLast ? row_shape_refusal(p) : "a contiguous layout";
}

// Milliseconds of the row kernels for channels_last on an H200, within 16 % on seven layers: instructions and bytes,
// which overlap. A warp of a block issues some 1,500 instructions and, for each pair of a tap of the height and an
// input channel, multiply-adds and loads.
inline double rows_cost_ms(const Problem& p) {
  const Axis &height = p.axis[1], &width = p.axis[2];
  const int64_t channels = p.in_channels_per_group(), quads = (p.out_channels_per_group() + 3) / 4;
  const int64_t quad_blocks = (quads + 3) / 4;
  const int64_t groups = std::max<int64_t>(1, std::min(4 / std::min<int64_t>(4, quads), 8 / channels));  // of a block
  const double data_rows = std::ceil(double(height.out()) / double(std::gcd(height.stride, height.dilation)));
  const double blocks = double(p.batch) * double((p.groups + groups - 1) / groups * quad_blocks) *
                        double(row_segments(width)) * data_rows;
  const double pairs = double(channels) * double(height.kernel) / double(height.tap_step());
  const int64_t entries = (width.kernel - 1) * width.dilation / width.stride + 1;
  const double pair = 32.0 * double(width.kernel) + 8.0 * double(std::min(entries, width.kernel)) + 10.0;
  constexpr double kWarps = 4, kIssued = 7.3e11, kBandwidth = 3.3e12;  // a second
  const double issue = 1e3 * blocks * kWarps * (1500 + pairs * pair) / kIssued;
  const double memory = 1e3 * p.bytes() / kBandwidth;
  return 0.012 + std::max(issue, memory) + 0.15 * std::min(issue, memory);
}

}  // namespace fastconvt
