// The 16-bit phase GEMM of channels_last layers on tensor copies: what it can make, and the tile of a block. Plain
// C++17: no Torch, no CUDA.
//
// An implicit matrix product, a phase at a time: rows are cells, columns output channels, the inner dimension input
// channels by the taps of the phase. A cell is a pixel, all channels side by side, so tensor copies bring inputs and
// weights as they lie in memory: a box of positions with its halo, and 64 output channels of a tap. A tap is an offset
// into the box, so kernel, stride, padding and dilation are run-time data. Weights that many items need are packed by a
// launch before, since copies of whole stages are faster.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>

#include "phase_tma.h"
#include "problem.h"

namespace fastconvt {

inline constexpr int kPhasePixelsMaxStages = 8;   // of weights on their way
inline constexpr int kPhasePixelsMaxBuffers = 4;  // of boxes of inputs
inline constexpr int kPhasePixelsTaskBytes = 256;
inline constexpr int kPhasePixelsMaxStride = 16;
inline constexpr int64_t kPhasePixelsShared = 226 * 1024;  // of a block at most

// Each warpgroup that multiplies makes 64 * row_tiles cells by `columns` output channels of a phase. Two that share a
// block share operands, too; two blocks, one warpgroup each, multiply and store in turns.
struct PhasePixelsShape {
  int row_tiles, columns;
  int warpgroups;
};
inline constexpr PhasePixelsShape kPhasePixelsShapes[] = {{2, 128, 2}, {1, 128, 2}, {4, 64, 2}, {2, 64, 2},
                                                          {2, 64, 1},  {4, 32, 1},  {2, 32, 1}};
inline constexpr int kNumPhasePixelsShapes = sizeof(kPhasePixelsShapes) / sizeof(kPhasePixelsShapes[0]);

// Whether copies can read weights as they lie in memory: output channels innermost, in whole vectors.
inline bool phase_pixels_weights_lie_innermost(const Problem& problem) {
  return (problem.weight_layout == Layout::kChannelsLast || problem.kernel_positions() == 1) &&
         problem.out_channels_per_group() % 8 == 0;
}

// Everything that sizes a block and the grid.
struct PhasePixelsTile : PhaseTmaBox {
  int shape;
  PhaseTmaSplit split;
  int columns;         // of a block, of one phase
  int channel_blocks;  // of a group
  int chunk, chunks;   // input channels of a stage: 16, 32 or 64
  int unit_bytes;      // of a tap's weights in a stage, of one warpgroup
  int taps_per_stage, stages, buffers;
  bool packed;  // a launch before packs weights as stages have them; else they are copied as they lie
  int64_t items;
  int tasks_at, terms_at, inputs_at, weights_at, staging_at, shared_bytes;
  int buffer_bytes, stage_bytes;
  int staging_pitch;  // from a cell's staged channels to the next one's
  int blocks;
  double cost_ms;
};

inline int phase_pixels_columns(const PhasePixelsTile& t) { return kPhasePixelsShapes[t.shape].columns; }

// Outputs of up to 64 channels leave straight from registers, where packed weights are in such an order.
inline bool phase_pixels_permutes(const PhasePixelsTile& t) { return t.packed && phase_pixels_columns(t) < 128; }

// The input channels of a group in packed tensors.
inline int64_t phase_pixels_channels(const PhasePixelsTile& t) { return int64_t{t.chunk} * t.chunks; }

// The box of `cells` cells: few tiles, small halos, long runs. `pairs`: it serves two phases of the last axis at once.
inline PhaseTmaBox phase_pixels_box(const Problem& problem, const PhaseTmaAxis (&axis)[3], int cells, bool pairs) {
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
inline bool place_phase_pixels_tile(PhasePixelsTile& t, int max_taps, int blocks) {
  const int64_t budget = kPhasePixelsShared / blocks - (blocks > 1 ? 2048 : 1024);
  const int units = t.split == PhaseTmaSplit::kCells ? 1 : 2;
  // Barriers, then what two tasks need.
  t.tasks_at = 2 * (kPhasePixelsMaxStages + kPhasePixelsMaxBuffers + 2) * 8;
  t.terms_at = t.tasks_at + 2 * kPhasePixelsTaskBytes;
  const int tables = round_up(t.terms_at + 2 * t.columns * 4, 1024);
  // Bulk stores want sources and targets that agree modulo 32 bytes.
  const PhasePixelsShape& shape = kPhasePixelsShapes[t.shape];
  t.staging_pitch = shape.columns * 2 + 32;
  const int staging = phase_pixels_permutes(t) ? 0 : 64 * shape.row_tiles * shape.warpgroups * t.staging_pitch;
  for (int stage = 16384; t.chunk >= 16; stage = stage > 4096 ? stage / 2 : 16384, t.chunk /= stage == 16384 ? 2 : 1) {
    t.unit_bytes = phase_pixels_columns(t) * t.chunk * 2;
    t.buffer_bytes = round_up(t.inputs * t.chunk * 2, 1024);
    t.taps_per_stage = std::clamp(stage / (t.unit_bytes * units), 1, max_taps);
    t.stage_bytes = t.taps_per_stage * t.unit_bytes * units;
    const int64_t left = budget - tables - staging;
    for (t.buffers = left > 6 * t.buffer_bytes ? 3 : 2; t.buffers >= 2; --t.buffers) {
      const int64_t stages = (left - t.buffers * t.buffer_bytes) / t.stage_bytes;
      if (stages < 3) continue;
      t.stages = static_cast<int>(std::min<int64_t>(stages, kPhasePixelsMaxStages));
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

// What takes a and b at once: the longer of the two, more where they are alike.
inline double phase_pixels_both(double a, double b) { return std::sqrt(std::sqrt(a * a * a * a + b * b * b * b)); }

// Milliseconds of the products' launch on an H200. An item takes the tensor unit's clocks and those of its copies
// (bytes, and rows of a copy) at once, then its outputs'. Two blocks of one warpgroup each hide little of each other.
// Fitted to measurements of all tiles of the dense benchmark layers.
inline double phase_pixels_products_ms(const Problem& problem, const PhaseTmaAxis (&axis)[3],
                                       const PhasePixelsTile& t) {
  const int columns = phase_pixels_columns(t);
  const double last = t.split == PhaseTmaSplit::kPhases ? axis[2].pairs : axis[2].phases;
  const double with_taps = double(axis[0].phases) * axis[1].phases * last;         // items of a box
  const double steps = double(problem.kernel_positions()) / with_taps * t.chunks;  // taps of a chunk
  double tiles = double(t.channel_blocks) * double(problem.groups);
  for (const int64_t n : t.tiles) tiles *= double(n);
  const int units = t.split == PhaseTmaSplit::kChannels ? 2 : 1;
  // A product reads 64 rows and its columns from shared memory, 128 bytes a clock.
  const double product = std::max(columns / 2.0, (2048 + columns * 32) / 128.0);
  const double narrow = (t.chunk > 16 ? 1 : 1.3) * (problem.in_channels_per_group() <= 8 ? 1.6 : 1);
  const double products = narrow * steps * (t.chunk / 16) * (t.cells / 64) * units * product + 18 * steps;
  const double bytes = steps * units * t.unit_bytes + double(t.chunks) * t.inputs * t.chunk * 2;
  const double weight_rows = t.packed ? 0.0 : steps * units * t.chunk * std::max(1, columns / 64);
  const double bound = phase_pixels_both(products, 0.01 * bytes + 1.2 * t.chunks * t.inputs + 2.0 * weight_rows);
  const double output = columns == 128 || phase_pixels_permutes(t) ? 0.14 : 0.2;
  double item = bound + output * double(problem.out_elements()) / (tiles * with_taps) + 740;
  if (t.blocks == 2) item = std::max(1.7 * bound, 1.83 * item);
  const double rounds = tiles * with_taps / (132.0 * t.blocks);
  return std::max(1.0, rounds + 0.81 * (std::ceil(rounds) - rounds)) * item / 1.7e6;
}

inline bool finish_phase_pixels_tile(const Problem& problem, const PhaseTmaAxis (&axis)[3], PhasePixelsTile& t) {
  const PhasePixelsShape& shape = kPhasePixelsShapes[t.shape];
  t.columns = shape.columns * (t.split == PhaseTmaSplit::kChannels ? 2 : 1);
  t.channel_blocks = static_cast<int>(ceil_div(problem.out_channels_per_group(), int64_t{t.columns}));
  const int64_t in = problem.in_channels_per_group();
  t.chunk = in > 32 ? 64 : in > 16 ? 32 : 16;
  int blocks = 2 / shape.warpgroups;
  while (blocks > 0 && !place_phase_pixels_tile(t, axis[0].max_taps * axis[1].max_taps * axis[2].max_taps, blocks)) {
    t.chunk = in > 32 ? 64 : in > 16 ? 32 : 16;
    --blocks;
  }
  if (blocks == 0) return false;
  t.chunks = static_cast<int>(ceil_div(in, int64_t{t.chunk}));
  double items =
      double(t.channel_blocks) * double(problem.groups) * double(problem.axis[0].stride) *
      double(problem.axis[1].stride) *
      double(t.split == PhaseTmaSplit::kPhases ? ceil_div(problem.axis[2].stride, int64_t{2}) : problem.axis[2].stride);
  for (const int64_t n : t.tiles) items *= double(n);
  if (items >= double(int64_t{1} << 31)) return false;
  // Outputs of a box are told apart by 31 bits.
  double span = 0, step = double(problem.out_channels);
  for (int a = 2; a >= 0; --a) {
    span += (t.box[a + 1] - 1) * step * double(problem.axis[a].stride);
    step *= double(problem.axis[a].out());
  }
  if (span + (t.box[0] - 1) * step >= double(int64_t{1} << 31)) return false;
  t.items = static_cast<int64_t>(items);
  t.cost_ms = phase_pixels_products_ms(problem, axis, t);
  if (t.packed) t.cost_ms += 0.003 + double(problem.weight_elements()) * 2.8e-9;
  return true;
}

// The cheapest tile; its cost is 1e9 or more if there is none.
inline PhasePixelsTile find_phase_pixels_tile(const Problem& problem, bool packed_only) {
  PhasePixelsTile best{};
  best.cost_ms = 2e9;
  const int64_t out = problem.out_channels_per_group(), stride = problem.axis[2].stride;
  PhaseTmaAxis axis[3];
  for (int a = 0; a < 3; ++a) {
    axis[a] = phase_tma_axis(problem.axis[a]);
    if (axis[a].phases == 0) return best;
  }
  const bool as_they_lie = phase_pixels_weights_lie_innermost(problem);
  const auto consider = [&](PhasePixelsTile& t) {
    for (int packed = as_they_lie && !packed_only ? 0 : 1; packed < 2; ++packed) {
      t.packed = packed != 0;
      if (finish_phase_pixels_tile(problem, axis, t) && t.cost_ms < best.cost_ms) best = t;
    }
  };
  PhaseTmaBox boxes[4][2];  // of 64 to 512 cells, for one phase and for two
  bool known[4][2] = {};
  for (int shape = 0; shape < kNumPhasePixelsShapes; ++shape) {
    const PhasePixelsShape& of = kPhasePixelsShapes[shape];
    if (of.columns >= 64 && out <= of.columns / 2) continue;
    for (int split = 0; split < 3; ++split) {
      PhasePixelsTile t{};
      t.shape = shape;
      t.split = static_cast<PhaseTmaSplit>(split);
      if (t.split != PhaseTmaSplit::kCells && of.warpgroups == 1) continue;
      if (t.split == PhaseTmaSplit::kPhases && (axis[2].phases < 2 || axis[2].phases < stride)) {
        continue;
      }
      if (t.split == PhaseTmaSplit::kChannels && out <= of.columns) continue;
      // Tiles that were the fastest for no layer.
      if (((of.row_tiles == 1 && split != 0) || (of.columns == 64 && split == 2))) continue;
      if (of.row_tiles == 2 && of.columns == 32 && best.cost_ms < 1e9) continue;
      const int parts = t.split == PhaseTmaSplit::kCells ? of.warpgroups : 1, cells = 64 * of.row_tiles * parts;
      const int size = cells == 64 ? 0 : cells == 128 ? 1 : cells == 256 ? 2 : 3;
      const bool pairs = t.split == PhaseTmaSplit::kPhases;
      if (!known[size][pairs]) boxes[size][pairs] = phase_pixels_box(problem, axis, cells, pairs);
      known[size][pairs] = true;
      static_cast<PhaseTmaBox&>(t) = boxes[size][pairs];
      if (t.cells == 0) continue;
      consider(t);
    }
  }
  return best;
}

inline PhasePixelsTile find_cheapest_phase_pixels_tile(const Problem& problem) {
  return find_phase_pixels_tile(problem, false);
}
inline PhasePixelsTile phase_pixels_tile(const Problem& problem) {
  return last_result<find_cheapest_phase_pixels_tile>(problem);
}

// "" if the family can make the call, else a reason.
inline std::string phase_pixels_refusal(const Problem& problem) {
  if (problem.layout != Layout::kChannelsLast) return "not channels_last";
  if (problem.element_size() != 2) return "not 16 bits";
  if (problem.in_channels_per_group() < 8 || problem.out_channels_per_group() < 8) {
    return "fewer than 8 channels a group";
  }
  if (has_no_elements(problem)) return "no elements";
  constexpr int64_t kLimit = int64_t{1} << 24;
  for (const Axis& axis : problem.axis) {
    if (axis.stride > kPhasePixelsMaxStride) return "a stride of more than 16";
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
  if (phase_pixels_tile(problem).cost_ms >= 1e9) return "too many inputs of a block for shared memory";
  return "";
}

// On an H200, with the launch that packs.
inline double phase_pixels_cost_ms(const Problem& problem) {
  const double packing = problem.in_channels_per_group() % 8 != 0 ? double(problem.in_elements()) * 8.7e-10 : 0.0;
  return 0.0082 + phase_pixels_both(phase_pixels_tile(problem).cost_ms, problem.bytes() / 4e9) + packing;
}

}  // namespace fastconvt
