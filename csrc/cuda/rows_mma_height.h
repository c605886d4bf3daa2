// What the row kernels on matrix units see of the height.
#pragma once

#include <cstdint>

#include "../core/problem.h"

namespace fastconvt::cuda {

// Phase r of the height: its first tap, which reads `back` rows before the base; none if first_tap is negative.
struct RowsMmaPhase {
  int16_t first_tap, back;
};

// Sets the sizes and the phases of the height.
template <class Params>
void set_height(const Axis& height, Params& p) {
  p.in_height = static_cast<int>(height.in);
  p.out_height = static_cast<int>(height.out());
  p.height_kernel = static_cast<int>(height.kernel);
  p.height_stride = static_cast<int>(height.stride);
  p.height_padding = static_cast<int>(height.padding);
  p.tap_step = static_cast<int>(height.tap_step());
  p.back_step = static_cast<int>(p.tap_step * height.dilation / height.stride);
  for (int64_t r = 0; r < height.stride; ++r) {
    const int64_t tap = height.first_tap(r);
    p.phase[r].first_tap = static_cast<int16_t>(tap < height.kernel ? tap : -1);
    p.phase[r].back = static_cast<int16_t>(tap < height.kernel ? -height.offset(r, tap) : 0);
  }
}

}  // namespace fastconvt::cuda
