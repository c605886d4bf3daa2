// The weight's gradient in float32 and TF32 as one matrix product that takes contiguous tensors as they lie: nothing is
// packed, and no sums are split, so there is one launch and no workspace. For few positions. Plain C++17: no Torch, no
// CUDA; csrc/cuda/few_weight_gradient.* computes what this plans.
#pragma once

#include <algorithm>
#include <string>

#include "problem.h"

namespace fastconvt {

constexpr int kFewWeightRows = 128, kFewWeightColumns = 128;  // of a block
constexpr int kFewWeightPositions = 32;                       // of a stage
constexpr int kFewWeightBiasChannels = 8;                     // of a block

inline int64_t few_weight_blocks(const Problem& p) {
  return p.groups * ceil_div(p.in_channels_per_group(), int64_t{kFewWeightRows}) *
         ceil_div(p.out_channels_per_group() * p.kernel_positions(), int64_t{kFewWeightColumns});
}

inline std::string few_weight_gradient_refusal(const Problem& p) {
  constexpr int64_t kLimit = (int64_t{1} << 31) - 1;
  if (p.dtype != DType::kFloat32) return "other than float32 and TF32";
  if (p.layout != Layout::kContiguous || p.weight_layout != Layout::kContiguous) return "channels_last";
  if (std::min({p.batch, p.in_channels, p.out_channels}) < 1) return "an empty problem";
  for (const Axis& a : p.axis) {
    if (std::min(a.in, a.out()) < 1) return "an empty problem";
    if (std::max({a.kernel, a.stride, a.padding, a.dilation}) > (1 << 15) || a.kernel * a.dilation > (1 << 20)) {
      return "a kernel, stride, padding or dilation of more than 32768";
    }
  }
  if (p.in_channels_per_group() < 16 || p.out_channels_per_group() * p.kernel_positions() < 32) return "few channels";
  if (p.batch * p.in_positions() > 2048) return "more than 2048 positions";
  if (std::max({p.in_elements(), p.out_elements(), p.weight_elements()}) >= kLimit) return "a tensor of 2^31 elements";
  return "";
}

// Milliseconds on an H200.
inline double few_weight_gradient_cost_ms(const Problem& p) {
  const double chunks = double(ceil_div(p.batch * p.in_positions(), int64_t{kFewWeightPositions}));
  const double rounds = double(ceil_div(few_weight_blocks(p), int64_t{132}));
  const double bias = p.has_bias ? double(p.batch * p.out_positions()) * 2e-6 : 0;
  return 0.0105 + rounds * chunks * (p.allow_tf32 ? 0.0021 : 0.0032) + std::max(0.0, bias - 0.004) +
         double(p.weight_elements() * 4) / 8e9;
}

}  // namespace fastconvt
