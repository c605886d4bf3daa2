// The row family on tensor cores for channels-last tensors: what it can make, and the tile of a block. Plain C++17: no
// Torch, no CUDA.
//
// A block makes whole output rows of the last axis (or a segment of one) for 16 output channels of a group, all phases
// of the last axis at once: an MMA's rows are output channels, its columns bases, and a tap of the last axis is one MMA
// for 8 input channels and 8 bases. The last axis' kernel, stride and dilation are compile-time; everything else is
// not.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "problem.h"

namespace fastconvt {

// Of the last axis.
struct RowsMmaShape {
  int kernel, stride, dilation;
};
inline constexpr RowsMmaShape kRowsMmaShapes[] = {{5, 3, 1}, {3, 2, 2}, {3, 2, 3}, {4, 2, 1},
                                                  {5, 3, 2}, {3, 2, 1}, {2, 2, 1}};
inline constexpr int kNumRowsMmaShapes = sizeof(kRowsMmaShapes) / sizeof(kRowsMmaShapes[0]);

inline constexpr int kRowsMmaChannels = 16;  // output channels of a block
inline constexpr int kRowsMmaInChannels = 32;
inline constexpr int kRowsMmaStep = 8;      // input channels of an MMA
inline constexpr int kRowsMmaColumns = 32;  // bases that a warp makes at a time: a strip
inline constexpr int kRowsMmaStrips = 8;    // of a block
// Strips of a warp. In 16 bits, stores take half the time, so what a warp does once a row counts more.
constexpr int rows_mma_strips(int64_t element_size) { return element_size == 2 ? 2 : 1; }
inline constexpr int kRowsMmaMaxStride = 16;  // of the height
inline constexpr int64_t kRowsMmaShared = 200 * 1024;
// Everything that sizes a block. Staged inputs are 32-bit words: a TF32 value, or two 16-bit channels.
struct RowsMmaTile {
  int merged;          // groups that are made as one, whose weights between different groups are zero
  int steps;           // of kRowsMmaStep input channels
  int channel_blocks;  // of kRowsMmaChannels output channels, in a group
  int warps;
  int segments;     // of a row
  int columns;      // bases of a segment
  int64_t base;     // of the last axis, the first one of segment 0: a multiple of 4
  int halo;         // words before the segment's first base, a multiple of 4
  bool with_halo;   // some input stands there
  int span;         // input rows that one base of the height reads: its own and those before it
  int row_pitch;    // words between input channels, or pairs of them; 8 modulo 32 keeps banks apart
  int row_words;    // of a staged input row
  int tap_weights;  // lanes' shares of the weights of a tap of the height
  int row_quads;    // of four inputs that a thread moves for an input row
  // Shared memory in bytes: where staged inputs, of span + 1 rows, outputs and inputs on their way begin, and all of
  // it. The bias and the weights come first.
  int64_t inputs, outputs, cells, shared_bytes;
};

inline RowsMmaTile rows_mma_tile(const Problem& problem, int64_t merged) {
  const Axis &height = problem.axis[1], &width = problem.axis[2];
  const int64_t words = problem.element_size() == 4 ? kRowsMmaStep : kRowsMmaStep / 2;  // of a base and step
  RowsMmaTile t{};
  t.merged = static_cast<int>(merged);
  t.steps = static_cast<int>(ceil_div(merged * problem.in_channels_per_group(), kRowsMmaStep));
  t.channel_blocks = static_cast<int>(ceil_div(merged * problem.out_channels_per_group(), kRowsMmaChannels));
  t.base = width.base(0) / 4 * 4;
  const int64_t strips = ceil_div(width.base(width.out() - 1) + 1 - t.base, kRowsMmaColumns);
  t.segments = static_cast<int>(ceil_div(strips, kRowsMmaStrips));
  t.warps = static_cast<int>(ceil_div(ceil_div(strips, t.segments), rows_mma_strips(problem.element_size())));
  t.columns = t.warps * rows_mma_strips(problem.element_size()) * kRowsMmaColumns;
  t.halo = static_cast<int>(ceil_div((width.kernel - 1) * width.dilation / width.stride, 4) * 4);
  t.with_halo = t.halo > 0 && (t.segments > 1 || t.base > 0);
  t.span = static_cast<int>((height.kernel - 1) * height.dilation / height.stride + 1);
  t.row_pitch = static_cast<int>(ceil_div(t.halo + t.columns - 8, 32) * 32 + 8);
  t.row_words = static_cast<int>(t.steps * words * t.row_pitch);
  t.tap_weights = static_cast<int>(t.steps * width.kernel * 32);
  t.inputs = kRowsMmaChannels * 4 + height.kernel * width.kernel * t.steps * kRowsMmaChannels * words * 4;
  t.outputs = t.inputs + (t.span + 1) * t.row_words * 4;
  // All channels of a position, and a gap of 8 elements after the positions of 8 bases.
  t.cells = t.outputs + (kRowsMmaChannels * t.columns * width.stride + t.columns) * problem.element_size();
  t.row_quads = static_cast<int>(2 * rows_mma_strips(problem.element_size()) * t.steps +
                                 (t.with_halo ? 4 / problem.element_size() : 0));
  t.shared_bytes = t.cells + t.row_quads * t.warps * 32 * 4 * problem.element_size();
  return t;
}

// As many groups are made as one as fill the output channels of a block.
inline RowsMmaTile rows_mma_tile(const Problem& problem) {
  for (int64_t merged = kRowsMmaChannels; merged > 1; --merged) {
    if (problem.groups % merged != 0 || merged * problem.out_channels_per_group() > kRowsMmaChannels ||
        merged * problem.in_channels_per_group() > kRowsMmaInChannels) {
      continue;
    }
    const RowsMmaTile tile = rows_mma_tile(problem, merged);
    if (tile.shared_bytes <= kRowsMmaShared / 2) return tile;
  }
  return rows_mma_tile(problem, 1);
}

// What both families of rows on tensor cores refuse, or ""; `shapes` are what the last axis may have.
template <int kShapes>
inline std::string rows_on_mma_refusal(const Problem& problem, const RowsMmaShape (&shapes)[kShapes]) {
  const Axis &depth = problem.axis[0], &height = problem.axis[1], &width = problem.axis[2];
  if (problem.dtype == DType::kFloat64) return "float64";
  if (depth.in != 1 || depth.kernel != 1 || depth.stride != 1 || depth.padding != 0 || depth.output_padding != 0) {
    return "three axes";
  }
  const bool listed = std::any_of(std::begin(shapes), std::end(shapes), [&](const RowsMmaShape& s) {
    return s.kernel == width.kernel && s.stride == width.stride && s.dilation == width.dilation;
  });
  if (!listed) {
    return "a kernel of " + std::to_string(width.kernel) + ", stride " + std::to_string(width.stride) + ", dilation " +
           std::to_string(width.dilation) + " along the last axis";
  }
  if (problem.in_channels * problem.in_positions() < 1 || problem.out_channels < 1 || height.out() < 1 ||
      width.out() < 1) {
    return "an empty tensor";
  }
  constexpr int64_t kLimit = int64_t{1} << 24;
  if (height.kernel > 64 || height.stride > kRowsMmaMaxStride || height.dilation > 64) {
    return "a large kernel, stride or dilation along the height";
  }
  if (problem.in_channels_per_group() > kRowsMmaInChannels) return "more than 32 input channels a group";
  if (std::max({height.in, width.in, height.padding, width.padding, height.out(), width.out()}) >= kLimit) {
    return "an axis of 2^24 or more";
  }
  return "";
}

// "" if the family can make the call, else a reason.
inline std::string rows_mma_refusal(const Problem& problem) {
  const std::string reason = rows_on_mma_refusal(problem, kRowsMmaShapes);
  if (!reason.empty()) return reason;
  if (problem.layout != Layout::kChannelsLast) return "contiguous tensors";
  if (problem.dtype == DType::kFloat32 && !problem.allow_tf32) return "float32 without TF32";
  const Axis& height = problem.axis[1];
  const RowsMmaTile t = rows_mma_tile(problem);
  if (t.shared_bytes > kRowsMmaShared) return "too many weights or input rows for shared memory";
  // Units of work, in floating point: the products may be large.
  const double bases = static_cast<double>(height.base(height.out() - 1) + 1);
  if (double(problem.batch) * double(problem.groups) * t.channel_blocks * t.segments * bases >= double(1 << 30)) {
    return "a batch or groups too large";
  }
  return "";
}

// Fitted to an H200: the memory at what the stores reach, or the rows one after the other.
inline double rows_mma_cost_ms(const Problem& problem) {
  const RowsMmaTile t = rows_mma_tile(problem);
  const Axis& height = problem.axis[1];
  double rows = 0, taps = 0;  // of all output rows of a plane
  for (int64_t phase = 0; phase < height.stride; ++phase) {
    const int64_t num_taps = height.num_taps(phase);
    if (num_taps > 0) rows += static_cast<double>(height.num_outputs(phase));
    taps += static_cast<double>(height.num_outputs(phase) * num_taps);
  }
  const double planes = static_cast<double>(problem.batch) * static_cast<double>(problem.groups / t.merged) *
                        t.channel_blocks * t.segments;
  const double strips = static_cast<double>(t.columns) / kRowsMmaColumns;
  const double mma = taps * strips * static_cast<double>(problem.axis[2].kernel * t.steps);
  const bool wide = problem.element_size() == 4;
  // Pixels of no whole vectors are stored element by element.
  const double vectors = problem.out_channels * problem.element_size() % 16 == 0 ? 1 : 3.5;
  const double blocks_ms = vectors * planes * (rows * (4 + strips) + 0.07 * mma) * (wide ? 0.7e-6 : 0.55e-6);
  return 0.006 + std::max(blocks_ms, problem.bytes() / (wide ? 2.75e9 : 2.5e9));
}

}  // namespace fastconvt
