// Long rows on tensor cores: layers of one spatial axis, contiguous, with few channels a group. What the family can
// make, and what a block holds. Plain C++17: no Torch, no CUDA.
//
// A block makes a stretch of the row for up to 64 output channels from one staged input: an MMA's rows are 16 output
// channels, its columns bases, and a tap is one MMA for the input channels of a step. Kernel, stride and dilation are
// compile-time.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "problem.h"

namespace fastconvt {

struct LongRowsShape {
  int kernel, stride, dilation;
};
inline constexpr LongRowsShape kLongRowsShapes[] = {{3, 2, 2}, {5, 3, 2}};

inline constexpr int kLongRowsChannels = 16;    // output channels of an MMA
inline constexpr int kLongRowsInChannels = 32;  // of a group
inline constexpr int kLongRowsBlocks = 4;       // of output channels, of a block of threads
inline constexpr int kLongRowsMakers = 8;       // warps that multiply
inline constexpr int kLongRowsStrip = 32;       // bases that a warp makes at a time
inline constexpr int kLongRowsRing = 3;         // inputs, and outputs, that are staged at a time, at most
inline constexpr int64_t kLongRowsShared = 227 * 1024;
// Bytes: bulk stores are much slower where their two addresses differ modulo a sector.
inline constexpr int kLongRowsSector = 32;
// Strips of a warp: as many bytes of a row in every precision.
constexpr int long_rows_strips(int64_t element_size) { return element_size == 2 ? 2 : 1; }
constexpr int long_rows_step(int64_t element_size) { return element_size == 2 ? 16 : 8; }  // input channels of an MMA
// Staged columns before a tile's first base: 16 bytes.
constexpr int long_rows_halo(int64_t element_size) { return static_cast<int>(16 / element_size); }

// Whether makers may keep the inputs of all steps in registers: sums are few where phases without taps are many.
constexpr bool long_rows_keeps_inputs(int kernel, int stride, int dilation) {
  return kernel == 3 && stride == 2 && dilation == 2;
}

struct LongRowsTile {
  int merged;          // groups that are made as one, whose weights between different groups are zero
  int steps;           // of input channels, of merged groups
  int channel_blocks;  // of kLongRowsChannels output channels, of merged groups
  int blocks;          // of these, that a block of threads makes
  int groups;          // merged groups that they belong to
  int sets;            // of blocks that make all channels of a stretch
  int columns;         // bases that are made
  int line;            // elements that runs begin and end at multiples of
  int advance;         // bases from a tile to the next: fewer than are made, since lines of all channels must fit
  int tiles;           // of a row
  int base;            // the first one of the first tile
  int row_pitch;       // elements between staged input channels
  int output_pitch;    // elements between staged output channels
  int buffers;         // inputs that are staged at a time
  int stages;          // outputs of a channel block that are
  // Shared memory in bytes, and where its parts begin. The weights come first.
  int terms, inputs, input_bytes, outputs, output_bytes, barriers, shared_bytes;
};

// Whether float32 is to be exact.
inline bool long_rows_splits(const Problem& problem) { return problem.dtype == DType::kFloat32 && !problem.allow_tf32; }

// Neighbouring blocks of one group, or all blocks of neighbouring groups.
inline bool long_rows_can_join(const Problem& problem, const LongRowsTile& t, int blocks) {
  if (blocks <= t.channel_blocks) return t.channel_blocks % blocks == 0;
  return blocks % t.channel_blocks == 0 && problem.groups / t.merged % (blocks / t.channel_blocks) == 0;
}

// Lays shared memory out; false if it is too small.
inline bool long_rows_fits(const Problem& problem, int blocks, int buffers, int stages, LongRowsTile& t) {
  const int64_t size = problem.element_size(), terms = long_rows_splits(problem) ? 2 : 1;
  const int64_t groups = std::max(1, blocks / t.channel_blocks);
  const int64_t weights = int64_t{blocks} * t.steps * problem.axis[2].kernel * 32 * 16 * terms;
  const int64_t inputs = groups * t.steps * long_rows_step(size) * t.row_pitch * size;
  const int64_t outputs = int64_t{kLongRowsChannels} * t.output_pitch * size;
  const int64_t shared =
      weights + blocks * kLongRowsChannels * 4 + inputs * buffers + outputs * stages + 4 * kLongRowsRing * 8 + 128;
  if (shared > kLongRowsShared) return false;
  t.blocks = blocks;
  t.groups = static_cast<int>(groups);
  t.sets = static_cast<int>(problem.groups / t.merged * t.channel_blocks / blocks);
  t.buffers = buffers;
  t.stages = stages;
  t.terms = static_cast<int>(weights);
  t.inputs = t.terms + blocks * kLongRowsChannels * 4;
  t.input_bytes = static_cast<int>(inputs);
  t.outputs = static_cast<int>(round_up(t.inputs + inputs * buffers, int64_t{128}));
  t.output_bytes = static_cast<int>(outputs);
  t.barriers = static_cast<int>(t.outputs + outputs * stages);
  t.shared_bytes = t.barriers + 4 * kLongRowsRing * 8;
  return true;
}

inline LongRowsTile long_rows_tile(const Problem& problem, int64_t merged) {
  const Axis& width = problem.axis[2];
  const int64_t size = problem.element_size(), halo = long_rows_halo(size);
  LongRowsTile t{};
  t.line = static_cast<int>((long_rows_splits(problem) ? kLongRowsSector : 128) / size);
  t.merged = static_cast<int>(merged);
  t.steps = static_cast<int>(ceil_div(merged * problem.in_channels_per_group(), long_rows_step(size)));
  t.channel_blocks =
      static_cast<int>(std::max<int64_t>(1, ceil_div(merged * problem.out_channels_per_group(), kLongRowsChannels)));
  t.columns = kLongRowsMakers * kLongRowsStrip * long_rows_strips(size);
  t.advance = static_cast<int>((t.columns * width.stride - (t.line - 1)) / width.stride / halo * halo);
  t.base = static_cast<int>(width.base(0) / halo * halo);
  const int64_t bases = width.base(width.out() - 1) + 1 - t.base;
  t.tiles = static_cast<int>(ceil_div(std::max<int64_t>(bases - t.columns, 0), t.advance) + 1);
  // Banks: 4 words modulo 32.
  t.row_pitch = static_cast<int>(t.columns + halo);
  t.output_pitch = static_cast<int>(t.columns * width.stride + kLongRowsSector / size);
  for (int blocks = kLongRowsBlocks; blocks >= 1; blocks /= 2) {
    if (!long_rows_can_join(problem, t, blocks)) continue;
    for (int total = 2 * kLongRowsRing; total >= 4; --total) {
      const int stages = std::min(kLongRowsRing, total - 2);
      if (long_rows_fits(problem, blocks, total - stages, stages, t)) return t;
    }
  }
  t.shared_bytes = 1 << 30;
  return t;
}

// As many groups are made as one as fill the output channels of an MMA.
inline LongRowsTile long_rows_tile(const Problem& problem) {
  for (int64_t merged = kLongRowsChannels; merged > 1; --merged) {
    if (problem.groups % merged != 0 || merged * problem.out_channels_per_group() > kLongRowsChannels ||
        merged * problem.in_channels_per_group() > kLongRowsInChannels) {
      continue;
    }
    const LongRowsTile tile = long_rows_tile(problem, merged);
    if (tile.shared_bytes <= kLongRowsShared) return tile;
  }
  return long_rows_tile(problem, 1);
}

// "" if the family can make the call, else a reason.
inline std::string long_rows_refusal(const Problem& problem) {
  const Axis& width = problem.axis[2];
  if (problem.dtype == DType::kFloat64) return "float64";
  if (problem.layout != Layout::kContiguous) return "channels last";
  if (!problem.axis[0].is_trivial() || !problem.axis[1].is_trivial()) return "more than one axis";
  const bool listed = std::any_of(std::begin(kLongRowsShapes), std::end(kLongRowsShapes), [&](const LongRowsShape& s) {
    return s.kernel == width.kernel && s.stride == width.stride && s.dilation == width.dilation;
  });
  if (!listed) {
    return "a kernel of " + std::to_string(width.kernel) + ", stride " + std::to_string(width.stride) + ", dilation " +
           std::to_string(width.dilation);
  }
  if (problem.in_channels_per_group() > kLongRowsInChannels) return "more than 32 input channels a group";
  if (problem.in_channels * problem.in_positions() < 1 || problem.out_channels < 1 || width.out() < 1)
    return "an empty tensor";
  if (std::max({width.in, width.padding, width.out()}) >= int64_t{1} << 28) return "an axis of 2^28 or more";
  const LongRowsTile t = long_rows_tile(problem);
  if (t.shared_bytes > kLongRowsShared) return "too many weights for shared memory";
  // Work, in floating point: the products may be large.
  if (double(problem.batch) * t.tiles >= double(1 << 30) || t.sets >= 1 << 20) return "a batch or groups too large";
  return "";
}

// Fitted to an H200: the memory at what the stores reach, or the tiles one after the other, in microseconds.
inline double long_rows_cost_ms(const Problem& problem) {
  const LongRowsTile t = long_rows_tile(problem);
  if (t.sets == 0) return 1e9;
  const double product = long_rows_splits(problem) ? 0.127 : problem.element_size() == 4 ? 0.06 : 0.12;
  // Odd rows of 16-bit elements are loaded one by one.
  const double loads = problem.element_size() == 2 && problem.axis[2].in % 2 != 0 ? 20 : 0;
  const double tile = loads + t.blocks * (0.5 + product * static_cast<double>(t.steps * problem.axis[2].kernel));
  const int64_t blocks = std::max(1, 132 / t.sets);  // of a set, at a time
  const double rounds = static_cast<double>(ceil_div(problem.batch * t.tiles, blocks)) * ceil_div(t.sets, 132);
  return 0.012 + std::max(rounds * tile * 1e-3, problem.bytes() / 3.55e9);
}

}  // namespace fastconvt
