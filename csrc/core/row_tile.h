// The row-tile kernels' side of the plan. Plain C++17: no Torch, no CUDA.
#pragma once

#include <string>

#include "rows.h"

namespace fastconvt {

// Why the row-tile kernels cannot make the call; empty if they can. Their last axis is one of kRowShapes.
inline std::string row_tile_refusal(const Problem& p) {
  if (p.layout == Layout::kChannelsLast) return "channels_last";
  const std::string reason = rows_refusal(p);
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

}  // namespace fastconvt
