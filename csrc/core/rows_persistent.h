// The persistent row family on tensor cores: what it can make, and what a block holds. Plain C++17: no Torch, no CUDA.
//
// A block makes whole output rows of the last axis (or a segment of one) for 16 output channels of a group, all phases
// of the last axis at once: an MMA's rows are output channels, its columns bases, and a tap of the last axis is one MMA
// for 8 input channels and 8 bases. float32 takes three: factors are split into two TF32 terms. The last axis' kernel,
// stride and dilation are compile-time; everything else is not.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "rows_mma.h"

namespace fastconvt {

// Of the last axis.
inline constexpr RowsMmaShape kRowsPersistentShapes[] = {{5, 3, 1}, {3, 2, 2}, {3, 2, 3}, {4, 2, 1},
                                                         {5, 3, 2}, {3, 2, 1}, {2, 2, 1}, {3, 5, 2}};

// Warps that multiply, at most: as many as registers are there for; float32 as three products and many phases take more
// of them.
constexpr int rows_persistent_makers(bool split, int64_t stride) { return split || stride > 4 ? 8 : 9; }
inline constexpr int kRowsPersistentFeeders = 2;  // warps that load
inline constexpr int kRowsPersistentHalo = 8;     // staged columns before a segment's first base
inline constexpr int64_t kRowsPersistentShared = 227 * 1024;
// Bytes: bulk stores are much slower where their two addresses differ modulo a sector.
inline constexpr int kRowsPersistentSector = 32;

// Tiles of 8 bases that a warp makes at a time. Many phases of 32-bit elements fill shared memory with few rows: more
// warps make one of them then.
constexpr int rows_persistent_tiles(int64_t element_size, int64_t stride) {
  return element_size == 4 && stride > 4 ? 2 : 4;
}
inline constexpr int kRowsPersistentItemBytes = 48;  // of what describes a chunk in shared memory
// Chunks, at least, that a small batch is divided into: two for every multiprocessor.
inline constexpr int kRowsPersistentItems = 256;
inline constexpr int kRowsPersistentBuffers = 4;  // chunks that are staged at a time, at most
// Output rows that a team stages: one is stored while the next is made.
inline constexpr int kRowsPersistentStages = 2;
inline constexpr int kRowsPersistentStorers = kRowsPersistentStages;  // warps that store: a stage has one

struct RowsPersistentTile {
  int merged;          // groups that are made as one, whose weights between different groups are zero
  int steps;           // of kRowsMmaStep input channels
  int channel_blocks;  // of kRowsMmaChannels output channels, in a group
  int team_warps;      // that make a row together
  int teams;           // that make rows at the same time
  int rows;            // of a base's output rows, those that are no constants
  int first_base;      // of the height, the first one with such a row
  int bases;           // with such rows, in an image; one more may come before and after
  int segments;        // of a row
  int columns;         // bases of a segment
  int base;            // of the last axis, the first one of segment 0
  int shift;           // staged columns before that one that copies begin at, besides the halo
  int span;            // input rows that one base of the height reads: its own and those before it
  int chunk;           // bases of the height, at most, for which inputs are loaded at once
  int parts;           // chunks of an output image
  int row_pitch;       // elements between staged input channels; an odd multiple of 16 bytes, or 8 words modulo 32
  int output_pitch;    // elements between staged output channels
  int constant_bytes;  // from which rows of a constant are copied: of a channel, or of all where there is no bias
  // Shared memory in bytes, and where its parts begin. The bias and the weights come first.
  int inputs, input_bytes;  // of a chunk
  int buffer_bits;          // 2 to the power of it: chunks that are staged at a time
  // Barriers: of each buffer, for inputs that are there and for those that are done with; then the same for staged
  // outputs; then what the chunks are.
  int outputs, constants, barriers, shared_bytes;
};

// The bases with rows that are no constants. All phases of the first and the last base of an image need not exist.
inline void rows_persistent_bases(const Axis& height, RowsPersistentTile& t) {
  const int64_t first = height.base(0), last = height.base(height.out() - 1);
  const auto has_rows = [&](int64_t base) {
    bool any = false;
    for (int64_t r = 0; r < height.stride; ++r) {
      const int64_t y = base * height.stride + r - height.padding;
      any = any || (y >= 0 && y < height.out() && height.first_tap(r) < height.kernel);
    }
    return any;
  };
  for (int64_t r = 0; r < height.stride; ++r) t.rows += height.first_tap(r) < height.kernel ? 1 : 0;
  t.first_base = static_cast<int>(first < last && !has_rows(first) ? first + 1 : first);
  t.bases = static_cast<int>(first < last && !has_rows(last) ? last - t.first_base : last - t.first_base + 1);
  if (t.bases < 1) t.first_base = static_cast<int>(first), t.bases = static_cast<int>(last - first + 1);
}

// Whether float32 is to be exact.
inline bool rows_persistent_splits(const Problem& problem) {
  return problem.dtype == DType::kFloat32 && !problem.allow_tf32;
}

// Lays shared memory out; false if it is too small.
inline bool rows_persistent_fits(const Problem& problem, int64_t row_bytes, int copies, RowsPersistentTile& t) {
  const int64_t size = problem.element_size(), sector = kRowsPersistentSector;
  const int64_t constant = std::min<int64_t>(t.columns * problem.axis[2].stride * size, 4096);
  t.constant_bytes = static_cast<int>(((constant - 1) / (copies * sector) + 2) * sector);
  const int64_t inputs = (t.chunk + t.span - 1) * row_bytes;
  const int64_t outputs = kRowsPersistentStages * t.teams * kRowsMmaChannels * t.output_pitch * size;
  const int64_t constants = (problem.has_bias ? kRowsMmaChannels : 1) * t.constant_bytes;
  const int64_t barriers = (2 * kRowsPersistentBuffers + 2 * kRowsPersistentStages * t.teams) * 8;
  const int64_t items = kRowsPersistentBuffers * kRowsPersistentItemBytes;
  const int64_t shared = t.inputs + (inputs << t.buffer_bits) + outputs + constants + barriers + items;
  if (shared > kRowsPersistentShared) return false;
  t.input_bytes = static_cast<int>(inputs);
  t.outputs = t.inputs + (t.input_bytes << t.buffer_bits);
  t.constants = static_cast<int>(t.outputs + outputs);
  t.barriers = static_cast<int>(t.constants + constants);
  t.shared_bytes = static_cast<int>(shared);
  t.parts = static_cast<int>((t.bases - 1) / t.chunk + 1);
  return true;
}

inline RowsPersistentTile rows_persistent_tile(const Problem& problem, int64_t merged) {
  const Axis &height = problem.axis[1], &width = problem.axis[2];
  const int64_t size = problem.element_size(), line = 128 / size, sector = kRowsPersistentSector / size;
  const int64_t strip = 8 * rows_persistent_tiles(size, width.stride), terms = rows_persistent_splits(problem) ? 2 : 1;
  RowsPersistentTile t{};
  t.merged = static_cast<int>(merged);
  t.steps = static_cast<int>(ceil_div(merged * problem.in_channels_per_group(), kRowsMmaStep));
  t.channel_blocks = static_cast<int>(ceil_div(merged * problem.out_channels_per_group(), kRowsMmaChannels));
  const int makers = rows_persistent_makers(rows_persistent_splits(problem), width.stride);
  const auto strips_from = [&](int64_t base) { return ceil_div(width.base(width.out() - 1) + 1 - base, strip); };
  // Bases in eights: copies of inputs are aligned then. 32-bit operands may begin between, which may save a strip.
  t.base = static_cast<int>(width.base(0) / 8 * 8);
  if (size == 4 && strips_from(width.base(0)) <= std::min<int64_t>(makers, strips_from(t.base) - 1)) {
    t.shift = static_cast<int>(width.base(0) - t.base);
    t.base += t.shift;
  }
  const int64_t strips = strips_from(t.base);
  t.segments = static_cast<int>(ceil_div(strips, makers));
  t.team_warps = static_cast<int>(ceil_div(strips, t.segments));
  t.columns = static_cast<int>(t.team_warps * strip);
  t.span = static_cast<int>((height.kernel - 1) * height.dilation / height.stride + 1);
  // 8 modulo 32 words, or an odd multiple of 16 bytes: neighbouring channels stand in other banks.
  t.row_pitch = static_cast<int>(ceil_div(t.columns + t.shift, 32) * 32 + kRowsPersistentHalo);
  // Lines of constants on both sides. Channels stand a sector further on in their lines each, in different banks.
  t.output_pitch = static_cast<int>((ceil_div(t.columns * width.stride, line) + 2) * line + sector);
  rows_persistent_bases(height, t);
  const int64_t rows = t.steps * kRowsMmaStep * t.row_pitch * size;
  const int64_t weights = height.kernel * width.kernel * t.steps * kRowsMmaChannels * kRowsMmaStep * size * terms;
  t.inputs = static_cast<int>(std::min<int64_t>(kRowsMmaChannels * 4 + weights, 1 << 20));
  // Rows of float32 take longer to store: few of them in a chunk do, unless bases share many inputs or take long, too.
  int most_chunk = size == 4 && terms == 1 && t.span <= 3 ? 2 : 4;
  const int64_t planes = problem.batch * (problem.groups / merged) * t.channel_blocks * t.segments;
  while (most_chunk > 1 && (planes * ceil_div(t.bases, most_chunk) < kRowsPersistentItems || t.bases < most_chunk)) {
    most_chunk /= 2;
  }
  // What fits: at first, rows of constants in one or two copies; then all warps at work, many bases in a chunk.
  for (const int most_copies : {2, 16}) {
    for (t.teams = makers / t.team_warps; t.teams >= 1; t.teams /= 2) {
      for (t.chunk = most_chunk; t.chunk >= 1; t.chunk /= 2) {
        // A chunk of one row takes less time than its inputs take to come.
        for (t.buffer_bits = t.chunk * t.rows == 1 ? 2 : 1; t.buffer_bits >= 1; --t.buffer_bits) {
          for (int copies = 1; copies <= most_copies; copies *= 2) {
            if (rows_persistent_fits(problem, rows, copies, t)) return t;
          }
        }
      }
    }
  }
  t.shared_bytes = 1 << 30;
  return t;
}

// As many groups are made as one as fill the output channels of a block.
inline RowsPersistentTile rows_persistent_tile(const Problem& problem) {
  for (int64_t merged = kRowsMmaChannels; merged > 1; --merged) {
    if (problem.groups % merged != 0 || merged * problem.out_channels_per_group() > kRowsMmaChannels ||
        merged * problem.in_channels_per_group() > kRowsMmaInChannels) {
      continue;
    }
    const RowsPersistentTile tile = rows_persistent_tile(problem, merged);
    if (tile.shared_bytes <= kRowsPersistentShared) return tile;
  }
  return rows_persistent_tile(problem, 1);
}

// "" if the family can make the call, else a reason.
inline std::string rows_persistent_refusal(const Problem& problem) {
  const std::string reason = rows_on_mma_refusal(problem, kRowsPersistentShapes);
  if (!reason.empty()) return reason;
  if (problem.layout != Layout::kContiguous) return "channels last";
  const Axis& height = problem.axis[1];
  const RowsPersistentTile t = rows_persistent_tile(problem);
  if (t.shared_bytes > kRowsPersistentShared) return "too many weights or input rows for shared memory";
  // Chunks, in floating point: the products may be large.
  const double bases = static_cast<double>(height.base(height.out() - 1) + 1);
  if (double(problem.batch) * double(problem.groups / t.merged) * t.channel_blocks * t.segments * bases >=
      double(1 << 30)) {
    return "a batch or groups too large";
  }
  return "";
}

// Fitted to an H200: the memory at what the stores reach, or the rows one after the other, in microseconds.
inline double rows_persistent_cost_ms(const Problem& problem) {
  const RowsPersistentTile t = rows_persistent_tile(problem);
  const Axis &height = problem.axis[1], &width = problem.axis[2];
  const bool wide = problem.element_size() == 4, split = rows_persistent_splits(problem);
  double rows = 0;
  for (int64_t phase = 0; phase < height.stride; ++phase) {
    if (height.first_tap(phase) == height.kernel) continue;
    const double products = static_cast<double>(height.num_taps(phase) * width.kernel * t.steps * t.team_warps) *
                            rows_persistent_tiles(problem.element_size(), width.stride) / 4;
    const double row = split  ? 1.45 / t.teams + 0.0175 * products
                       : wide ? 1.1 + 0.014 * products
                              : 0.95 + 0.0092 * products;
    rows += static_cast<double>(height.num_outputs(phase)) * row;
  }
  rows *= static_cast<double>(problem.batch) * static_cast<double>(problem.groups / t.merged) * t.channel_blocks *
          t.segments;
  // Chunks of one row are too small to read in bursts.
  const double bandwidth = t.chunk * t.rows == 1 ? (wide ? 3.4e9 : 2.7e9) : wide ? 4e9 : 3.5e9;
  return (split ? 0.01 : 0.006) + std::max(rows / 132 * 1e-3, problem.bytes() / bandwidth);
}

}  // namespace fastconvt
