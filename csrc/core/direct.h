// The direct family: few channels a group, without matrix units. What it can make. Plain C++17: no Torch, no CUDA.
//
// A thread owns four output channels of some columns side by side, in all phases of the last axis. The
// stride of the last axis and the window, how many inputs side by side the columns of a base may reach, are
// compile-time; kernel, padding and dilation are not, and nothing of the other axes is.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>
#include <utility>

#include "problem.h"

namespace fastconvt {

inline constexpr int kDirectChannels = 4;           // output channels of a thread
inline constexpr int kDirectTaps = 64;              // of depth and height together
inline constexpr int64_t kDirectTable = 44 * 1024;  // bytes of a block's weights in shared memory

// Where a tap of the last axis acts. Columns begin at a multiple of the stride, so that column v of a vector is in
// phase (v + padding) % stride: `column` is v % stride. `place` is its input, counted from base v / stride + padding /
// stride.
struct DirectTap {
  int64_t column, place;
};
constexpr DirectTap direct_tap(int64_t stride, int64_t dilation, int64_t padding, int64_t tap) {
  const int64_t front = padding % stride, reach = tap * dilation;
  const int64_t column = (reach % stride - front + stride) % stride;
  return {column, (front + column) / stride - reach / stride};
}

// The first place of all taps.
constexpr int64_t direct_first(int64_t stride, int64_t kernel, int64_t dilation, int64_t padding) {
  int64_t first = 1;
  for (int64_t t = 0; t < kernel; ++t) {
    const int64_t place = direct_tap(stride, dilation, padding, t).place;
    if (place < first) first = place;
  }
  return first;
}

// Bit (column * width + place - first place) for each tap.
constexpr unsigned direct_mask(int width, int64_t stride, int64_t kernel, int64_t dilation, int64_t padding) {
  unsigned mask = 0;
  for (int64_t t = 0; t < kernel; ++t) {
    const DirectTap tap = direct_tap(stride, dilation, padding, t);
    mask |= 1u << (tap.column * width + tap.place - direct_first(stride, kernel, dilation, padding));
  }
  return mask;
}

// Stride of the last axis and inputs that the columns of a base reach. `mask` is that of the usual layer, whose
// products are made without a branch a tap; `only`: no other is served.
struct DirectWindow {
  int stride, width;
  unsigned mask;
  bool only;
};
inline constexpr DirectWindow kDirectWindows[] = {{2, 2, direct_mask(2, 2, 3, 1, 1), false},
                                                  {2, 3, direct_mask(3, 2, 2, 3, 1), true},
                                                  {2, 3, direct_mask(3, 2, 4, 1, 1), false},
                                                  {4, 3, direct_mask(3, 4, 7, 1, 2), false}};
inline constexpr int kNumDirectWindows = sizeof(kDirectWindows) / sizeof(kDirectWindows[0]);

// Axes of one element are moved where they cost least: threads march along the height. Memory stays as it is.
inline Problem direct_view(Problem problem) {
  if (problem.axis[1].is_trivial()) std::swap(problem.axis[0], problem.axis[1]);
  return problem;
}

// Index of the smallest window that serves the problem; -1 if none does.
inline int direct_window(const Problem& problem) {
  const Axis& axis = problem.axis[2];
  if (axis.stride > 4 || axis.kernel > 16) return -1;
  int64_t last = -(int64_t{1} << 40);
  for (int64_t t = 0; t < axis.kernel; ++t) {
    last = std::max(last, direct_tap(axis.stride, axis.dilation, axis.padding, t).place);
  }
  const int64_t width = last - direct_first(axis.stride, axis.kernel, axis.dilation, axis.padding) + 1;
  for (int i = 0; i < kNumDirectWindows; ++i) {
    const DirectWindow& window = kDirectWindows[i];
    if (window.stride != axis.stride || width > window.width) continue;
    if (!window.only) return i;
    if (direct_mask(window.width, axis.stride, axis.kernel, axis.dilation, axis.padding) == window.mask) return i;
  }
  return -1;
}

// Quads of output channels of a group.
inline int64_t direct_quads(const Problem& problem) {
  return ceil_div(problem.out_channels_per_group(), kDirectChannels);
}

// Bytes of a quad's weights in shared memory.
inline int64_t direct_quad_bytes(const Problem& problem) {
  const DirectWindow window = kDirectWindows[direct_window(problem)];
  const int64_t rows = problem.axis[0].kernel * problem.axis[1].kernel;
  return (rows * problem.in_channels_per_group() * window.stride * window.width + 1) * kDirectChannels * 4;
}

// Inputs that an output may reach along an axis.
inline int64_t direct_reach(const Axis& axis) { return (axis.kernel - 1) * axis.dilation / axis.stride + 1; }

// Whether rows of inputs stay in registers, so that each is loaded once.
inline bool direct_marches(const Problem& problem) {
  const Axis& depth = problem.axis[0];
  return problem.in_channels_per_group() <= 4 && depth.kernel == 1 && depth.stride == 1 && depth.padding == 0 &&
         depth.in == depth.out() && direct_reach(problem.axis[1]) <= 2 && !kDirectWindows[direct_window(problem)].only;
}

// "" if the family can make the call, else a reason.
inline std::string direct_refusal(const Problem& original) {
  const Problem problem = direct_view(original);
  if (problem.dtype == DType::kFloat64) return "float64";
  const int64_t in_channels = problem.in_channels_per_group(), out_channels = problem.out_channels_per_group();
  if (std::min(in_channels, out_channels) < 1) return "no channels";
  if (std::max(in_channels, out_channels) > 32) return "more than 32 channels a group";
  constexpr int64_t kLimit = int64_t{1} << 30;
  for (const Axis& axis : problem.axis) {
    if (std::max({axis.kernel, axis.stride, axis.dilation}) >= 1 << 14 || axis.padding >= kLimit / 2) {
      return "a kernel, stride or dilation of 2^14 or more, or a padding of 2^29";
    }
  }
  if (direct_window(problem) < 0) return "this kernel, stride and dilation along the last axis";
  if (problem.axis[0].kernel * problem.axis[1].kernel > kDirectTaps) return "more than 64 taps beside the last axis's";
  if (problem.axis[0].stride * problem.axis[1].stride > kDirectTaps)
    return "more than 64 phases beside the last axis's";
  if (direct_quad_bytes(problem) > kDirectTable) return "weights too large for shared memory";
  if (problem.batch >= kLimit || problem.out_channels >= kLimit / 8 || problem.in_channels >= kLimit / 8) {
    return "2^30 samples, or 2^27 channels";
  }
  // Offsets of what lies beyond the borders count, too.
  const bool channels_last = problem.layout == Layout::kChannelsLast;
  double in = channels_last ? double(problem.in_channels) : 1, out = channels_last ? double(problem.out_channels) : 1;
  double threads = channels_last ? 8 : 1;  // of a sample, at most
  for (int a = 0; a < 3; ++a) {
    const Axis& axis = problem.axis[a];
    in *= double(axis.in) + (a < 2 ? 2 * double(direct_reach(axis)) : 0);
    out *= double(axis.out()) + (a < 2 ? 2 * double(axis.stride) : 0);
    threads *= a < 2 ? double(axis.out()) / double(axis.stride) + 2 : double(axis.out()) / 4 + 256;
  }
  if (in >= double(kLimit) || out >= double(kLimit)) {
    return channels_last ? "samples of 2^30 elements" : "channels of 2^30 elements";
  }
  if (threads >= double(kLimit)) return "samples too large";
  return "";
}

// Milliseconds on an H200, roughly: memory, or products.
inline double direct_cost_ms(const Problem& original) {
  const Problem problem = direct_view(original);
  const bool channels_last = problem.layout == Layout::kChannelsLast, marches = direct_marches(problem);
  const DirectWindow window = kDirectWindows[direct_window(problem)];
  const int64_t size = problem.element_size();
  const double fill = double(direct_quads(problem) * kDirectChannels) / double(problem.out_channels_per_group());
  const double products = problem.macs() * fill;
  if (size == 2 && marches && window.stride == 2) {
    const double bytes_per_ms = !channels_last      ? (window.width == 2 ? 2.9e9 : 2.5e9)
                                : window.width == 2 ? 2.3e9
                                                    : 1.9e9;
    return 0.005 + problem.bytes() / bytes_per_ms;
  }
  const double rate = marches ? (channels_last ? 4.8e9 : 8e9) : channels_last ? (window.only ? 3.6e9 : 5e9) : 3.2e9;
  return 0.005 + std::max(problem.bytes() / (channels_last ? 2.6e9 : 3.5e9), products / rate);
}

}  // namespace fastconvt
