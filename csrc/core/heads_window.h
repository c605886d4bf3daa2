// Heads whose outputs read windows of at most two input positions an axis: kernel <= 2 * stride, no dilation, a stride
// of 2 along the last axis. They need no fold (csrc/core/heads.h). Plain C++17: no Torch, no CUDA.
//
// All outputs of a base (problem.h) read the same inputs: at the base, and one before it. So one matrix product has
// positions as rows, all outputs of a base and parity of the last axis as columns, and (window, input channel) as its
// inner dimension: its sums are the outputs. Where the first axis has a kernel, a warp marches along it, and half of
// the columns are what a plane adds to the outputs of the next base.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "problem.h"

namespace fastconvt {

inline constexpr int kHeadsWindowRows = 4;     // bases of the mid axis that a warp holds
inline constexpr int kHeadsWindowColumns = 8;  // of the product
// Bytes of a row of inputs in shared memory (csrc/cuda/heads_window_load.cuh).
inline constexpr int kHeadsWindowPlanesSlot = 1280, kHeadsWindowPixelsSlot = 1344;
inline constexpr int kHeadsWindowWarps = 8;
inline constexpr int kHeadsWindowUnit = 32;  // positions of the last axis that a warp holds
inline constexpr int64_t kHeadsWindowShared = 227 * 1024;

// A warp's tile: kHeadsWindowRows bases of the mid axis by a unit of the last axis.
struct HeadsWindow {
  bool marches;                  // along the first axis, which is like a batch otherwise
  int64_t combos;                // outputs of a base and parity
  int64_t steps;                 // of 32 bytes of input channels
  int64_t first_base, end_base;  // along the first axis
  int64_t first_row, end_row;    // bases along the mid axis
  int64_t mid_tiles;
  // Along the last axis position v makes the outputs 2 * (v - shift) - lead and the next one; v - shift >= 0.
  int64_t lead, shift;
  int64_t first_column, units;
  int64_t shared_bytes;
};

inline HeadsWindow heads_window(const Problem& problem) {
  const Axis &march = problem.axis[0], &mid = problem.axis[1], &width = problem.axis[2];
  HeadsWindow t{};
  t.marches = march.kernel > 1 || march.stride > 1 || march.padding > 0 || march.output_padding > 0;
  t.combos = problem.out_channels_per_group() * mid.stride * march.stride;
  t.steps = ceil_div(problem.in_channels_per_group() * problem.element_size(), 32);
  t.first_base = march.base(0), t.end_base = march.base(march.out() - 1) + 1;
  t.first_row = mid.base(0), t.end_row = mid.base(mid.out() - 1) + 1;
  t.mid_tiles = ceil_div(t.end_row - t.first_row, kHeadsWindowRows);
  // Output o reads o + padding = 2 q + r: with an odd padding, 2 u has r = 1 and 2 u + 1 has r = 0 and the next base.
  t.lead = width.padding % 2 == 0;
  t.shift = (width.padding - t.lead - 1) / 2;
  t.first_column = t.shift >= 0 ? t.shift / 8 * 8 : -8;  // 16 bytes of positions are aligned
  t.units = ceil_div(ceil_div(width.out() + t.lead, 2) + t.shift - t.first_column, kHeadsWindowUnit);
  const int64_t fragment = problem.dtype == DType::kFloat32 && !problem.allow_tf32 ? 512 : 256;
  const int64_t row = kHeadsWindowUnit * 2 * problem.out_channels_per_group() * problem.element_size() + 16;
  const int64_t staged = problem.layout == Layout::kChannelsLast ? mid.stride * march.stride * row : 0;
  const int slot = problem.layout == Layout::kChannelsLast ? kHeadsWindowPixelsSlot : kHeadsWindowPlanesSlot;
  t.shared_bytes = t.steps * 8 * fragment + kHeadsWindowColumns * 32 +
                   kHeadsWindowWarps * (round_up(staged, 16) + 2 * (kHeadsWindowRows + 1) * slot);
  return t;
}

// The bases of the first axis that an item has, such that `warps` warps end at about the same time; `turns` is how many
// bases, and bases before a segment, the busiest one makes.
inline int64_t heads_window_segment(const HeadsWindow& t, int64_t batch, int64_t warps, double& turns) {
  const bool partial = (t.end_row - t.first_row) % kHeadsWindowRows != 0;
  const int64_t tiles = t.units * batch * (t.mid_tiles - (t.mid_tiles > 1 && partial ? 1 : 0));
  const int64_t bases = t.end_base - t.first_base;
  int64_t best = bases;
  turns = 0;
  for (int64_t segments = 1; segments <= std::min<int64_t>(bases, 128); ++segments) {
    const int64_t length = ceil_div(bases, segments);
    const double cost = double(ceil_div(tiles * ceil_div(bases, length), warps)) * double(length + t.marches);
    if (turns == 0 || cost < turns) turns = cost, best = length;
  }
  return best;
}

inline std::string heads_window_refusal(const Problem& problem) {
  if (problem.dtype == DType::kFloat64) return "float64";
  constexpr int64_t kLimit = int64_t{1} << 24;
  for (const Axis& a : problem.axis) {
    if (a.in >= kLimit || a.out() >= kLimit || a.padding >= kLimit) return "a long axis or a large padding";
    if (a.kernel > 2 * a.stride || (a.dilation > 1 && a.kernel > 1)) return "a kernel beyond two strides, or dilation";
  }
  const Axis& width = problem.axis[2];
  if (width.stride != 2 || width.kernel < 3) return "a last axis other than of kernel 3 or 4 and stride 2";
  if (problem.batch >= kLimit || problem.in_channels >= 32768 || problem.out_channels >= 32768) {
    return "a large batch or many channels";
  }
  if (problem.in_channels_per_group() < 8) return "fewer than 8 input channels a group";
  if (problem.out_elements() == 0) return "";
  const HeadsWindow t = heads_window(problem);
  if (t.combos > (t.marches ? kHeadsWindowColumns / 2 : kHeadsWindowColumns)) {
    return "more than 8 outputs of a base and parity";
  }
  if (t.shared_bytes > kHeadsWindowShared) return "too many input channels for the shared memory of a block";
  if (width.out() * 2 < t.units * kHeadsWindowUnit) return "a short last axis";
  if (t.end_row - t.first_row < 2) return "one row";
  const double items = double(t.units) * double(t.mid_tiles) * double(problem.batch) * double(problem.groups);
  if (items * double(t.end_base - t.first_base) >= 1e9) return "too many tiles";
  return "";
}

// Milliseconds on an H200, of what is not refused.
inline double heads_window_cost_ms(const Problem& problem) {
  if (problem.out_elements() == 0) return 0;
  const HeadsWindow t = heads_window(problem);
  double turns = 0;
  heads_window_segment(t, problem.batch, std::max<int64_t>(1, 132 / problem.groups) * kHeadsWindowWarps, turns);
  turns *= double(ceil_div<int64_t>(problem.groups, 132));
  const bool halves = problem.element_size() == 2, channels_last = problem.layout == Layout::kChannelsLast;
  const double step = halves ? 2.4e-3 : problem.allow_tf32 ? 1.7e-3 : 2.7e-3;
  const int64_t row = channels_last ? problem.in_channels_per_group() * problem.element_size() / 4 : problem.axis[2].in;
  double copies = channels_last ? problem.allow_tf32 && !halves ? 1.5 : 1.3 : 1;
  if (row % 4 != 0) copies = halves ? 3.5 : 2;
  return (t.marches ? 0.018 : 0.012) + turns * double(t.steps) * step * copies;
}

}  // namespace fastconvt
