// The depthwise family: one input channel a group. What it can make. Plain C++17: no Torch, no CUDA.
//
// A thread keeps the input that its outputs read, the window, in registers and marches along the height, so each input
// is loaded once for each phase of the last axis. The window's size is compile-time; kernel, stride, padding and
// dilation are not.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <iterator>
#include <string>
#include <utility>

#include "problem.h"

namespace fastconvt {

// Input planes and rows that an output may reach, and its taps along the last axis: in channels_last the columns that
// it may reach. A window serves smaller ones, and the lists go from small to large.
struct DepthwiseWindow {
  int depth, height, width;
};
inline constexpr DepthwiseWindow kDepthwiseRows[] = {{1, 1, 1}, {1, 1, 2}, {1, 1, 4}, {1, 2, 2}, {1, 3, 3}, {2, 2, 2}};
inline constexpr DepthwiseWindow kDepthwiseChannels[] = {{1, 1, 1}, {1, 2, 1}, {1, 2, 2}, {1, 3, 3}, {2, 2, 2}};
inline constexpr int kNumDepthwiseRows = sizeof(kDepthwiseRows) / sizeof(kDepthwiseRows[0]);
inline constexpr int kNumDepthwiseChannels = sizeof(kDepthwiseChannels) / sizeof(kDepthwiseChannels[0]);

inline constexpr int64_t kDepthwiseTable = 44 * 1024;  // bytes of a block's weights in shared memory

// Axes of one element are moved where they cost least: threads march along the height. Memory stays as it is.
inline Problem depthwise_view(Problem problem) {
  std::array<Axis, 3>& axis = problem.axis;
  if (axis[1].is_trivial()) std::swap(axis[0], axis[1]);
  if (axis[1].is_trivial() && problem.layout == Layout::kChannelsLast) std::swap(axis[1], axis[2]);
  return problem;
}

// How many inputs side by side an output may reach.
inline int64_t depthwise_reach(const Axis& axis) { return (axis.kernel - 1) * axis.dilation / axis.stride + 1; }

inline int64_t depthwise_taps(const Axis& axis) { return (axis.kernel + axis.tap_step() - 1) / axis.tap_step(); }

// Index of the smallest window that serves the problem, a depthwise_view(); -1 if none does.
inline int depthwise_window(const Problem& problem) {
  const bool channels_last = problem.layout == Layout::kChannelsLast;
  const int64_t width = channels_last ? depthwise_reach(problem.axis[2]) : depthwise_taps(problem.axis[2]);
  const DepthwiseWindow* const list = channels_last ? kDepthwiseChannels : kDepthwiseRows;
  for (int i = 0; i < (channels_last ? kNumDepthwiseChannels : kNumDepthwiseRows); ++i) {
    const DepthwiseWindow& w = list[i];
    if (depthwise_reach(problem.axis[0]) <= w.depth && depthwise_reach(problem.axis[1]) <= w.height && width <= w.width)
      return i;
  }
  return -1;
}

// Bytes of the weights of `channels` channels in the order of phases, for one phase of the height.
inline int64_t depthwise_table_row(const Problem& problem, int64_t channels) {
  const bool channels_last = problem.layout == Layout::kChannelsLast;
  const DepthwiseWindow w = (channels_last ? kDepthwiseChannels : kDepthwiseRows)[depthwise_window(problem)];
  const int64_t phases = channels_last ? problem.axis[2].stride : (problem.axis[2].stride + 7) / 8 * 8;
  const int64_t phase = w.depth * w.height * w.width * channels + (channels_last ? 31 : 0);
  return problem.axis[0].stride * (phases * phase * 4 + 4);
}

// "" if the family can make the call, else a reason.
inline std::string depthwise_refusal(const Problem& original) {
  const Problem problem = depthwise_view(original);
  if (problem.dtype == DType::kFloat64) return "float64";
  if (problem.in_channels != problem.groups) return "more than one input channel a group";
  const bool channels_last = problem.layout == Layout::kChannelsLast;
  if (channels_last && problem.out_channels != problem.groups)
    return "several output channels a group in channels_last";
  constexpr int64_t kLimit = int64_t{1} << 30;
  for (const Axis& axis : problem.axis) {
    if (std::max({axis.kernel, axis.stride, axis.dilation}) >= 1 << 14 || axis.padding >= kLimit / 2) {
      return "a kernel, stride or dilation of 2^14 or more, or a padding of 2^29";
    }
  }
  if (depthwise_window(problem) < 0) return "too many taps, or taps too far apart";
  const int64_t vector = !channels_last ? 1 : problem.out_channels % 8 == 0 ? 8 : problem.out_channels % 4 == 0 ? 4 : 1;
  if (depthwise_table_row(problem, vector) > kDepthwiseTable) return "a kernel too large for shared memory";
  const int64_t channels = channels_last ? problem.out_channels : 1;
  if (problem.batch >= kLimit || problem.out_channels * problem.axis[1].stride >= kLimit / 8) {
    return "2^30 samples, or 2^27 channels by phases of the height";
  }
  if (double(problem.in_positions()) * double(channels) >= double(kLimit) ||
      double(problem.out_positions()) * double(channels) >= double(kLimit)) {
    return channels_last ? "samples of 2^30 elements" : "channels of 2^30 elements";
  }
  // Threads of a sample, at most.
  const Axis &depth = problem.axis[0], &height = problem.axis[1], &width = problem.axis[2];
  const double threads = (double(width.out()) + 16 * double(width.stride) + 256) * double(channels) *
                         (double(height.out()) / double(height.stride) + 2) *
                         (double(depth.out()) / double(depth.stride) + 2);
  if (threads >= 2 * double(kLimit)) return "samples too large";
  return "";
}

// Milliseconds on an H200, roughly: memory, or instructions by output and product.
inline double depthwise_cost_ms(const Problem& original) {
  const Problem problem = depthwise_view(original);
  const bool channels_last = problem.layout == Layout::kChannelsLast;
  const DepthwiseWindow w = (channels_last ? kDepthwiseChannels : kDepthwiseRows)[depthwise_window(problem)];
  const int64_t size = problem.element_size();
  // Vectors of 16 bytes, or of four channels; else words or single channels.
  const bool vectors = channels_last ? problem.out_channels % 4 == 0
                                     : problem.axis[2].out() * size % 16 == 0 && problem.axis[2].stride > 1;
  const double start = vectors ? 0.5 : channels_last ? 1.0 : 1.2, product = channels_last ? 0.11 : vectors ? 0.05 : 0.1;
  const double instructions = double(problem.out_elements()) * (start + product * w.depth * w.height * w.width);
  return 0.005 + std::max(problem.bytes() / (size == 4 ? 3.5e9 : 3.1e9), instructions * 1e-9);
}

}  // namespace fastconvt
