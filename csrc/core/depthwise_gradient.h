// The gradients of a transposed convolution with one input channel a group: what the kernels can make. Plain C++17: no
// Torch, no CUDA; csrc/cuda/depthwise_{input,weight}_gradient.* compute what this accepts.
#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <string>
#include <utility>

#include "depthwise.h"

namespace fastconvt {

inline constexpr int kDepthwiseGradientThreads = 256;          // of a block, at most
inline constexpr int64_t kDepthwiseGradientTable = 30 * 1024;  // bytes of a block's weights in shared memory
inline constexpr int kDepthwiseGradientColumns = 4;            // of a thread, in contiguous tensors
inline constexpr int kDepthwiseGradientReach = 4;              // rows, in channels_last: the input's gradient

// Rows of a kernel that float32 adds one by one: more would lose accuracy on data that are all alike.
inline constexpr int64_t kDepthwiseGradientRows = 40;

// Of the weight's gradient: the input planes and rows that an output reaches, and its taps along the last axis.
inline constexpr DepthwiseWindow kDepthwiseGradientWindows[] = {{1, 1, 2}, {1, 1, 4}, {1, 2, 2}, {1, 3, 3}, {2, 2, 2}};

// Axes of one element first; the height is not one of them, unless all but the last are.
inline Problem depthwise_gradient_view(Problem problem) {
  if (problem.axis[1].is_trivial()) std::swap(problem.axis[0], problem.axis[1]);
  return problem;
}

// Index of the smallest window that serves the problem, a depthwise_gradient_view(); -1 if none does.
inline int depthwise_gradient_window(const Problem& problem) {
  for (int i = 0; i < static_cast<int>(std::size(kDepthwiseGradientWindows)); ++i) {
    const DepthwiseWindow& w = kDepthwiseGradientWindows[i];
    if (depthwise_reach(problem.axis[0]) <= w.depth && depthwise_reach(problem.axis[1]) <= w.height &&
        depthwise_taps(problem.axis[2]) <= w.width) {
      return i;
    }
  }
  return -1;
}

// What both kernels refuse.
inline std::string depthwise_gradient_refusal(const Problem& problem) {
  constexpr int64_t kLimit = int64_t{1} << 30;
  if (problem.dtype == DType::kFloat64) return "float64";
  if (problem.in_channels != problem.groups) return "more than one input channel a group";
  for (const Axis& axis : problem.axis) {
    if (std::max({axis.kernel, axis.stride, axis.dilation}) >= 1 << 14 || axis.padding >= kLimit / 2) {
      return "a kernel, stride or dilation of 2^14 or more, or a padding of 2^29";
    }
  }
  if (problem.axis[2].stride > 128) return "a stride of more than 128 along the last axis";
  if (std::max(problem.batch, problem.out_channels) >= kLimit) return "2^30 samples or channels";
  const bool channels_last = problem.layout == Layout::kChannelsLast;
  const double channels = channels_last ? double(problem.out_channels) : 1;
  if (std::max(double(problem.in_positions()), double(problem.out_positions())) * channels >= double(kLimit)) {
    return channels_last ? "samples of 2^30 elements" : "channels of 2^30 elements";
  }
  // Threads of a channel, or rows of all, at most.
  const double rows = double(problem.batch) * double(problem.axis[0].out() + problem.axis[0].stride) *
                      double(problem.axis[1].out() + problem.axis[1].stride);
  if (rows * double(problem.axis[2].out() / 16 + 1) >= double(kLimit)) return "2^34 positions, or 2^30 rows";
  return "";
}

// Whether the kernels for a closed list of the last axis' shapes make the input's gradient, unless rows are odd.
inline bool depthwise_input_window(const Problem& problem) {
  const Axis &depth = problem.axis[0], &height = problem.axis[1], &width = problem.axis[2];
  const bool listed = width.stride == 1 ? width.kernel <= 3
                                        : (width.stride <= 4 || width.stride == 8) && width.kernel <= 2 * width.stride;
  if (!listed || width.dilation != 1 || problem.out_channels != problem.groups || height.stride > 128) return false;
  if (problem.dtype == DType::kFloat32 && depth.kernel * height.kernel > kDepthwiseGradientRows) return false;
  return depthwise_reach(height) <= (width.stride == 1 ? 3 : 2);
}

inline std::string depthwise_input_gradient_refusal(const Problem& original) {
  const Problem problem = depthwise_gradient_view(original);
  const std::string refusal = depthwise_gradient_refusal(problem);
  if (!refusal.empty()) return refusal;
  const Axis& width = problem.axis[2];
  const int64_t multiplier = problem.out_channels_per_group();
  const double rows = double(multiplier) * double(problem.axis[0].kernel) * double(problem.axis[1].kernel) * 4;
  if (problem.layout == Layout::kChannelsLast) {
    if (depthwise_reach(problem.axis[1]) > kDepthwiseGradientReach) return "too many taps, or taps too far apart";
    if (rows * double(width.kernel) * 4 > double(kDepthwiseGradientTable))
      return "a kernel too large for shared memory";
    if (problem.axis[1].stride > 256) return "a stride of more than 256 along the height";
    if (problem.dtype == DType::kFloat32 && !depthwise_input_window(problem) &&
        rows * double(ceil_div<int64_t>(width.kernel, 4)) > 4 * double(kDepthwiseGradientRows)) {
      return "a kernel of too many taps for sums in float32";
    }
    return "";
  }
  if (depthwise_taps(width) > 4) return "too many taps along the last axis";
  if ((width.kernel - 1) * width.dilation + width.stride > 512) return "taps too far apart along the last axis";
  if (rows * double(width.stride) * 4 > double(kDepthwiseGradientTable)) return "a kernel too large for shared memory";
  return "";
}

inline std::string depthwise_weight_gradient_refusal(const Problem& original) {
  const Problem problem = depthwise_gradient_view(original);
  const std::string refusal = depthwise_gradient_refusal(problem);
  if (!refusal.empty()) return refusal;
  if (depthwise_gradient_window(problem) < 0) return "too many taps, or taps too far apart";
  if (double(problem.weight_elements()) >= double(1 << 26)) return "a weight of 2^26 or more elements";
  return "";
}

// Milliseconds on an H200, roughly: memory, or instructions by output and product.
inline double depthwise_input_gradient_cost_ms(const Problem& original) {
  const Problem problem = depthwise_gradient_view(original);
  const bool window = depthwise_input_window(problem);
  const double instructions = double(problem.out_elements()) * (window ? 1.2e-9 : 2e-9) + problem.macs() * 1.5e-10;
  return 0.008 + std::max(problem.bytes() / 3.4e9, instructions);
}

inline double depthwise_weight_gradient_cost_ms(const Problem& original) {
  const Problem problem = depthwise_gradient_view(original);
  const double instructions = double(problem.out_elements()) * 1.3e-9 + problem.macs() * 1e-10;
  return 0.014 + std::max(problem.bytes() / 3.2e9, instructions);
}

}  // namespace fastconvt
