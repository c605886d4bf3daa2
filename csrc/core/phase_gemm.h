// The phase GEMM family: what it can make, and the tile of a block. Plain C++17: no Torch, no CUDA.
//
// Along each axis an output is o = stride * cell + f, 0 <= f < stride; the cells of one (f0, f1, f2) are an implicit
// matrix product: rows are cells, columns output channels, and the inner dimension is input channels by the taps of
// that phase. A tap reads the input at cell + shift, so a block stages a box of input with its halo once for all of
// them, and kernel, stride, padding and dilation are run-time data. Channels-last blocks make one phase; contiguous
// ones make all phases of the last axis one after the other, since their outputs interleave in memory.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>

#include "problem.h"

namespace fastconvt {

inline constexpr int kPhaseGemmWarps = 4;
inline constexpr int kPhaseGemmMaxStages = 6;  // of weights on their way
inline constexpr int kPhaseGemmMaxStride = 32;
inline constexpr int kPhaseGemmMaxTaps = 2048;
inline constexpr int64_t kPhaseGemmShared = 225 * 1024;  // of a block at most

// A block's rows are kPhaseGemmWarps * 16 * row_tiles cells, its columns 8 * column_tiles output channels.
struct PhaseGemmShape {
  int row_tiles, column_tiles;
  int blocks;  // that share a multiprocessor, by registers, in 16 bits
};
inline constexpr PhaseGemmShape kPhaseGemmShapes[] = {{4, 8, 2}, {2, 16, 2}, {4, 4, 2}, {2, 8, 3}, {1, 16, 2},
                                                      {4, 2, 3}, {2, 4, 4},  {1, 8, 4}, {2, 2, 4}, {1, 4, 4}};
inline constexpr int kNumPhaseGemmShapes = sizeof(kPhaseGemmShapes) / sizeof(kPhaseGemmShapes[0]);

// Which shapes are made: float32 needs more registers for an accumulator.
constexpr bool phase_gemm_allows(const PhaseGemmShape& shape, bool three) {
  return !three || shape.row_tiles * shape.column_tiles <= 16;
}

// One phase f along an axis: its taps first_tap, first_tap + tap_step, ...; tap number j reads the input at
// cell + shift - j * dilation / gcd.
struct PhaseGemmPhase {
  int first_tap, num_taps, shift;
};

inline PhaseGemmPhase phase_gemm_phase(const Axis& axis, int64_t f) {
  const int64_t phase = axis.phase(f), first = axis.first_tap(phase), taps = axis.num_taps(phase);
  if (taps <= 0) return {static_cast<int>(axis.kernel), 0, 0};
  return {static_cast<int>(first), static_cast<int>(taps), static_cast<int>(axis.base(f) + axis.offset(phase, first))};
}

// The phases of one axis, summed up.
struct PhaseGemmAxis {
  int cells;                  // of each phase, at most
  int tap_step;               // stride / gcd
  int offset_step;            // dilation / gcd
  int extent;                 // inputs beyond the cells that the taps of any one phase reach
  int min_shift, all_extent;  // the same over all phases together
  int max_taps, min_taps;     // of the phases that have any
  int phases;                 // that have any
};

inline PhaseGemmAxis phase_gemm_axis(const Axis& axis) {
  PhaseGemmAxis a{};
  const int64_t gcd = std::gcd(axis.stride, axis.dilation);
  a.cells = static_cast<int>(ceil_div(axis.out(), axis.stride));
  a.tap_step = static_cast<int>(axis.stride / gcd);
  a.offset_step = static_cast<int>(axis.dilation / gcd);
  int low = std::numeric_limits<int>::max(), high = std::numeric_limits<int>::min();
  a.min_taps = std::numeric_limits<int>::max();
  for (int64_t f = 0; f < axis.stride; ++f) {
    const PhaseGemmPhase phase = phase_gemm_phase(axis, f);
    if (phase.num_taps == 0) continue;
    ++a.phases;
    const int span = (phase.num_taps - 1) * a.offset_step;
    low = std::min(low, phase.shift - span);
    high = std::max(high, phase.shift);
    a.extent = std::max(a.extent, span);
    a.max_taps = std::max(a.max_taps, phase.num_taps);
    a.min_taps = std::min(a.min_taps, phase.num_taps);
  }
  a.min_shift = low;
  a.all_extent = high - low;
  return a;
}

// Everything that sizes a block and the grid. Boxes and tiles are (batch, depth, height, width).
struct PhaseGemmTile {
  int shape;    // index into kPhaseGemmShapes
  int box[4];   // cells of a block
  int halo[4];  // inputs of a block
  int inputs;
  int64_t tiles[4];
  int passes;          // phases of the last axis that an item makes one after the other
  int64_t phases;      // others: different items
  int channel_blocks;  // of a group
  int granules;        // of 16 bytes of input channels in a chunk: 2 or 4
  int chunks;
  int taps_per_stage;
  int stages;     // of weights
  int buffers;    // of chunks of inputs
  bool resident;  // an item's chunks stay staged for all passes
  bool direct;    // channels-last outputs are stored from registers
  int max_taps;   // of an item
  int64_t items;
  // Shared memory in bytes: tables, barriers, chunks of inputs, stages of weights, outputs.
  int pitch;  // of a staged input: 16 bytes beyond its granules keep banks apart
  int buffer_bytes, stage_bytes, staging_pitch;
  int rows_at, taps_at, barriers_at, inputs_at, weights_at, staging_at, shared_bytes;
  int blocks;  // that share a multiprocessor
  double cost_ms;
};

inline int phase_gemm_columns(const PhaseGemmTile& t) { return kPhaseGemmShapes[t.shape].column_tiles * 8; }
inline int phase_gemm_rows(const PhaseGemmTile& t) {
  return kPhaseGemmShapes[t.shape].row_tiles * 16 * kPhaseGemmWarps;
}

// Blocks that share a multiprocessor, by registers.
constexpr int phase_gemm_blocks(const PhaseGemmShape& shape, int element_size) {
  return element_size == 4 ? std::min(shape.blocks, 3) : shape.blocks;
}

// The bytes of input channels of one group in packed inputs and weights.
inline int64_t phase_gemm_channel_bytes(const PhaseGemmTile& t) { return int64_t{t.chunks} * t.granules * 16; }

// Chooses the box of a tile of `rows` cells: few blocks, small halos, long runs of contiguous outputs.
inline void choose_phase_gemm_box(const Problem& problem, const PhaseGemmAxis (&axis)[3], int rows,
                                  PhaseGemmTile& tile) {
  const bool contiguous = problem.layout == Layout::kContiguous;
  const auto fit = [](int64_t most, int64_t cells) {
    most = std::max<int64_t>(1, std::min(most, cells));
    return static_cast<int>(ceil_div(cells, ceil_div(cells, most)));
  };
  double best = -1;
  const int widths[6] = {axis[2].cells, 128, 64, 32, 16, 8};
  for (int i = 0; i < 6; ++i) {
    if (widths[i] > rows || (i > 0 && widths[i] >= axis[2].cells)) continue;
    int last_height = 0;
    for (int most : {rows, 16, 8, 4}) {
      int box[4], halo[4];
      box[3] = widths[i];
      box[2] = fit(std::min(rows / box[3], most), axis[1].cells);
      if (box[2] == last_height) continue;
      last_height = box[2];
      box[1] = fit(rows / (box[3] * box[2]), axis[0].cells);
      box[0] = fit(rows / (box[3] * box[2] * box[1]), problem.batch);
      double tiles = static_cast<double>(ceil_div(problem.batch, int64_t{box[0]}));
      halo[0] = box[0];
      double inputs = halo[0];
      for (int a = 0; a < 3; ++a) {
        halo[a + 1] = box[a + 1] + (a == 2 && contiguous ? axis[a].all_extent : axis[a].extent);
        inputs *= halo[a + 1];
        tiles *= ceil_div(axis[a].cells, box[a + 1]);
      }
      double cost = rows + 0.25 * inputs;
      if (contiguous) cost += 10.0 * rows / (static_cast<double>(box[3]) * static_cast<double>(problem.element_size()));
      cost *= tiles;
      if (best >= 0 && cost >= best) continue;
      best = cost;
      std::copy(box, box + 4, tile.box);
      std::copy(halo, halo + 4, tile.halo);
    }
  }
  tile.tiles[0] = ceil_div(problem.batch, int64_t{tile.box[0]});
  for (int a = 0; a < 3; ++a) tile.tiles[a + 1] = ceil_div(int64_t{axis[a].cells}, int64_t{tile.box[a + 1]});
}

// Divides shared memory for `blocks` blocks a multiprocessor; false if it is too small.
inline bool place_phase_gemm_tile(PhaseGemmTile& t, int rows, int columns, int least_taps, bool contiguous,
                                  int blocks) {
  const int64_t budget = kPhaseGemmShared / blocks - 1280;
  const int groups = ceil_div(least_taps, t.taps_per_stage);  // stages of a chunk
  t.rows_at = round_up(t.inputs * 4, 8);
  t.taps_at = t.rows_at + rows * 8;
  t.barriers_at = round_up(t.taps_at + t.max_taps * 4, 8);
  t.inputs_at = round_up(t.barriers_at + 4 * kPhaseGemmMaxStages * 8, 128);
  for (int more = 1; more >= 0; --more) {
    for (t.stages = kPhaseGemmMaxStages; t.stages >= (blocks > 1 ? 3 : 2); --t.stages) {
      // The chunks of an item that stay are followed by the next one's, as far as there is room.
      t.buffers =
          t.resident || t.chunks == 1 ? t.chunks * (1 + more) : std::max(2, 1 + ceil_div(t.stages - 2 + more, groups));
      t.weights_at = round_up(t.inputs_at + t.buffers * t.buffer_bytes, 128);
      t.staging_at = t.weights_at + t.stages * t.stage_bytes;
      const int64_t shared = int64_t{t.staging_at} + int64_t{t.direct     ? 1
                                                             : contiguous ? columns
                                                                          : rows} *
                                                         t.staging_pitch;
      if (shared > budget || t.buffers > 2 * kPhaseGemmMaxStages) continue;
      t.shared_bytes = static_cast<int>(shared);
      t.blocks = blocks;
      return true;
    }
  }
  return false;
}

// Milliseconds of the products' launch, fitted to an H200. A multiprocessor is bound by its matrix units, by its loads
// or by what its blocks do one after the other. An asynchronous product takes the same time for 16 to 128 columns,
// since its left operand comes from registers.
inline double phase_gemm_products_ms(const Problem& problem, const PhaseGemmAxis (&axis)[3], const PhaseGemmTile& t) {
  const PhaseGemmShape& shape = kPhaseGemmShapes[t.shape];
  const int element = static_cast<int>(problem.element_size());
  const double taps = double(problem.kernel_positions()) / double(t.phases);  // of an average item, all passes
  const double steps = taps * double(ceil_div(problem.in_channels_per_group() * element, int64_t{32}));
  const double columns = 8.0 * shape.column_tiles;
  const bool three = element == 4 && !problem.allow_tf32;
  const double products = steps * shape.row_tiles * (three ? 40.0 * shape.column_tiles : 58.0);
  const double stages = std::ceil(taps / t.taps_per_stage) * t.chunks;
  const double loads = (taps * columns + double(t.inputs) * (t.resident ? 1 : t.passes)) * t.chunks * t.granules * 16;
  const bool contiguous = problem.layout == Layout::kContiguous;
  const bool unaligned = problem.axis[2].out() * element % 16 != 0;
  const double outputs = contiguous ? 64.0 * shape.row_tiles * columns * t.passes * (unaligned ? 0.52 : 0.33) : 0;
  const double all = double(t.items) / 132.0, whole = std::ceil(all);
  // Channels-last items without taps are stored at once.
  const double with_taps = contiguous ? 1 : double(axis[0].phases) * axis[1].phases * axis[2].phases / double(t.phases);
  const double serial = products + 615 * stages + outputs + 2000 + 5000 * with_taps;
  const double item = std::max({products, loads / 18.5, serial / std::min<double>(t.blocks, whole)});
  return (all > 4 * t.blocks ? all : whole) * item / 1.7e6;
}

// What follows from the box: shared memory, the grid and the time on an H200.
inline void finish_phase_gemm_tile(const Problem& problem, const PhaseGemmAxis (&axis)[3], PhaseGemmTile& t) {
  const int element = static_cast<int>(problem.element_size());
  const int columns = phase_gemm_columns(t), rows = phase_gemm_rows(t);
  const bool contiguous = problem.layout == Layout::kContiguous;
  t.cost_ms = 1e9;
  const int64_t inputs = int64_t{t.halo[0]} * t.halo[1] * t.halo[2] * t.halo[3];
  if (inputs > 8192) return;
  t.inputs = static_cast<int>(inputs);
  t.passes = contiguous ? static_cast<int>(problem.axis[2].stride) : 1;
  t.phases = problem.axis[0].stride * problem.axis[1].stride * (contiguous ? 1 : problem.axis[2].stride);
  t.channel_blocks = static_cast<int>(ceil_div(problem.out_channels_per_group(), int64_t{columns}));
  t.granules = problem.in_channels_per_group() * element <= 32 ? 2 : 4;
  t.chunks = static_cast<int>(ceil_div(problem.in_channels_per_group() * element, int64_t{t.granules} * 16));
  t.pitch = t.granules * 16 + 16;
  t.buffer_bytes = t.inputs * t.pitch;
  const int outer_taps = axis[0].max_taps * axis[1].max_taps;
  const int least_taps = axis[0].min_taps * axis[1].min_taps * axis[2].min_taps;
  t.max_taps = outer_taps * (contiguous ? static_cast<int>(problem.axis[2].kernel) : axis[2].max_taps);
  const int unit = columns * t.granules * 16;
  t.taps_per_stage = std::clamp(8192 / unit, 1, outer_taps * axis[2].max_taps);
  t.stage_bytes = t.taps_per_stage * unit;
  t.resident = t.passes > 1 && t.chunks <= 2;
  // Contiguous: a channel's outputs of all phases; else a cell's channels. Both pitches keep banks apart.
  t.staging_pitch = contiguous ? round_up(rows * t.passes * element - 16, 64) + 16 : columns * element + 16;
  t.direct = !contiguous && problem.out_channels_per_group() * element % 16 == 0 && columns >= 64 / element;
  if (t.direct) t.staging_pitch = columns * 4;  // their bias terms, a row
  double items = double(t.phases) * t.channel_blocks * double(problem.groups);
  for (const int64_t tiles : t.tiles) items *= double(tiles);
  if (items >= double(int64_t{1} << 31)) return;
  t.items = static_cast<int64_t>(items);
  int blocks = phase_gemm_blocks(kPhaseGemmShapes[t.shape], element);
  while (blocks > 0 && !place_phase_gemm_tile(t, rows, columns, least_taps, contiguous, blocks)) --blocks;
  if (blocks == 0) return;
  t.cost_ms = phase_gemm_products_ms(problem, axis, t);
}

inline bool phase_gemm_is_empty(const Problem& problem) {
  bool empty = problem.batch <= 0 || problem.in_channels <= 0 || problem.out_channels <= 0;
  for (const Axis& axis : problem.axis) empty = empty || axis.in <= 0 || axis.out() <= 0;
  return empty;
}

// The cheapest tile.
inline PhaseGemmTile phase_gemm_tile(const Problem& problem) {
  PhaseGemmTile best{};
  best.cost_ms = 2e9;
  if (phase_gemm_is_empty(problem)) return best;
  for (const Axis& axis : problem.axis) {
    if (axis.stride > kPhaseGemmMaxStride) return best;
  }
  PhaseGemmAxis axis[3];
  for (int a = 0; a < 3; ++a) axis[a] = phase_gemm_axis(problem.axis[a]);
  const bool three = problem.element_size() == 4 && !problem.allow_tf32;
  PhaseGemmTile boxes[3];
  for (int i = 0; i < 3; ++i) choose_phase_gemm_box(problem, axis, kPhaseGemmWarps * 16 << i, boxes[i]);
  for (int shape = 0; shape < kNumPhaseGemmShapes; ++shape) {
    const int row_tiles = kPhaseGemmShapes[shape].row_tiles;
    if (!phase_gemm_allows(kPhaseGemmShapes[shape], three)) continue;
    PhaseGemmTile tile = boxes[row_tiles == 4 ? 2 : row_tiles - 1];
    tile.shape = shape;
    finish_phase_gemm_tile(problem, axis, tile);
    if (tile.cost_ms < best.cost_ms) best = tile;
  }
  return best;
}

// Whether inputs must be copied to the layout that blocks read: (batch, positions, groups, channels), the channels of
// a group padded with zeros to whole chunks.
inline bool phase_gemm_packs_input(const Problem& problem) {
  return problem.layout == Layout::kContiguous || problem.in_channels_per_group() * problem.element_size() % 16 != 0;
}

// "" if the family can make the call, else a reason.
inline std::string phase_gemm_refusal(const Problem& problem) {
  if (problem.dtype == DType::kFloat64) return "float64";
  if (problem.in_channels_per_group() < 8 || problem.out_channels_per_group() < 8) {
    return "fewer than 8 channels a group";
  }
  if (phase_gemm_is_empty(problem)) return "no elements";
  constexpr int64_t kLimit = int64_t{1} << 24;
  for (const Axis& axis : problem.axis) {
    if (axis.stride > kPhaseGemmMaxStride) return "a stride of more than 32";
    if (axis.kernel > kPhaseGemmMaxTaps || axis.padding >= kLimit || axis.dilation >= kLimit ||
        (axis.kernel - 1) * axis.dilation >= kLimit) {
      return "a large kernel, dilation or padding";
    }
    if (axis.in >= kLimit || axis.out() >= kLimit) return "an axis of 2^24 or more";
  }
  if (problem.kernel_positions() > kPhaseGemmMaxTaps) return "a kernel of more than 2048 taps";
  if (std::max(problem.in_channels, problem.out_channels) >= kLimit || problem.batch >= kLimit) {
    return "2^24 channels or batch entries";
  }
  if (problem.in_positions() >= int64_t{1} << 31) return "2^31 input positions";
  if (double(problem.in_positions()) * double(problem.in_channels) * 8 >= double(int64_t{1} << 34)) {
    return "an input of 2^31 elements a batch entry";
  }
  if (problem.dtype == DType::kFloat32 && !problem.allow_tf32) {
    // One rounding a step of 8 products, at most, of sums of one sign: 2^-20 holds up to some 2500 products.
    double products = double(problem.in_channels_per_group());
    for (const Axis& axis : problem.axis) products *= phase_gemm_axis(axis).max_taps;
    if (products > 2048) return "float32 sums of more than 2048 products";
  }
  const PhaseGemmTile tile = phase_gemm_tile(problem);
  if (tile.cost_ms >= 1e9) return "too many blocks, or too many inputs of a block for shared memory";
  if (double(tile.box[0]) * double(problem.in_positions()) * double(problem.groups) *
          double(phase_gemm_channel_bytes(tile) / 16) >=
      double(int64_t{1} << 31)) {
    return "inputs of a block too far apart";
  }
  return "";
}

// On an H200, with the launch that packs.
inline double phase_gemm_cost_ms(const Problem& problem) {
  const double weights = 2.0 * double(problem.weight_elements() * problem.element_size());
  const double inputs =
      phase_gemm_packs_input(problem) ? 2.0 * double(problem.in_elements() * problem.element_size()) : 0.0;
  return 0.016 + 1.05 * std::max(phase_gemm_tile(problem).cost_ms, problem.bytes() / 3.2e9) + weights / 0.81e9 +
         inputs / 1.66e9;
}

}  // namespace fastconvt
