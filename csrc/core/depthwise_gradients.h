// Both gradients of a transposed convolution with one input channel a group in one pass: what the kernels can make.
// Plain C++17: no Torch, no CUDA; csrc/cuda/depthwise_gradients.* computes what this accepts.
#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <string>

#include "depthwise_gradient.h"

namespace fastconvt {

// Kernels of at most `kernel` at stride `stride` along the last axis, of which a thread has `inputs` neighbouring
// inputs; `depth` planes and `height` rows that an output's gradient reaches at most; phases of the height that a
// thread has, and groups of phases of depth and height at most. `aligned`: rows are aligned to 16 bytes, and the output
// has as many columns as the input times the stride; else any rows of a single axis. Threads of a block, of which a
// multiprocessor holds `resident`.
struct DepthwiseGradientsShape {
  int kernel, stride, inputs, depth, height, phases, classes;
  bool aligned;
  int threads, resident;
};
inline constexpr DepthwiseGradientsShape kDepthwiseGradientsShapes[] = {
    {4, 2, 2, 1, 2, 2, 1, true, 256, 2},  {4, 2, 2, 2, 2, 2, 2, true, 128, 3},  {8, 4, 2, 1, 2, 2, 2, true, 128, 3},
    {16, 8, 2, 1, 2, 1, 8, true, 128, 3}, {2, 2, 4, 1, 1, 2, 1, true, 256, 2},  {3, 1, 4, 1, 3, 1, 1, true, 256, 2},
    {4, 2, 1, 1, 1, 1, 1, false, 128, 4}, {6, 3, 1, 1, 1, 1, 1, false, 128, 4}, {8, 4, 1, 1, 1, 1, 1, false, 128, 4},
    {4, 2, 2, 1, 2, 2, 1, true, 512, 1},
};
inline constexpr int kDepthwiseLargeBlocks = 9;  // the first shape with twice its threads

// Likewise in channels_last, where the last axis may also be one that stays as it is: that of a 1D problem.
inline constexpr DepthwiseGradientsShape kDepthwiseGradientsChannels[] = {
    {4, 2, 2, 1, 2, 2, 1, true, 256, 2},
    {4, 2, 2, 2, 2, 2, 2, true, 128, 3},
    {1, 1, 1, 1, 2, 4, 1, true, 256, 2},
};

// Axes of one element first, and last in channels_last: the height is what threads march along.
inline Problem depthwise_gradients_view(const Problem& original) {
  Problem problem = depthwise_gradient_view(original);
  if (problem.layout == Layout::kChannelsLast && problem.axis[1].is_trivial()) {
    std::swap(problem.axis[1], problem.axis[2]);
  }
  return problem;
}

// Index of the shape that serves the problem, a depthwise_gradients_view(), if its tensors are `aligned`; -1 if none.
inline int depthwise_gradients_shape(const Problem& problem, bool aligned) {
  const bool channels_last = problem.layout == Layout::kChannelsLast;
  const Axis &depth = problem.axis[0], &height = problem.axis[1], &width = problem.axis[2];
  const int64_t vector = 16 / problem.element_size();
  aligned = aligned && (channels_last ? problem.in_channels : width.in) % vector == 0;
  aligned = aligned && width.out() == width.in * width.stride;
  const DepthwiseGradientsShape* const list = channels_last ? kDepthwiseGradientsChannels : kDepthwiseGradientsShapes;
  const size_t count = channels_last ? std::size(kDepthwiseGradientsChannels) : std::size(kDepthwiseGradientsShapes);
  for (int i = 0; i < static_cast<int>(count); ++i) {
    const DepthwiseGradientsShape& s = list[i];
    if (width.stride != s.stride || width.kernel > s.kernel) continue;
    if (depthwise_reach(depth) > s.depth || depthwise_reach(height) > s.height) continue;
    if (depth.stride * ceil_div<int64_t>(height.stride, s.phases) > s.classes) continue;
    if (s.aligned && !(aligned && width.padding == (s.kernel - s.stride) / 2)) continue;
    if (!s.aligned && !(depth.is_trivial() && height.is_trivial())) continue;
    return i;
  }
  return -1;
}

inline std::string depthwise_gradients_refusal(const Problem& original) {
  const Problem problem = depthwise_gradients_view(original);
  // The kernels that take over where tensors are not aligned.
  std::string refusal = depthwise_input_gradient_refusal(original);
  if (refusal.empty()) refusal = depthwise_weight_gradient_refusal(original);
  if (!refusal.empty()) return refusal;
  if (problem.out_channels != problem.groups) return "several output channels a group";
  if (problem.axis[2].dilation != 1) return "a dilation along the last axis";
  for (const Axis& axis : problem.axis) {
    if (axis.output_padding > axis.padding) return "an output padding that is more than the padding";
  }
  if (depthwise_gradients_shape(problem, true) < 0)
    return "a kernel, stride or padding that is not listed, or rows of no multiple of 16 bytes";
  return "";
}

// Milliseconds on an H200, roughly: memory, or instructions by output and product.
inline double depthwise_gradients_cost_ms(const Problem& problem) {
  const double bytes = problem.bytes() + double(problem.in_elements()) * double(problem.element_size());
  const double instructions = double(problem.out_elements()) * 5e-10 + problem.macs() * 1.6e-10;
  return 0.012 + std::max(bytes / 3.7e9, instructions);
}

}  // namespace fastconvt
