// The taps of one phase of an axis, for families that treat a transposed convolution as one product a phase. Plain
// C++17: no Torch, no CUDA.
#pragma once

#include <cstdint>

#include "problem.h"

namespace fastconvt {

inline constexpr int kMaxKernelTaps = 2048;  // what tables of taps hold
inline constexpr int kMaxAxisStride = 32;    // what tables of phases hold

// Outputs f, f + stride, ... have the taps first_tap, first_tap + tap_step, ...; tap number j of the output of a cell
// reads the input at cell + shift - j * dilation / gcd(stride, dilation).
struct AxisPhase {
  int first_tap, num_taps, shift;
};

inline AxisPhase axis_phase(const Axis& axis, int64_t f) {
  const int64_t phase = axis.phase(f), first = axis.first_tap(phase), taps = axis.num_taps(phase);
  if (taps <= 0) return {static_cast<int>(axis.kernel), 0, 0};
  return {static_cast<int>(first), static_cast<int>(taps), static_cast<int>(axis.base(f) + axis.offset(phase, first))};
}

inline bool has_no_elements(const Problem& problem) {
  bool empty = problem.batch <= 0 || problem.in_channels <= 0 || problem.out_channels <= 0;
  for (const Axis& axis : problem.axis) empty = empty || axis.in <= 0 || axis.out() <= 0;
  return empty;
}

}  // namespace fastconvt
