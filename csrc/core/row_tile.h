// The row-tile kernels' side of the plan. Plain C++17: no Torch, no CUDA.
#pragma once

#include <algorithm>
#include <string>

#include "rows.h"

namespace fastconvt {

// Why the row-tile kernels cannot make the call; empty if they can. Their last axis is one of kRowShapes.
inline std::string row_tile_refusal(const Problem& p) {
  if (p.layout == Layout::kChannelsLast) return "channels_last";
  const std::string reason = row_shape_refusal(p);
  if (!reason.empty()) return reason;
  constexpr double kMaxElements = 2147483648.0;
  const Axis& height = p.axis[1];
  const double reach = double(height.kernel - 1) * double(height.dilation) * double(p.axis[2].in);
  if (double(p.in_channels_per_group()) * double(p.in_positions()) + reach >= kMaxElements ||
      double(p.out_positions()) >= kMaxElements) {
    return "2^31 inputs of a group, or outputs of a channel";
  }
  if (double(p.weight_elements()) >= kMaxElements) return "a weight of 2^31 elements";
  if (p.in_channels_per_group() * height.kernel >= 1 << 20) return "2^20 pairs of an input channel and a kernel row";
  if (double(p.groups) * double((p.out_channels_per_group() + 15) / 16) >= 65536.0) return "65536 groups or more";
  return "";
}

// Milliseconds on an H200, within 25 % on nine layers: a start, then rounds of blocks, each its multiply-adds and more
// where constant rows are stored between data rows.
inline double row_tile_cost_ms(const Problem& p) {
  constexpr double kBlocks = 3 * 132;  // at once
  const Axis &height = p.axis[1], &width = p.axis[2];
  const int64_t step = std::gcd(height.stride, height.dilation);
  const int64_t quads = (p.out_channels_per_group() + 3) / 4;
  const int64_t groups = std::max<int64_t>(1, std::min(p.groups, 4 / std::min<int64_t>(4, quads)));  // of a block
  const double channel_blocks = double((p.groups + groups - 1) / groups) * double((quads + 3) / 4);
  const double blocks =
      double(p.batch) * channel_blocks * double((height.out() + step - 1) / step) * double(row_segments(width));
  const double rows = double(p.in_channels_per_group()) * double(height.kernel) / double(height.tap_step());
  const double block = 5 + 0.045 * rows * double(width.kernel) + (step > 1 ? 2.5 : 0);
  return 1e-3 * (14 + std::max(1.0, blocks / kBlocks) * block);
}

}  // namespace fastconvt
