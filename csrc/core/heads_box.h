// Heads in one turn: small layers with few output channels. Plain C++17: no Torch, no CUDA.
//
// Scatter and fold (heads.h), but a block makes one box of outputs and is done: the products of all positions that the
// box reads lie in shared memory at once, so there is one barrier in place of two a step of a march. What boxes read in
// common is multiplied by each of them. In 1D and 2D the batch is the box's first axis.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>

#include "problem.h"

namespace fastconvt {

inline constexpr int kHeadsBoxPairs = 48;  // of an output channel and a tap
inline constexpr int kHeadsBoxStride = 4;
inline constexpr int kHeadsBoxRows = 4;  // of outputs, that a warp folds at a time
inline constexpr int64_t kHeadsBoxShared = 226 * 1024;
// Of a tile, along the first two axes.
inline constexpr std::array<int64_t, 16> kHeadsBoxPlaces = {1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24, 32, 48, 64};

// How inputs lie, as a lane reads them: four positions of a row are an aligned vector; 16 bytes of channels of a
// position are; neither.
enum class HeadsBoxMode : int { kPlanes, kPixels, kElements };

// Warps of a block: what registers and shared memory allow. Steps of the inner dimension that are on their way, and
// bytes of a warp's inputs for one of them.
constexpr int heads_box_warps(HeadsBoxMode mode, int64_t columns) {
  return mode != HeadsBoxMode::kPixels && columns == 32 ? 16 : 12;
}
constexpr int heads_box_ahead(HeadsBoxMode mode) {
  return mode == HeadsBoxMode::kPixels ? 4 : mode == HeadsBoxMode::kPlanes ? 3 : 2;
}
constexpr int heads_box_slot(HeadsBoxMode mode) { return mode == HeadsBoxMode::kPixels ? 1024 : 1152; }

// A tile of an axis has `places` times its stride outputs, from a multiple of that on; place u reads inputs from
// u + low to u + high; `held` is the most that a tile reads.
struct HeadsBoxSpan {
  int64_t places, tiles, low, high, held;
};

struct HeadsBox {
  HeadsBoxMode mode;
  std::array<HeadsBoxSpan, 3> axis;
  int64_t columns;       // of the product: 32 or 48 pairs
  int64_t steps;         // of 32 bytes of input channels
  int64_t pitch;         // floats between the products of neighbouring pairs
  int64_t row_elements;  // outputs of a row that lie side by side, a multiple of 64
  int64_t blocks;
  int64_t weights, slots, tables, shared_bytes;  // bytes; the products come first
};

// The batch as the first axis where that has one element.
inline Problem heads_box_view(Problem problem) {
  if (problem.axis[0].is_trivial()) problem.axis[0].in = problem.batch, problem.batch = 1;
  return problem;
}

inline HeadsBoxSpan heads_box_span(const Axis& axis) {
  HeadsBoxSpan s{};
  s.low = INT64_MAX, s.high = INT64_MIN;
  for (int64_t t = 0; t < axis.kernel; ++t) {
    // The only output of a place that the tap reaches.
    const int64_t shift = t * axis.dilation - axis.padding;
    const int64_t output = (shift % axis.stride + axis.stride) % axis.stride, offset = (output - shift) / axis.stride;
    s.low = std::min(s.low, offset), s.high = std::max(s.high, offset);
  }
  return s;
}

inline void heads_box_cut(const Axis& axis, int64_t places, HeadsBoxSpan& s) {
  const int64_t all = ceil_div(axis.out(), axis.stride);
  s.places = std::min(places, all);
  s.tiles = ceil_div(all, s.places);
  s.held = std::max<int64_t>(1, std::min(axis.in, s.places + s.high - s.low));
}

// Sizes and the places of shared memory, from the spans.
inline void heads_box_finish(const Problem& view, HeadsBox& box) {
  const bool pixels = view.layout == Layout::kChannelsLast;
  const int64_t positions = box.axis[0].held * box.axis[1].held * box.axis[2].held;
  box.pitch = round_up<int64_t>(positions, 32) + 4;  // keeps apart the banks that a warp writes at once
  box.row_elements = round_up<int64_t>(box.axis[2].places * view.axis[2].stride * (pixels ? view.out_channels : 1), 64);
  const int64_t halves = view.dtype == DType::kFloat32 && !view.allow_tf32 ? 2 : 1;
  // And a vector of zeros.
  box.weights = round_up<int64_t>(view.out_channels * view.kernel_positions() * box.pitch * 4 + 16, 128);
  box.slots = box.weights + box.steps * box.columns * 32 * halves;
  box.tables =
      box.slots + heads_box_warps(box.mode, box.columns) * heads_box_ahead(box.mode) * heads_box_slot(box.mode);
  const int64_t rows = box.axis[0].places * view.axis[0].stride * box.axis[1].places * view.axis[1].stride;
  box.shared_bytes =
      box.tables + box.row_elements * 8 + round_up<int64_t>(rows, kHeadsBoxRows) * 20 + view.out_channels * 4;
  box.blocks = view.batch * box.axis[0].tiles * box.axis[1].tiles * box.axis[2].tiles;
}

// Nanoseconds on an H200, without the launch: all blocks of a turn do the same.
inline double heads_box_turns(const Problem& view, const HeadsBox& box) {
  const double positions = double(box.axis[0].held * box.axis[1].held * box.axis[2].held);
  const bool pixels = view.layout == Layout::kChannelsLast;
  const double outputs = double(box.axis[0].places * view.axis[0].stride * box.axis[1].places * view.axis[1].stride *
                                box.row_elements * (pixels ? 1 : view.out_channels));
  // By mode.
  constexpr double kFloat32[] = {1.25, 1.35, 1.7}, kTf32[] = {1.12, 1.15, 1.48}, kHalves[] = {1.6, 1.0, 2.3};
  const int mode = static_cast<int>(box.mode);
  const double step = view.dtype != DType::kFloat32 ? kHalves[mode] : view.allow_tf32 ? kTf32[mode] : kFloat32[mode];
  const double turn = 7000 + positions * double(box.steps) * step + outputs * (pixels ? 0.24 : 0.18);
  return double(ceil_div<int64_t>(box.blocks, 132)) * turn;
}

// The box of the least time; no blocks if there is none.
inline HeadsBox heads_box(const Problem& problem, bool aligned = true) {
  const Problem view = heads_box_view(problem);
  const Axis& width = view.axis[2];
  const int64_t size = view.element_size();
  HeadsBox box{};
  box.mode = HeadsBoxMode::kElements;
  if (aligned && view.layout == Layout::kChannelsLast && view.in_channels * size % 16 == 0) {
    box.mode = HeadsBoxMode::kPixels;
  } else if (aligned && view.layout == Layout::kContiguous && width.in % 4 == 0) {
    box.mode = HeadsBoxMode::kPlanes;
  }
  box.columns = view.out_channels * view.kernel_positions() > 32 ? kHeadsBoxPairs : 32;
  box.steps = ceil_div(view.in_channels * size, int64_t{32});
  if (box.mode == HeadsBoxMode::kPixels) box.steps = round_up<int64_t>(box.steps, 2);
  for (int a = 0; a < 3; ++a) box.axis[a] = heads_box_span(view.axis[a]);
  HeadsBox best{};
  double least = 0;
  // Rows are whole if shared memory takes one.
  for (const int64_t columns : {width.out(), int64_t{128}, int64_t{32}}) {
    heads_box_cut(width, columns, box.axis[2]);
    // Vectors of positions need whole rows.
    const bool whole = box.axis[2].tiles == 1 && box.axis[2].low <= 0 && box.axis[2].held == width.in;
    if (!whole && box.mode == HeadsBoxMode::kPlanes) box.mode = HeadsBoxMode::kElements;
    for (const int64_t rows : kHeadsBoxPlaces) {
      heads_box_cut(view.axis[1], rows, box.axis[1]);
      if (box.axis[1].places < rows && rows > 1) break;
      bool fits = false;
      for (const int64_t planes : kHeadsBoxPlaces) {
        heads_box_cut(view.axis[0], planes, box.axis[0]);
        if (box.axis[0].places < planes && planes > 1) break;
        heads_box_finish(view, box);
        if (box.shared_bytes > kHeadsBoxShared) break;
        fits = true;
        const double time = heads_box_turns(view, box);
        if (best.blocks == 0 || time < least) best = box, least = time;
      }
      if (!fits) break;
    }
    if (best.blocks > 0) break;
  }
  return best;
}

// "" if it can make the call, else a reason.
inline std::string heads_box_refusal(const Problem& problem) {
  if (problem.dtype == DType::kFloat64) return "float64";
  if (problem.groups > 1) return "groups";
  constexpr int64_t kLimit = int64_t{1} << 20;
  for (const Axis& a : problem.axis) {
    if (a.in >= kLimit || a.out() >= kLimit || a.padding >= kLimit || a.stride > kHeadsBoxStride || a.kernel > 64 ||
        a.dilation > 1024) {
      return "a long axis, or a large kernel, stride, padding or dilation";
    }
    if ((a.kernel - 1) / a.tap_step() > 1) return "more than two taps of an output along an axis";
  }
  if (problem.axis[2].stride != 2) return "a stride other than 2 along the last axis";
  if (problem.batch >= kLimit || problem.in_channels >= 4096) return "a large batch or many channels";
  if (problem.out_channels * problem.kernel_positions() > kHeadsBoxPairs) {
    return "more than 48 pairs of an output channel and a tap";
  }
  if (problem.in_channels < 8) return "fewer than 8 input channels";
  // The matrix unit truncates its sums, of 8 channels each time: longer ones would not obey the rule of accuracy.
  if (problem.dtype == DType::kFloat32 && !problem.allow_tf32 && problem.in_channels > 96) {
    return "more than 96 input channels in float32";
  }
  if (double(problem.in_elements()) / double(problem.batch) >= 1e9) return "samples of 10^9 elements";
  if (problem.out_elements() == 0) return "";
  const HeadsBox box = heads_box(problem);
  if (box.blocks == 0) return "boxes too large for the shared memory of a block";
  // Offsets in a box fit 31 bits.
  const double samples = problem.axis[0].is_trivial() ? double(std::min(problem.batch, kHeadsBoxPlaces.back())) : 1;
  if (double(problem.in_elements() + problem.out_elements()) / double(problem.batch) * samples >= 2e9) {
    return "large samples";
  }
  if (box.blocks >= int64_t{1} << 31) return "too many boxes";
  return "";
}

// Milliseconds on an H200, of what is not refused.
inline double heads_box_cost_ms(const Problem& problem) {
  if (problem.out_elements() == 0) return 0;
  const Problem view = heads_box_view(problem);
  return 0.0043 + std::max(1e-6 * heads_box_turns(view, heads_box(problem)), problem.bytes() / 2.5e9);
}

}  // namespace fastconvt
