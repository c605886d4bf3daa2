// The TF32 phase GEMM on tensor copies: what it can make, and the tile of a block. Plain C++17: no Torch, no CUDA.
//
// The same implicit matrix product and the same boxes of cells as in phase_tma.h. TF32 products take both operands
// along the inner dimension only, so weights are packed for them; copies of inputs round them to TF32 on the way.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>

#include "axis_phases.h"
#include "phase_tma.h"
#include "problem.h"

namespace fastconvt {

inline constexpr int kPhaseTf32MaxStages = 8;   // of weights on their way
inline constexpr int kPhaseTf32MaxBuffers = 4;  // of boxes of inputs
inline constexpr int kPhaseTf32TaskBytes = 256;
inline constexpr int kPhaseTf32MaxSum = 1 << 17;  // products that are added one after the other

// As in phase_tma.h.
inline constexpr PhaseTmaShape kPhaseTf32Shapes[] = {{2, 128, 2}, {1, 128, 2}, {4, 64, 2},
                                                     {2, 64, 2},  {4, 32, 1},  {2, 32, 1}};
inline constexpr int kNumPhaseTf32Shapes = sizeof(kPhaseTf32Shapes) / sizeof(kPhaseTf32Shapes[0]);

// Everything that sizes a block and the grid.
struct PhaseTf32Tile : PhaseTmaBox {
  int shape;
  PhaseTmaSplit split;
  int columns;         // of a block, of one phase
  int channel_blocks;  // of a group
  int chunk, chunks;   // input channels of a stage: 8, 16 or 32
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

inline int phase_tf32_columns(const PhaseTf32Tile& t) { return kPhaseTf32Shapes[t.shape].columns; }

// The elements of a staged phase of a channel.
inline int phase_tf32_slot_pitch(const PhaseTf32Tile& t) { return t.cells + 8; }

// The input channels of a group in packed tensors.
inline int64_t phase_tf32_channels(const PhaseTf32Tile& t) { return int64_t{t.chunk} * t.chunks; }

// Divides shared memory for `blocks` blocks a multiprocessor; false if it is too small.
inline bool place_phase_tf32_tile(PhaseTf32Tile& t, bool contiguous, int max_taps, int blocks) {
  const int64_t budget = kPhaseTmaShared / blocks - (blocks > 1 ? 2048 : 1024);
  const int units = t.split == PhaseTmaSplit::kCells ? 1 : 2;
  // Barriers, then what two tasks need.
  t.tasks_at = 2 * (kPhaseTf32MaxStages + kPhaseTf32MaxBuffers + 2) * 8;
  t.lines_at = t.tasks_at + 2 * kPhaseTf32TaskBytes;
  t.terms_at = t.lines_at + 2 * t.lines * 16;
  t.table_at = t.terms_at + 2 * t.columns * 4;
  const int tables = round_up(t.table_at + t.run_rows * t.run_width * 2, 1024);
  // Odd multiples of 16 bytes keep banks apart.
  t.channel_pitch = (t.slots * phase_tf32_slot_pitch(t) / 4 | 1) * 16;
  const int staging = contiguous ? t.columns * t.channel_pitch : 0;
  for (int stage = 16384; t.chunk >= 8; stage = stage > 4096 ? stage / 2 : 16384, t.chunk /= stage == 16384 ? 2 : 1) {
    t.unit_bytes = phase_tf32_columns(t) * t.chunk * 4;
    t.buffer_bytes = round_up(t.inputs * t.chunk * 4, 1024);
    t.taps_per_stage = std::clamp(stage / (t.unit_bytes * units), 1, max_taps);
    t.stage_bytes = t.taps_per_stage * t.unit_bytes * units;
    const int64_t left = budget - tables - staging;
    for (t.buffers = left > 6 * t.buffer_bytes ? 3 : 2; t.buffers >= 2; --t.buffers) {
      const int64_t stages = (left - t.buffers * t.buffer_bytes) / t.stage_bytes;
      if (stages < 3) continue;
      t.stages = static_cast<int>(std::min<int64_t>(stages, kPhaseTf32MaxStages));
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
inline double phase_tf32_products_ms(const Problem& problem, const PhaseTmaAxis (&axis)[3], const PhaseTf32Tile& t) {
  const bool contiguous = problem.layout == Layout::kContiguous;
  const int columns = phase_tf32_columns(t);
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
  const double narrow = t.chunk == 32 ? 1 : t.chunk == 16 ? 1.3 : 1.17;
  const double products = narrow * taps * t.chunks * (t.chunk / 8) * (t.cells / 64) * units * product;
  const double boxes = t.chunks * passes;
  const double bytes = t.chunks * taps * units * double(t.unit_bytes) + boxes * t.inputs * t.chunk * 4;
  const double copies = 0.0169 * bytes + 1.48 * boxes * t.inputs;
  const int64_t width = problem.axis[2].out(), stride = problem.axis[2].stride;
  const bool wide = width % 8 == 0 && stride <= 2 && axis[2].phases == stride && t.order != PhaseTmaOrder::kBatch &&
                    t.box[3] % 8 == 0 && !t.merged;
  double output = wide ? 0.21 : 0.7;
  if (!contiguous) output = problem.out_channels_per_group() % 4 == 0 ? 0.185 : 0.9;
  if (contiguous && stride > 4) output *= 1.5;
  if (t.chunk == 8) output *= 3;
  const double outputs = output * double(problem.out_elements()) / (tiles * with_taps);
  const double bound = std::max(products, copies) + 0.11 * std::min(products, copies);
  const double serial = bound + outputs + 980 * passes + 6 * taps * t.chunks;
  const double item = t.blocks == 1 ? serial : std::max(1.8 * serial, 2 * bound);
  const double rounds = std::max(1.0, tiles * with_taps / (132.0 * t.blocks));
  return (rounds + 0.74 * (std::ceil(rounds) - rounds)) * item / 1.7e6;
}

inline bool finish_phase_tf32_tile(const Problem& problem, const PhaseTmaAxis (&axis)[3], PhaseTf32Tile& t) {
  const bool contiguous = problem.layout == Layout::kContiguous;
  const PhaseTmaShape& shape = kPhaseTf32Shapes[t.shape];
  t.columns = shape.columns * (t.split == PhaseTmaSplit::kChannels ? 2 : 1);
  t.channel_blocks = static_cast<int>(ceil_div(problem.out_channels_per_group(), int64_t{t.columns}));
  const int64_t in = problem.in_channels_per_group(), width = problem.axis[2].out();
  const int chunk = in > 16 ? 32 : in > 8 ? 16 : 8;
  t.chunk = chunk;
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
         !place_phase_tf32_tile(t, contiguous, axis[0].max_taps * axis[1].max_taps * axis[2].max_taps, blocks)) {
    t.chunk = chunk;
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
  t.cost_ms = phase_tf32_products_ms(problem, axis, t);
  return true;
}

// The cheapest tile; its cost is 1e9 or more if there is none.
inline PhaseTf32Tile find_phase_tf32_tile(const Problem& problem) {
  PhaseTf32Tile best{};
  best.cost_ms = 2e9;
  const bool contiguous = problem.layout == Layout::kContiguous;
  const int64_t out = problem.out_channels_per_group(), stride = problem.axis[2].stride;
  PhaseTmaAxis axis[3];
  for (int a = 0; a < 3; ++a) {
    axis[a] = phase_tma_axis(problem.axis[a]);
    if (axis[a].phases == 0) return best;
  }
  // The matrix unit truncates where it adds.
  const double sum = double(problem.in_channels_per_group()) * axis[0].max_taps * axis[1].max_taps * axis[2].max_taps;
  if (sum > kPhaseTf32MaxSum) return best;
  const auto consider = [&](PhaseTf32Tile& t, bool merged, int width_groups) {
    t.merged = merged, t.width_groups = width_groups;
    if (finish_phase_tf32_tile(problem, axis, t) && t.cost_ms < best.cost_ms) best = t;
  };
  PhaseTmaBox boxes[4][2];  // of 64 to 512 cells, for one phase and for two
  bool known[4][2] = {};
  for (int shape = 0; shape < kNumPhaseTf32Shapes; ++shape) {
    const PhaseTmaShape& of = kPhaseTf32Shapes[shape];
    if (of.columns >= 64 && out <= of.columns / 2) continue;
    for (int split = 0; split < 3; ++split) {
      PhaseTf32Tile t{};
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

inline PhaseTf32Tile phase_tf32_tile(const Problem& problem) { return last_result<find_phase_tf32_tile>(problem); }

// "" if the family can make the call, else a reason.
inline std::string phase_tf32_refusal(const Problem& problem) {
  if (problem.dtype != DType::kFloat32 || !problem.allow_tf32) return "not TF32";
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
  if (problem.layout == Layout::kChannelsLast && problem.in_channels_per_group() % 4 != 0) {
    return "channels_last with input channels a group that are no multiple of 4";
  }
  if (phase_tf32_tile(problem).cost_ms >= 1e9) return "long sums, or too many inputs of a block for shared memory";
  return "";
}

// On an H200, with the launch that packs.
inline double phase_tf32_cost_ms(const Problem& problem) {
  const double inputs = problem.layout == Layout::kContiguous ? double(problem.in_elements()) * 4 : 0.0;
  const double weights = double(problem.weight_elements()) * 4;
  const double products = std::max(phase_tf32_tile(problem).cost_ms, (problem.bytes() + inputs) / 2.8e9);
  return 0.0098 + products + 2 * weights / 2.9e9 + 2 * inputs / 2.3e9;
}

}  // namespace fastconvt
