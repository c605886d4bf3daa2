// The 16-bit phase GEMM on tensor copies: what it can make, and the tile of a block. Plain C++17: no Torch, no CUDA.
//
// An implicit matrix product a phase (core/axis_phases.h): rows are cells, columns output channels, the inner dimension
// input channels by the taps of the phase. One tensor copy brings a box of positions with its halo,
// channels innermost, as shared memory is read by asynchronous products; a tap then is an offset, so kernel, stride,
// padding and dilation are run-time data. Both operands stay in shared memory, so tiles are large.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>

#include "axis_phases.h"
#include "problem.h"

namespace fastconvt {

inline constexpr int kPhaseTmaMaxStages = 8;   // of weights on their way
inline constexpr int kPhaseTmaMaxBuffers = 4;  // of boxes of inputs
inline constexpr int kPhaseTmaTaskBytes = 256;
inline constexpr int kPhaseTmaMaxStride = 16;
inline constexpr int64_t kPhaseTmaShared = 226 * 1024;  // of a block at most

// Each warpgroup that multiplies makes 64 * row_tiles cells by `columns` output channels of a phase. Two that share a
// block share operands, too; two blocks, one warpgroup each, multiply and store in turns.
struct PhaseTmaShape {
  int row_tiles, columns;
  int warpgroups;
};
inline constexpr PhaseTmaShape kPhaseTmaShapes[] = {{2, 128, 2}, {1, 128, 2}, {4, 64, 2}, {2, 64, 2}, {2, 128, 1},
                                                    {4, 64, 1},  {2, 64, 1},  {4, 32, 1}, {2, 32, 1}};
inline constexpr int kNumPhaseTmaShapes = sizeof(kPhaseTmaShapes) / sizeof(kPhaseTmaShapes[0]);

// What the second warpgroup makes: other cells, the next phase along the last axis, or other output channels.
enum class PhaseTmaSplit : int { kCells, kPhases, kChannels };

// How the cells of a box are numbered, so that 64 of them are eight groups of eight, equally far apart.
enum class PhaseTmaOrder : int {
  kSquares,  // eight along the last axis, then batch entries, rows, the rest of the last axis, planes
  kRuns,     // the last axis, batch entries, rows, planes
  kBatch     // batch entries, the last axis, rows, planes
};

// The phases of one axis, summed up; `pair` is of phases 2i and 2i + 1.
struct PhaseTmaAxis {
  int cells;  // of the phases that have taps, at most
  int extent, pair_extent;
  int max_taps;
  int phases, pairs;  // that have taps
};

inline PhaseTmaAxis phase_tma_axis(const Axis& axis) {
  PhaseTmaAxis a{};
  const int step = static_cast<int>(axis.dilation / std::gcd(axis.stride, axis.dilation));
  int low[2] = {}, high[2] = {};
  bool any = false;
  for (int64_t f = 0; f < axis.stride && f < axis.out(); ++f) {
    if (f % 2 == 0) any = false;
    const AxisPhase phase = axis_phase(axis, f);
    if (phase.num_taps == 0) continue;
    const int first = phase.shift - (phase.num_taps - 1) * step;
    low[0] = first, high[0] = phase.shift;
    low[1] = any ? std::min(low[1], first) : first, high[1] = any ? std::max(high[1], phase.shift) : phase.shift;
    a.extent = std::max(a.extent, high[0] - low[0]);
    a.pair_extent = std::max(a.pair_extent, high[1] - low[1]);
    a.cells = std::max(a.cells, static_cast<int>(ceil_div(axis.out() - f, axis.stride)));
    a.max_taps = std::max(a.max_taps, phase.num_taps);
    ++a.phases;
    if (!any) ++a.pairs;
    any = true;
  }
  return a;
}

// A box of cells, (batch, depth, height, width), and how they are numbered; no cells if there is none.
struct PhaseTmaBox {
  PhaseTmaOrder order;
  int box[4], halo[4];
  int64_t tiles[4];
  int cells, inputs;
};

// Everything that sizes a block and the grid.
struct PhaseTmaTile : PhaseTmaBox {
  int shape;
  PhaseTmaSplit split;
  int columns;         // of a block, of one phase
  int channel_blocks;  // of a group
  int chunk, chunks;   // input channels of a stage: 16, 32 or 64
  int unit_bytes;      // of a tap's weights in a stage, of one warpgroup
  int taps_per_stage, stages, buffers;
  bool merged;              // contiguous: an item makes all phases of the height, too, and whole rows
  int width_groups;         // contiguous: items share the phases of the last axis; 1: each makes all
  int slots;                // contiguous: phases with taps that are staged
  int run_rows, run_width;  // contiguous: outputs of a channel that an item makes in one run
  int lines;                // contiguous: runs of a channel
  int64_t items;
  int tasks_at, lines_at, terms_at, table_at, inputs_at, weights_at, staging_at, shared_bytes;
  int buffer_bytes, stage_bytes, channel_pitch;
  int blocks;
  double cost_ms;
};

inline int phase_tma_columns(const PhaseTmaTile& t) { return kPhaseTmaShapes[t.shape].columns; }

// The elements of a staged phase of a channel.
inline int phase_tma_slot_pitch(const PhaseTmaTile& t) { return t.cells + 8; }

// The input channels of a group in packed tensors.
inline int64_t phase_tma_channels(const PhaseTmaTile& t) { return int64_t{t.chunk} * t.chunks; }

// The box of `cells` cells: few tiles, small halos, long runs. `pairs`: it serves two phases of the last axis at once.
inline PhaseTmaBox phase_tma_box(const Problem& problem, const PhaseTmaAxis (&axis)[3], int cells, bool pairs) {
  const bool contiguous = problem.layout == Layout::kContiguous, unaligned = problem.axis[2].out() % 8 != 0;
  const int extent[3] = {axis[0].extent, axis[1].extent, pairs ? axis[2].pair_extent : axis[2].extent};
  PhaseTmaBox best{};
  double least = 0;
  for (int w = 1; w <= cells && w < 2 * std::max(axis[2].cells, 8) && w + extent[2] <= 256; w *= 2) {
    const int64_t tiles_w = ceil_div(axis[2].cells, w);
    for (int h = 1; h * w <= cells && h < 2 * axis[1].cells && h + extent[1] <= 256; h *= 2) {
      const int64_t tiles_h = ceil_div(axis[1].cells, h);
      for (int d = 1; d * h * w <= cells && d < 2 * axis[0].cells && d + extent[0] <= 256; d *= 2) {
        const int n = cells / (w * h * d);
        PhaseTmaOrder order;
        if (w % 64 == 0) {
          order = PhaseTmaOrder::kRuns;
        } else if (w % 8 == 0 && n * h % 8 == 0) {
          order = PhaseTmaOrder::kSquares;
        } else if (n % 8 == 0 && n * w % 64 == 0) {
          order = PhaseTmaOrder::kBatch;
        } else {
          continue;
        }
        const double inputs = double(n) * (d + extent[0]) * (h + extent[1]) * (w + extent[2]);
        if (n > 256 || inputs * 32 > 100 * 1024) continue;
        const int64_t tiles_d = ceil_div(axis[0].cells, d), tiles_n = ceil_div(problem.batch, int64_t{n});
        double cost = cells + 0.25 * inputs;
        if (contiguous) cost += (unaligned ? 32.0 : 4.0) * cells / std::min(w, axis[2].cells);
        cost *= double(tiles_n) * double(tiles_d) * double(tiles_h) * double(tiles_w);
        if (best.cells > 0 && cost >= least) continue;
        least = cost;
        best = {order,
                {n, d, h, w},
                {n, d + extent[0], h + extent[1], w + extent[2]},
                {tiles_n, tiles_d, tiles_h, tiles_w},
                cells,
                static_cast<int>(inputs)};
      }
    }
  }
  return best;
}

// Divides shared memory for `blocks` blocks a multiprocessor; false if it is too small.
inline bool place_phase_tma_tile(PhaseTmaTile& t, bool contiguous, int max_taps, int blocks) {
  const int64_t budget = kPhaseTmaShared / blocks - (blocks > 1 ? 2048 : 1024);
  const int units = t.split == PhaseTmaSplit::kCells ? 1 : 2;
  // Barriers, then what two tasks need.
  t.tasks_at = 2 * (kPhaseTmaMaxStages + kPhaseTmaMaxBuffers + 2) * 8;
  t.lines_at = t.tasks_at + 2 * kPhaseTmaTaskBytes;
  t.terms_at = t.lines_at + 2 * t.lines * 16;
  t.table_at = t.terms_at + 2 * t.columns * 4;
  const int tables = round_up(t.table_at + t.run_rows * t.run_width * 2, 1024);
  // Odd multiples of 16 bytes keep banks apart.
  t.channel_pitch = (t.slots * phase_tma_slot_pitch(t) / 8 | 1) * 16;
  const int staging = contiguous ? t.columns * t.channel_pitch : 0;
  for (int stage = 16384; t.chunk >= 16; stage = stage > 4096 ? stage / 2 : 16384, t.chunk /= stage == 16384 ? 2 : 1) {
    t.unit_bytes = phase_tma_columns(t) * t.chunk * 2;
    t.buffer_bytes = round_up(t.inputs * t.chunk * 2, 1024);
    t.taps_per_stage = std::clamp(stage / (t.unit_bytes * units), 1, max_taps);
    t.stage_bytes = t.taps_per_stage * t.unit_bytes * units;
    const int64_t left = budget - tables - staging;
    for (t.buffers = left > 6 * t.buffer_bytes ? 3 : 2; t.buffers >= 2; --t.buffers) {
      const int64_t stages = (left - t.buffers * t.buffer_bytes) / t.stage_bytes;
      if (stages < 3) continue;
      t.stages = static_cast<int>(std::min<int64_t>(stages, kPhaseTmaMaxStages));
      t.inputs_at = tables;
      t.weights_at = t.inputs_at + t.buffers * t.buffer_bytes;
      t.staging_at = t.weights_at + t.stages * t.stage_bytes;
      t.shared_bytes = t.staging_at + staging + 1024;  // the base is aligned on the device
      t.blocks = blocks;
      return true;
    }
  }
  return false;
}

// Milliseconds of the products' launch on an H200: of an item the tensor unit's clocks or those of its copies (bytes
// and rows of the box), and what its threads do beside; two blocks of one warpgroup each hide little of it.
inline double phase_tma_products_ms(const Problem& problem, const PhaseTmaAxis (&axis)[3], const PhaseTmaTile& t) {
  const bool contiguous = problem.layout == Layout::kContiguous;
  const int columns = phase_tma_columns(t);
  const double last = t.split == PhaseTmaSplit::kPhases ? axis[2].pairs : axis[2].phases;
  // Items of a tile that have taps, and what one of them makes, one after the other.
  const double passes = contiguous ? last / t.width_groups * (t.merged ? axis[1].phases : 1) : 1;
  const double with_taps = double(axis[0].phases) * axis[1].phases * last / passes;
  const double taps = double(problem.kernel_positions()) / with_taps;
  double tiles = double(t.channel_blocks) * double(problem.groups);
  for (const int64_t n : t.tiles) tiles *= double(n);
  const int units = t.split == PhaseTmaSplit::kChannels ? 2 : 1;
  // A product reads 64 rows and its columns from shared memory, 128 bytes a clock.
  const double product = std::max(columns / 2.0, (2048 + columns * 32) / 128.0);
  double narrow = t.chunk == 64 ? 1 : t.chunk == 32 ? 1.08 : 1.2;
  if (problem.in_channels_per_group() <= 8) narrow *= 1.6;
  const double products = narrow * taps * t.chunks * (t.chunk / 16) * (t.cells / 64) * units * product;
  const double boxes = t.chunks * passes;
  const double bytes = t.chunks * taps * units * double(t.unit_bytes) + boxes * t.inputs * t.chunk * 2;
  const double copies = 0.0056 * bytes + 2.14 * boxes * t.inputs;
  const int64_t width = problem.axis[2].out(), stride = problem.axis[2].stride;
  const bool wide = width % 8 == 0 && stride <= 2 && axis[2].phases == stride && t.order != PhaseTmaOrder::kBatch &&
                    t.box[3] % 8 == 0 && !t.merged;
  double output = !contiguous ? 0.17 : wide ? 0.174 : width % 2 == 0 ? 0.32 : t.merged ? 0.3 : 0.39;
  if (contiguous && stride > 4 && t.width_groups == 1) output *= 1.6;
  const double outputs = output * double(problem.out_elements()) / (tiles * with_taps);
  const double bound = std::max(products, copies);
  const double serial = bound + outputs * (problem.in_channels_per_group() <= 8 ? 1.6 : 1) + 780 * passes;
  const double item = t.blocks == 1 ? serial : 2.2 * std::max(bound, 1.046 * serial);
  const double rounds = std::max(1.0, tiles * with_taps / (132.0 * t.blocks));
  return (rounds + 0.86 * (std::ceil(rounds) - rounds)) * item / 1.7e6;
}

inline bool finish_phase_tma_tile(const Problem& problem, const PhaseTmaAxis (&axis)[3], PhaseTmaTile& t) {
  const bool contiguous = problem.layout == Layout::kContiguous;
  const PhaseTmaShape& shape = kPhaseTmaShapes[t.shape];
  t.columns = shape.columns * (t.split == PhaseTmaSplit::kChannels ? 2 : 1);
  t.channel_blocks = static_cast<int>(ceil_div(problem.out_channels_per_group(), int64_t{t.columns}));
  const int64_t in = problem.in_channels_per_group(), width = problem.axis[2].out();
  t.chunk = in > 32 ? 64 : in > 16 ? 32 : 16;
  if (t.merged && (t.tiles[3] != 1 || width * t.box[2] * problem.axis[1].stride >= 8192)) return false;
  t.slots = contiguous ? axis[2].phases / t.width_groups * (t.merged ? axis[1].phases : 1) : 0;
  t.run_rows = t.run_width = t.lines = 0;
  if (contiguous) {
    const int64_t s = problem.axis[2].stride;
    t.run_rows = t.merged ? static_cast<int>((t.box[2] + 1) * problem.axis[1].stride - 1) : 1;
    t.run_width = static_cast<int>(t.merged ? width : std::min(width, (t.box[3] + 1) * s / t.width_groups));
    t.lines = t.box[0] * (t.box[1] + 1) * (t.merged ? 1 : t.box[2] + 1);
  }
  int blocks = 2 / shape.warpgroups;
  while (blocks > 0 &&
         !place_phase_tma_tile(t, contiguous, axis[0].max_taps * axis[1].max_taps * axis[2].max_taps, blocks)) {
    t.chunk = in > 32 ? 64 : in > 16 ? 32 : 16;
    --blocks;
  }
  if (blocks == 0) return false;
  t.chunks = static_cast<int>(ceil_div(in, int64_t{t.chunk}));
  double items = double(t.channel_blocks) * double(problem.groups) * double(problem.axis[0].stride);
  if (!t.merged) items *= double(problem.axis[1].stride);
  if (contiguous) {
    items *= t.width_groups;
  } else {
    items *= double(t.split == PhaseTmaSplit::kPhases ? ceil_div(problem.axis[2].stride, int64_t{2})
                                                      : problem.axis[2].stride);
  }
  for (const int64_t n : t.tiles) items *= double(n);
  if (items >= double(int64_t{1} << 31)) return false;
  // Outputs of a box are told apart by 31 bits.
  double span = 0, step = double(problem.out_channels);
  for (int a = 2; a >= 0; --a) {
    span += (t.box[a + 1] - 1) * step * double(problem.axis[a].stride);
    step *= double(problem.axis[a].out());
  }
  if (!contiguous && span + (t.box[0] - 1) * step >= double(int64_t{1} << 31)) return false;
  t.items = static_cast<int64_t>(items);
  t.cost_ms = phase_tma_products_ms(problem, axis, t);
  if (shape.row_tiles == 1) t.cost_ms *= 1.1;  // small tiles lose more than the model tells
  if (t.merged) t.cost_ms *= 1.1;
  return true;
}

// The cheapest tile; its cost is 1e9 or more if there is none.
inline PhaseTmaTile find_phase_tma_tile(const Problem& problem) {
  PhaseTmaTile best{};
  best.cost_ms = 2e9;
  const bool contiguous = problem.layout == Layout::kContiguous;
  const int64_t out = problem.out_channels_per_group(), stride = problem.axis[2].stride;
  PhaseTmaAxis axis[3];
  for (int a = 0; a < 3; ++a) {
    axis[a] = phase_tma_axis(problem.axis[a]);
    if (axis[a].phases == 0) return best;
  }
  const auto consider = [&](PhaseTmaTile& t, bool merged, int width_groups) {
    t.merged = merged, t.width_groups = width_groups;
    if (finish_phase_tma_tile(problem, axis, t) && t.cost_ms < best.cost_ms) best = t;
  };
  PhaseTmaBox boxes[4][2];  // of 64 to 512 cells, for one phase and for two
  bool known[4][2] = {};
  for (int shape = 0; shape < kNumPhaseTmaShapes; ++shape) {
    const PhaseTmaShape& of = kPhaseTmaShapes[shape];
    // Half of the columns may be in vain where two warpgroups store rows of odd length together.
    const bool half = out <= of.columns / 2 && (out < of.columns / 2 || problem.axis[2].out() % 2 == 0);
    if (of.columns >= 64 && half) continue;
    for (int split = 0; split < 3; ++split) {
      PhaseTmaTile t{};
      t.shape = shape;
      t.split = static_cast<PhaseTmaSplit>(split);
      if (t.split != PhaseTmaSplit::kCells && of.warpgroups == 1) continue;
      if (t.split == PhaseTmaSplit::kPhases && (axis[2].phases < 2 || (!contiguous && axis[2].phases < stride))) {
        continue;
      }
      if (t.split == PhaseTmaSplit::kChannels && out <= of.columns) continue;
      const int parts = t.split == PhaseTmaSplit::kCells ? of.warpgroups : 1, cells = 64 * of.row_tiles * parts;
      const int size = cells == 64 ? 0 : cells == 128 ? 1 : cells == 256 ? 2 : 3;
      const bool pairs = t.split == PhaseTmaSplit::kPhases;
      if (!known[size][pairs]) boxes[size][pairs] = phase_tma_box(problem, axis, cells, pairs);
      known[size][pairs] = true;
      static_cast<PhaseTmaBox&>(t) = boxes[size][pairs];
      if (t.cells == 0) continue;
      consider(t, false, 1);
      // Whole rows in one run are worth it where rows without taps stand between others.
      if (contiguous && problem.axis[2].out() % 8 != 0 && axis[1].phases < problem.axis[1].stride) {
        consider(t, true, 1);
      }
      // Many phases for few cells: several items share them.
      if (!contiguous || axis[2].phases < stride || problem.axis[2].out() % stride != 0 || t.items >= 264) continue;
      for (int phases = 2; phases < stride; phases *= 2) {
        if (stride % phases == 0) consider(t, false, static_cast<int>(stride) / phases);
      }
    }
  }
  return best;
}

inline PhaseTmaTile phase_tma_tile(const Problem& problem) { return last_result<find_phase_tma_tile>(problem); }

// "" if the family can make the call, else a reason.
inline std::string phase_tma_refusal(const Problem& problem) {
  if (problem.element_size() != 2) return "not 16 bits";
  if (problem.in_channels_per_group() < 8 || problem.out_channels_per_group() < 8) {
    return "fewer than 8 channels a group";
  }
  if (has_no_elements(problem)) return "no elements";
  constexpr int64_t kLimit = int64_t{1} << 24;
  for (const Axis& axis : problem.axis) {
    if (axis.stride > kPhaseTmaMaxStride) return "a stride of more than 16";
    if (axis.kernel > kMaxKernelTaps || axis.padding >= kLimit || axis.dilation >= kLimit ||
        (axis.kernel - 1) * axis.dilation >= kLimit) {
      return "a large kernel, dilation or padding";
    }
    if (axis.in >= kLimit || axis.out() >= kLimit) return "an axis of 2^24 or more";
  }
  if (problem.kernel_positions() > kMaxKernelTaps) return "a kernel of more than 2048 taps";
  if (std::max(problem.in_channels, problem.out_channels) >= kLimit || problem.batch >= kLimit) {
    return "2^24 channels or batch entries";
  }
  if (problem.in_positions() >= int64_t{1} << 31) return "2^31 input positions";
  if (double(problem.in_positions()) * double(problem.in_channels) >= double(int64_t{1} << 37)) {
    return "an input of 2^37 elements a batch entry";
  }
  if (problem.weight_elements() >= int64_t{1} << 31) return "2^31 weights";
  if (problem.layout == Layout::kChannelsLast && problem.in_channels_per_group() % 8 != 0) {
    return "channels_last with input channels a group that are no multiple of 8";
  }
  if (phase_tma_tile(problem).cost_ms >= 1e9) return "too many inputs of a block for shared memory";
  return "";
}

// On an H200, with the launch that packs, and the copy of channels-last weights that comes before.
inline double phase_tma_cost_ms(const Problem& problem) {
  const bool contiguous = problem.layout == Layout::kContiguous;
  const double inputs = contiguous ? double(problem.in_elements() * problem.element_size()) : 0.0;
  const double weights = double(problem.weight_elements() * problem.element_size());
  const double products = std::max(phase_tma_tile(problem).cost_ms, (problem.bytes() + inputs) / 4.3e9);
  const double copy = contiguous || problem.kernel_positions() == 1 ? 0 : weights / 0.8e9;
  return 0.0112 + products + (weights + inputs) / 1.25e9 + copy;
}

}  // namespace fastconvt
