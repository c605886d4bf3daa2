// Which calls the fused kernel for the chain's gradients makes (csrc/cuda/chain_backward_fused.*). Plain C++17.
//
// Along an axis with dilation 1 and kernel <= 2 * stride, phase r has tap r, which reads input q of base q, and tap
// r + stride, if there is one, which reads input q - 1: a cell q has at most two neighbours an axis, eight in all. A
// step is the product of a phase with two of its neighbours.
#pragma once

#include <cstdint>
#include <string>

#include "problem.h"

namespace fastconvt {

constexpr int64_t kFusedChannelsIn = 4;
constexpr int64_t kFusedChannelsOut = 32;
constexpr int64_t kFusedPhases = 27;
constexpr int64_t kFusedSteps = 32;

// Steps of all phases.
inline int64_t fused_steps(const Problem& problem) {
  int64_t steps = 0;
  for (int64_t z = 0; z < problem.axis[0].stride; ++z) {
    for (int64_t y = 0; y < problem.axis[1].stride; ++y) {
      for (int64_t x = 0; x < problem.axis[2].stride; ++x) {
        const int64_t neighbours =
            problem.axis[0].num_taps(z) * problem.axis[1].num_taps(y) * problem.axis[2].num_taps(x);
        steps += (neighbours + 1) / 2;
      }
    }
  }
  return steps;
}

// Empty if the fused kernel can make the call's gradients, else why not.
inline std::string fused_chain_backward_refusal(const Problem& problem) {
  constexpr int64_t kExtent = int64_t{1} << 24;  // of an axis, so that coordinates and tiles are 32-bit
  if (problem.dtype == DType::kFloat64) return "float64";
  if (problem.batch < 1 || problem.batch >= kExtent) return "an empty or huge batch";
  if (problem.groups != 1) return "groups";
  if (problem.in_channels > kFusedChannelsIn) return "more than 4 input channels";
  if (problem.out_channels > kFusedChannelsOut) return "more than 32 output channels";
  int64_t phases = 1;
  double cells = static_cast<double>(problem.batch);
  for (const Axis& axis : problem.axis) {
    if (axis.dilation != 1 && axis.kernel != 1) return "a dilated kernel";
    if (axis.stride > kFusedPhases || axis.kernel > 2 * axis.stride) return "a kernel longer than two strides";
    if (axis.in >= kExtent || axis.padding >= kExtent || axis.out() >= kExtent) return "an axis of 2^24 or more";
    phases *= axis.stride;
    cells *= static_cast<double>(axis.in + axis.padding + 2);
  }
  if (phases > kFusedPhases) return "more than 27 phases";
  if (fused_steps(problem) > kFusedSteps) return "too many taps";
  if (cells >= 2147483648.0) return "2^31 or more cells";
  return "";
}

}  // namespace fastconvt
