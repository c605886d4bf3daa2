// Rows of pixels on tensor cores: channels_last tensors of few channels, with all channels of a pixel in one block of
// threads. What the family can make, and what a block holds. Plain C++17: no Torch, no CUDA.
//
// An MMA's rows are 16 output channels, its columns bases of the last axis, and its terms input channels. Groups are
// made as one, with zero weights between them. The last axis' kernel, stride and dilation are compile-time; everything
// else is not.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>

#include "problem.h"

namespace fastconvt {

struct PixelRowsShape {
  int kernel, stride, dilation;
};
inline constexpr PixelRowsShape kPixelRowsShapes[] = {{3, 2, 2}, {3, 5, 2}};

inline constexpr int kPixelRowsChannels = 16;     // output channels of an MMA
inline constexpr int kPixelRowsBlocks = 4;        // of these, at most
inline constexpr int kPixelRowsInChannels = 32;   // at most
inline constexpr int kPixelRowsUnitBytes = 64;    // of input channels that a lane's quad loads at once
inline constexpr int kPixelRowsRing = 4;          // inputs, and outputs, that are staged at a time, at most
inline constexpr int kPixelRowsMaxStride = 16;    // of the height
inline constexpr int kPixelRowsConstants = 4096;  // bytes that rows of constants are copied from, about
inline constexpr int64_t kPixelRowsShared = 227 * 1024;
inline constexpr int kPixelRowsSector = 32;

// Warps that multiply: as many as registers and shared memory are there for.
constexpr int pixel_rows_makers(int64_t stride) { return stride <= 2 ? 12 : 8; }
// MMAs of 8 bases that a warp makes at a time, for 16 channels: some 40 KB of outputs in all.
constexpr int pixel_rows_tiles(int64_t element_size, int64_t stride) { return element_size == 4 && stride > 2 ? 2 : 4; }
// And how often.
constexpr int pixel_rows_strips(int64_t element_size, int64_t stride) {
  return element_size == 2 && stride <= 2 ? 2 : 1;
}

struct PixelRowsTile {
  int units;       // of input channels
  int blocks;      // of output channels: 1, 2 or 4
  int columns;     // bases of a segment of a row
  int segments;    // of a row
  int base;        // of the last axis, the first one of segment 0
  int span;        // input rows that one base of the height reads: its own and those before it
  int first, end;  // bases of the height
  int row_pitch;   // 32-bit words between staged input pixels: 4 modulo 8
  int constant_pixels;
  int buffers;  // inputs that are staged at a time
  int stages;   // output rows that are
  // Shared memory in bytes, and where its parts begin. The weights come first.
  int terms, constants, inputs, input_bytes, outputs, output_bytes, barriers, shared_bytes;
};

// Whether float32 is to be exact.
inline bool pixel_rows_splits(const Problem& problem) {
  return problem.dtype == DType::kFloat32 && !problem.allow_tf32;
}

inline PixelRowsTile pixel_rows_tile(const Problem& problem) {
  const Axis &height = problem.axis[1], &width = problem.axis[2];
  const int64_t size = problem.element_size(), reach = (width.kernel - 1) * width.dilation / width.stride;
  PixelRowsTile t{};
  t.units = static_cast<int>(ceil_div(problem.in_channels * size, kPixelRowsUnitBytes));
  const int64_t blocks = ceil_div(problem.out_channels, kPixelRowsChannels);
  t.blocks = blocks > 2 ? 4 : std::max(1, static_cast<int>(blocks));
  t.columns = pixel_rows_makers(width.stride) / t.blocks * 8 * pixel_rows_tiles(size, width.stride) *
              pixel_rows_strips(size, width.stride);
  t.base = static_cast<int>(width.base(0));
  t.segments = static_cast<int>(ceil_div(width.base(width.out() - 1) + 1 - t.base, t.columns));
  t.span = static_cast<int>((height.kernel - 1) * height.dilation / height.stride + 1);
  t.first = static_cast<int>(height.base(0));
  t.end = static_cast<int>(height.base(height.out() - 1) + 1);
  t.row_pitch = t.units * kPixelRowsUnitBytes / 4 + 4;
  const int64_t pixel = std::max<int64_t>(1, problem.out_channels) * size;
  t.constant_pixels = static_cast<int>(std::max<int64_t>(1, kPixelRowsConstants / pixel));
  const int64_t weights = height.kernel * width.kernel * t.blocks * t.units * 2 * 32 * 16;
  const int64_t inputs = t.span * (t.columns + reach) * t.row_pitch * 4;
  const int64_t outputs = round_up(t.columns * width.stride * pixel + kPixelRowsSector, int64_t{128});
  const int64_t constants = round_up(t.constant_pixels * pixel + kPixelRowsSector, int64_t{128});
  t.shared_bytes = 1 << 30;
  if (weights + inputs + outputs + constants > kPixelRowsShared) return t;
  t.terms = static_cast<int>(weights);
  t.constants = t.terms + t.blocks * kPixelRowsChannels * 4;
  t.constants = round_up(t.constants, 128);
  t.outputs = static_cast<int>(t.constants + constants);
  t.output_bytes = static_cast<int>(outputs);
  t.input_bytes = static_cast<int>(inputs);
  const int64_t rest = kPixelRowsShared - t.outputs - 4 * kPixelRowsRing * 8;
  for (int total = 2 * kPixelRowsRing; total >= 4; --total) {
    for (t.buffers = std::max(2, total - kPixelRowsRing); t.buffers <= std::min(kPixelRowsRing, total - 2);
         ++t.buffers) {
      t.stages = total - t.buffers;
      if (t.stages * outputs + t.buffers * inputs > rest) continue;
      t.inputs = static_cast<int>(t.outputs + t.stages * outputs);
      t.barriers = static_cast<int>(round_up(t.inputs + t.buffers * inputs, int64_t{8}));
      t.shared_bytes = t.barriers + 4 * kPixelRowsRing * 8;
      return t;
    }
  }
  return t;
}

// "" if the family can make the call, else a reason.
inline std::string pixel_rows_refusal(const Problem& problem) {
  const Axis &height = problem.axis[1], &width = problem.axis[2];
  if (problem.dtype == DType::kFloat64) return "float64";
  if (problem.layout != Layout::kChannelsLast) return "contiguous tensors";
  if (!problem.axis[0].is_trivial()) return "three axes";
  const bool listed =
      std::any_of(std::begin(kPixelRowsShapes), std::end(kPixelRowsShapes), [&](const PixelRowsShape& s) {
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
  if (problem.in_channels > kPixelRowsInChannels) return "more than 32 input channels";
  if (problem.out_channels > kPixelRowsBlocks * kPixelRowsChannels) return "more than 64 output channels";
  if (problem.out_channels * problem.element_size() % kPixelRowsSector != 0) {
    return "output pixels of no multiple of 32 bytes";
  }
  if (height.kernel > 64 || height.stride > kPixelRowsMaxStride || height.dilation > 64) {
    return "a large kernel, stride or dilation along the height";
  }
  constexpr int64_t kLimit = int64_t{1} << 24;
  if (std::max({height.in, width.in, height.padding, width.padding, height.out(), width.out()}) >= kLimit) {
    return "an axis of 2^24 or more";
  }
  const PixelRowsTile t = pixel_rows_tile(problem);
  if (t.shared_bytes > kPixelRowsShared) return "too many weights or input rows for shared memory";
  // Items, in floating point: the products may be large.
  if (double(problem.batch) * t.segments * (t.end - t.first) >= double(1 << 30)) return "a batch too large";
  return "";
}

// Fitted to an H200: the memory at what the stores reach, or the segments one after the other, in microseconds.
inline double pixel_rows_cost_ms(const Problem& problem) {
  const PixelRowsTile t = pixel_rows_tile(problem);
  const Axis &height = problem.axis[1], &width = problem.axis[2];
  double taps = 0, rows = 0;  // of all output rows of an image; rows that have taps
  for (int64_t phase = 0; phase < height.stride; ++phase) {
    const auto outputs = static_cast<double>(height.num_outputs(phase));
    taps += outputs * static_cast<double>(height.num_taps(phase));
    rows += height.num_taps(phase) > 0 ? outputs : 0;
  }
  const int64_t size = problem.element_size(), stride = width.stride;
  const double tiles = pixel_rows_tiles(size, stride) * pixel_rows_strips(size, stride) * pixel_rows_makers(stride);
  const double products = static_cast<double>(2 * t.units * width.kernel) * (pixel_rows_splits(problem) ? 3 : 1);
  const double image = rows * 0.6 + taps * products * tiles * 0.0014;
  if (t.shared_bytes > kPixelRowsShared) return 1e9;
  const double items = std::max(1., static_cast<double>(problem.batch) * t.segments * (t.end - t.first));
  const double uneven = std::ceil(items / 132) * 132 / items;
  const double rounds = static_cast<double>(problem.batch) * t.segments * image * uneven / 132 * 1e-3;
  return 0.016 + std::max(rounds, problem.bytes() / (size == 4 ? 3.75e9 : 3.7e9));
}

}  // namespace fastconvt
