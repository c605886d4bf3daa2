// The overlap-add family: transposed convolutions with few output channels a group and many taps, most of which overlap
// in an output. What it can make, and the tile of a block. Plain C++17: no Torch, no CUDA.
//
// One matrix product whose rows are cells, whose columns are what a cell holds, and whose inner dimension is (offset,
// input channel). A cell is `bases` neighbouring bases (problem.h) along each axis. Along an axis it makes `stride`
// outputs for each, its residues: u = 0, 1, ... Residue u reads the input at bases * cell + e by the tap t with
// t * dilation = u - stride * e, if there is one; e is the offset. So every sum is an output, an offset shifts all
// cells of a block alike, and nothing is folded.
//
// A column tile is eight columns: a box of residues and output channels that share their offsets.
//
// A block makes few column tiles of many cells, step by step of the input channels; or, where strides are long and
// column tiles many, it is wide: it holds all channels of few cells, and its warps go over the column tiles.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>

#include "problem.h"

namespace fastconvt {

inline constexpr int64_t kOverlapAddMaxWarps = 16;  // of a block, and of a multiprocessor
inline constexpr int kOverlapAddMaxTiles = 3;       // column tiles of a warp
inline constexpr int kOverlapAddWords = 8;          // of 32 bits of input channels, in a step
// Additions to a sum of float32, one after the other. Equal terms round alike, in the worst case by 2^-26 of the sum
// each; so few of them, with what the products lose, stay below 2^-20.
inline constexpr int kOverlapAddAdds = 26;
inline constexpr int kOverlapAddWideAdds = 40;  // where products lose less
inline constexpr int kOverlapAddWideRows = 48;  // cells of an item (overlap_add_choose_wide)
inline constexpr int64_t kOverlapAddShared = 227 * 1024;

// Cells of a warp with that many column tiles.
constexpr int overlap_add_rows(int tiles) { return tiles == 3 ? 48 : 64; }
// Warps of a multiprocessor where blocks are wide; `strict`: float32 that is not TF32.
constexpr int64_t overlap_add_wide_warps(bool strict) { return strict ? 12 : kOverlapAddMaxWarps; }
// Bytes of shared memory of a fragment of weights, which strictly are two terms, and of a position in a step where a
// block is wide, which strictly is three.
constexpr int overlap_add_fragment_bytes(bool strict) { return strict ? 512 : 256; }
constexpr int overlap_add_wide_bytes(bool strict) { return strict ? 48 : 32; }

struct OverlapAddTile {
  bool strict;
  std::array<int64_t, 3> bases;  // of a cell
  std::array<int64_t, 3> cells;  // of the problem
  std::array<int64_t, 3> span;   // residues of a column tile
  std::array<int64_t, 3> spans;  // column tiles along an axis
  int64_t span_channels, channel_spans;
  // Where one column tile would be all, there are two: the second one `copy_shift` bases further along copy_axis, with
  // the same weights.
  int64_t copies, copy_axis, copy_shift;
  int64_t columns;             // column tiles in all
  std::array<int64_t, 3> low;  // offsets of all column tiles: low .. low + reach - 1
  std::array<int64_t, 3> reach;
  std::array<int64_t, 3> support;   // the most that one column tile has
  int64_t warp_columns;             // column tiles of a warp
  int64_t row_warps, column_warps;  // of a team
  int64_t teams;                    // each makes a share of the steps
  std::array<int64_t, 4> box;       // cells of a block: batch, depth, height, width
  std::array<int64_t, 4> held;      // positions of the input that they reach
  bool pairs;                       // positions are read two at a time
  int64_t lead;                     // of them, before the first one along the width: they begin even
  int64_t held_positions;
  int64_t steps;         // of kOverlapAddWords words of input channels
  int64_t stage_steps;   // that are staged at once
  int64_t fragments;     // of weights, in a step
  int64_t fold_entries;  // after so many offsets a sum is added to its total in shared memory; 0: never
  int64_t boxes, column_blocks;
  double cycles;  // expected
  // Wide: a block holds all channels of its inputs, and its warps take items: a chunk of cells by two column tiles.
  bool wide;
  int64_t chunks, block_tiles, all_tiles;  // of a box; pairs of column tiles, of a block and in all
  // Shared memory in bytes: where each part begins; the stages come first.
  int64_t step_bytes, stage_bytes, positions, entries, weights, pointers, totals, shared_bytes;

  int64_t team_warps() const { return row_warps * column_warps; }
  int64_t team_sum_bytes() const { return team_warps() * warp_columns * overlap_add_rows(int(warp_columns)) * 32; }
  int64_t entry_count() const { return reach[0] * reach[1] * reach[2]; }
  int64_t support_count() const { return support[0] * support[1] * support[2]; }
};

// The first offset of residues from `begin` on, at most.
inline int64_t overlap_add_low(const Axis& a, int64_t begin) {
  const int64_t back = (a.kernel - 1) * a.dilation - begin;
  return back >= 0 ? -(back / a.stride) : ceil_div(-back, a.stride);
}

// Column tiles: as few axes as possible, the last one first.
inline void overlap_add_columns(const Problem& problem, OverlapAddTile& t) {
  int64_t rest = 8;
  for (int a = 2; a >= 0; --a) {
    t.bases[a] = 1;
    t.span[a] = std::min(rest, problem.axis[a].stride);
    rest /= t.span[a];
  }
  t.span_channels = std::min(rest, problem.out_channels_per_group());
  rest /= t.span_channels;
  t.channel_spans = ceil_div(problem.out_channels_per_group(), t.span_channels);
  const auto all_bases = [&](int a) {
    const Axis& axis = problem.axis[a];
    return axis.base(axis.out() - 1) - axis.base(0) + 1;
  };
  const int stack = all_bases(1) > 1 ? 1 : all_bases(0) > 1 ? 0 : 2;
  t.bases[stack] = rest, t.span[stack] *= rest;
  t.columns = t.channel_spans;
  for (int a = 0; a < 3; ++a) {
    t.spans[a] = ceil_div(problem.axis[a].stride * t.bases[a], t.span[a]);
    t.columns *= t.spans[a];
  }
  t.copies = 1, t.copy_axis = stack, t.copy_shift = t.bases[stack];
  if (t.columns == 1) t.copies = t.columns = 2, t.bases[stack] *= 2;
  for (int a = 0; a < 3; ++a) {
    const Axis& axis = problem.axis[a];
    int64_t high = 0;
    t.support[a] = 0;
    for (int64_t i = 0; i < t.spans[a]; ++i) {
      const int64_t begin = i * t.span[a];
      const int64_t end = std::min(begin + t.span[a], axis.stride * (a == stack ? t.copy_shift : 1));
      const int64_t from = overlap_add_low(axis, begin), to = (end - 1) / axis.stride;
      t.support[a] = std::max(t.support[a], to - from + 1);
      t.low[a] = i == 0 ? from : std::min(t.low[a], from), high = i == 0 ? to : std::max(high, to);
    }
    t.reach[a] = high - t.low[a] + 1 + (a == stack ? (t.copies - 1) * t.copy_shift : 0);
    t.cells[a] = ceil_div(all_bases(a), t.bases[a]);
  }
}

// Shared memory.
inline void overlap_add_share(OverlapAddTile& t) {
  t.stage_bytes = t.stage_steps * t.step_bytes;
  t.entries = std::max(t.teams * t.stage_bytes, (t.teams - 1) * t.team_sum_bytes());
  t.positions = t.entries + t.column_warps * t.entry_count() * 16;
  t.weights = t.positions + round_up(t.held_positions, 8) * 4;
  t.pointers = t.weights + t.fragments * 32, t.totals = t.pointers + 16;
  t.shared_bytes = t.totals + (t.fold_entries > 0 ? t.teams * t.team_sum_bytes() : 0);
}

// Inputs that a box reaches, and how many boxes there are.
inline void overlap_add_hold(const Problem& problem, OverlapAddTile& t) {
  // Contiguous positions are read in pairs where no pair is torn.
  const Axis& width = problem.axis[2];
  t.pairs = problem.layout == Layout::kContiguous && width.in % 2 == 0 &&
            (t.box[3] * t.bases[2] % 2 == 0 || t.box[3] == t.cells[2]);
  t.lead = t.pairs ? (width.base(0) + t.low[2]) & 1 : 0;
  t.held_positions = 1;
  t.boxes = 1;
  for (int i = 0; i < 4; ++i) {
    t.held[i] = i == 0 ? t.box[0] : (t.box[i] - 1) * t.bases[i - 1] + t.reach[i - 1];
    if (i == 3 && t.pairs) t.held[3] = round_up(t.lead + t.held[3], int64_t{2});
    t.held_positions *= t.held[i];
    t.boxes *= ceil_div(i == 0 ? problem.batch : t.cells[i - 1], t.box[i]);
  }
}

// Blocks of a multiprocessor.
inline int64_t overlap_add_resident(const OverlapAddTile& t) {
  const int64_t by_shared = std::max<int64_t>(1, kOverlapAddShared / (t.shared_bytes + 1024));
  return std::min(by_shared, kOverlapAddMaxWarps / (t.team_warps() * t.teams));
}

inline void overlap_add_finish(const Problem& problem, OverlapAddTile& t) {
  overlap_add_hold(problem, t);
  const int64_t block_columns = t.warp_columns * t.column_warps;
  t.column_blocks = ceil_div(t.columns, block_columns);
  const int64_t distinct = t.copies > 1 ? 1 : block_columns;
  t.fragments = distinct * t.support_count();
  t.step_bytes = round_up(t.held_positions, 8) * 32 + t.fragments * overlap_add_fragment_bytes(t.strict);
  // Few long stages, but a team's share of a full multiprocessor.
  const int64_t share = std::min<int64_t>((problem.element_size() == 4 ? 56 : 48) * 1024,
                                          kOverlapAddShared * t.team_warps() / kOverlapAddMaxWarps - 4096);
  t.fold_entries = 0;
  t.stage_steps = std::max<int64_t>(1, std::min(ceil_div(t.steps, t.teams), share / t.step_bytes));
  overlap_add_share(t);
  const int64_t team_steps = std::min(t.steps, ceil_div(ceil_div(t.steps, t.stage_steps), t.teams) * t.stage_steps);
  if (!t.strict || team_steps * t.support_count() <= kOverlapAddAdds) return;
  const int64_t fold_steps = kOverlapAddAdds / t.support_count();
  t.fold_entries = fold_steps > 0 ? fold_steps * t.entry_count() : kOverlapAddAdds;
  // Totals take room from stages, rather than from other blocks.
  const int64_t resident = overlap_add_resident(t);
  overlap_add_share(t);
  while (t.stage_steps > 1 && overlap_add_resident(t) < resident) --t.stage_steps, overlap_add_share(t);
}

// Time of all blocks: that of the multiprocessor with most of them, in cycles. Not wide.
inline double overlap_add_time(const Problem& problem, const OverlapAddTile& t) {
  const double rows = overlap_add_rows(int(t.warp_columns)) / 16, entries = double(t.entry_count());
  const double uses = double(t.support_count()) * double(t.warp_columns);
  const double warp_step =
      t.strict ? entries * (15 + 9 * rows) + uses * rows * 9 : entries * (15 + 4 * rows) + uses * (4 + rows * 4);
  const double staging = (double(t.held_positions) * 55 + double(t.fragments) * 800) / 32;
  const double step = (double(t.team_warps()) * warp_step + staging) / 4;
  const int64_t blocks = t.boxes * t.column_blocks * problem.groups, warps = t.team_warps() * t.teams;
  const int64_t resident = overlap_add_resident(t), most = ceil_div(blocks, int64_t{132});
  // Few warps do not hide their latency.
  const double latency = t.strict ? 12 : problem.element_size() == 4 ? 10 : 6;
  const double idle = latency / double(std::min(resident, most) * warps);
  // Teams whose shares differ wait for the longest one; below float32 a last stage that is short costs as much.
  const int64_t stages = ceil_div(t.steps, t.stage_steps), longest = ceil_div(stages, t.teams) * t.stage_steps;
  const int64_t waiting = t.teams > 1 || !t.strict ? std::max(longest * t.teams, t.steps) : t.steps;
  const double steps = 0.5 * double(t.steps) + 0.5 * double(waiting);
  const double folds = t.fold_entries > 0 ? 1.04 : 1;
  return double(most) * step * steps * folds * (1 + idle) + 4000 * double(ceil_div(most, resident));
}

// The box of cells: shared_bytes stays 0 where there is none.
inline void overlap_add_choose_box(const Problem& problem, OverlapAddTile& tile) {
  OverlapAddTile best{};
  const auto consider = [&](OverlapAddTile& t, int64_t width, int64_t depth) {
    int64_t rest = t.row_warps * overlap_add_rows(int(t.warp_columns));
    t.box[3] = std::min(width, t.cells[2]), rest /= t.box[3];
    if (rest == 0) return;
    t.box[2] = std::min(t.cells[1], std::max<int64_t>(rest / depth, 1)), rest /= t.box[2];
    t.box[1] = std::min(t.cells[0], rest), rest /= t.box[1];
    t.box[0] = std::min(problem.batch, rest);
    // Equal boxes.
    for (int i = 1; i < 4; ++i) t.box[i] = ceil_div(t.cells[i - 1], ceil_div(t.cells[i - 1], t.box[i]));
    overlap_add_finish(problem, t);
    if (t.shared_bytes > kOverlapAddShared) return;
    const double time = overlap_add_time(problem, t);
    if (best.shared_bytes > 0 && time >= best.cycles) return;
    best = t, best.cycles = time;
  };
  OverlapAddTile t = tile;
  t.warp_columns = tile.columns % 3 == 0 ? 3 : std::min<int64_t>(2, tile.columns);
  const int64_t most_columns = std::min<int64_t>(2, ceil_div(t.columns, t.warp_columns));
  const bool one_row = t.cells[0] * t.cells[1] == 1;
  for (t.column_warps = 1; t.column_warps <= most_columns; ++t.column_warps) {
    for (const int64_t row_warps : {1, 2, 4, 5, 7, 8}) {
      t.row_warps = row_warps;
      const int64_t most_teams = std::min({kOverlapAddMaxWarps / t.team_warps(), t.steps, int64_t{4}});
      for (const int64_t teams : {int64_t{1}, most_teams}) {
        t.teams = teams;
        const int64_t rows = row_warps * overlap_add_rows(int(t.warp_columns));
        for (int64_t depth = 1; depth <= std::min<int64_t>(3, t.cells[0]); ++depth) {
          if (one_row || t.cells[2] <= 64) consider(t, rows, depth);
          for (const int64_t width : {64, 32, 16}) {
            if (!one_row && width < t.cells[2]) consider(t, width, depth);
          }
        }
        if (most_teams <= 1) break;
      }
    }
  }
  tile = best;
}

// Wide; shared_bytes stays 0 where it cannot be.
inline void overlap_add_choose_wide(const Problem& problem, OverlapAddTile& tile) {
  OverlapAddTile t = tile;
  tile.shared_bytes = 0;
  // Offsets in the weights of a group, and in the outputs of a box, are 32 bits.
  constexpr double kLimit = double(1 << 30);
  const double output = double(problem.out_channels) * double(problem.out_positions());
  if (t.copies > 1 || double(problem.weight_elements()) >= kLimit || output >= kLimit) return;
  for (int a = 0; a < 3; ++a) {
    const Axis& axis = problem.axis[a];
    if (t.bases[a] > 1 || axis.dilation > 1 || axis.kernel < axis.stride) return;
  }
  const int64_t iterations = ceil_div(t.support_count(), int64_t{2}) * t.steps;
  if (iterations > (t.strict ? kOverlapAddWideAdds : 64)) return;  // additions to a sum
  const int64_t max_warps = overlap_add_wide_warps(t.strict);
  const double item = double(iterations) * (t.strict ? 290 : 150) + 600;
  t.wide = true, t.warp_columns = 2, t.column_warps = t.teams = 1, t.fragments = 0;
  t.all_tiles = t.spans[0] * t.spans[1] * t.spans[2] * ceil_div(t.channel_spans, int64_t{2});
  for (const int64_t width : {t.cells[2], int64_t{32}, int64_t{16}, int64_t{8}}) {
    if (width > t.cells[2] || width > 192) continue;
    for (int64_t chunks = 1; chunks <= 4; ++chunks) {
      int64_t rest = chunks * kOverlapAddWideRows / width;
      if (rest == 0) continue;
      t.box[3] = width;
      t.box[2] = std::min(t.cells[1], rest), rest /= t.box[2];
      t.box[1] = std::min(t.cells[0], rest), rest /= t.box[1];
      t.box[0] = std::min({problem.batch, rest, int64_t(kLimit / output)});
      for (int i = 1; i < 4; ++i) t.box[i] = ceil_div(t.cells[i - 1], ceil_div(t.cells[i - 1], t.box[i]));
      t.chunks = ceil_div(t.box[0] * t.box[1] * t.box[2] * t.box[3], int64_t{kOverlapAddWideRows});
      overlap_add_hold(problem, t);
      t.step_bytes = round_up(t.held_positions, int64_t{8}) * overlap_add_wide_bytes(t.strict);
      t.stage_steps = t.steps, t.stage_bytes = t.steps * t.step_bytes;
      t.entries = t.positions = t.stage_bytes;
      t.weights = t.positions + round_up(t.held_positions, int64_t{8}) * 4;
      t.pointers = t.weights + t.chunks * kOverlapAddWideRows * 20, t.shared_bytes = t.pointers + 16;
      const int64_t by_shared = kOverlapAddShared / (t.shared_bytes + 1024);
      if (by_shared == 0) continue;
      for (int64_t warps = max_warps / 3; warps <= max_warps; warps += max_warps / 3) {
        const int64_t resident = std::min(by_shared, max_warps / warps), slots = 132 * resident;
        for (int64_t waves = 1; waves <= 2; ++waves) {
          const int64_t parts = std::clamp(slots * waves / (t.boxes * problem.groups), int64_t{1}, t.all_tiles);
          t.row_warps = warps, t.block_tiles = ceil_div(t.all_tiles, parts);
          t.column_blocks = ceil_div(t.all_tiles, t.block_tiles);
          const int64_t blocks = t.boxes * t.column_blocks * problem.groups;
          const int64_t here = std::min(resident, ceil_div(blocks, int64_t{132}));
          const double busy = std::max(double(here * warps) / 4, 2.0);
          const double rounds = double(ceil_div(t.block_tiles * t.chunks, warps));
          const double fill = 4000 + double(t.held_positions * t.steps * here) * (t.strict ? 1.5 : 1);
          const double time = double(ceil_div(blocks, slots)) * (fill + rounds * item * busy);
          if (tile.shared_bytes > 0 && time >= tile.cycles) continue;
          tile = t, tile.cycles = time;
        }
      }
    }
  }
}

inline OverlapAddTile overlap_add_tile(const Problem& problem) {
  OverlapAddTile t{};
  t.strict = problem.dtype == DType::kFloat32 && !problem.allow_tf32;
  overlap_add_columns(problem, t);
  t.steps = ceil_div(problem.in_channels_per_group() * problem.element_size(), 4 * kOverlapAddWords);
  if (t.entry_count() > 512) return t;
  OverlapAddTile wide = t;
  overlap_add_choose_wide(problem, wide);
  overlap_add_choose_box(problem, t);
  if (wide.shared_bytes > 0 && (t.shared_bytes == 0 || wide.cycles < t.cycles)) return wide;
  return t;
}

// "" if the family can make the call, else a reason; the tile of what it can make.
inline std::string overlap_add_refusal(const Problem& problem, OverlapAddTile& t) {
  if (problem.dtype == DType::kFloat64) return "float64";
  constexpr int64_t kLimit = int64_t{1} << 28;
  for (const Axis& a : problem.axis) {
    if (a.in >= kLimit || a.out() >= kLimit || a.padding >= kLimit || a.stride > 1024 || a.kernel > 8192 ||
        a.dilation > 1024) {
      return "a long axis, or a large kernel, stride, padding or dilation";
    }
  }
  if (problem.batch >= kLimit || problem.in_channels >= 65536 || problem.out_channels >= 65536) {
    return "a large batch or many channels";
  }
  if (problem.out_channels_per_group() > 32) return "more than 32 output channels a group";
  if (problem.in_channels_per_group() < 8) return "fewer than 8 input channels a group";
  if (problem.axis[0].stride * problem.axis[1].stride * problem.axis[2].stride == 1) return "a stride of 1";
  if (problem.out_elements() == 0) return "";
  if (problem.in_positions() == 0) return "an empty input";
  if (problem.out_channels_per_group() * problem.kernel_positions() >= int64_t{1} << 30) return "a large kernel";
  t = overlap_add_tile(problem);
  if (t.shared_bytes == 0) return "taps that reach too far for the shared memory of a block";
  // Offsets of a box are 32 bits of bytes.
  if (double(t.box[0]) * double(problem.in_channels) * double(problem.in_positions()) >= double(int64_t{1} << 30)) {
    return "a large input";
  }
  if (double(t.columns) >= 1e9 || double(t.boxes) * double(t.column_blocks) * double(problem.groups) >= 2e9)
    return "too many tiles";
  return "";
}

inline std::string overlap_add_refusal(const Problem& problem) {
  OverlapAddTile tile{};
  return overlap_add_refusal(problem, tile);
}

// Milliseconds on an H200, of what is not refused.
inline double overlap_add_cost_ms(const Problem& problem) {
  if (problem.out_elements() == 0) return 0;
  const OverlapAddTile t = overlap_add_tile(problem);
  if (t.shared_bytes == 0) return 1e9;
  const double box_rate = problem.element_size() == 2 ? 0.83e6 : problem.allow_tf32 ? 1.4e6 : 1.3e6;
  const double rate = t.wide ? (t.strict ? 1.3e6 : 1.15e6) : box_rate;  // cycles
  // channels_last: neighbouring outputs of a lane are apart, or but two are together where blocks are wide.
  const double most = t.wide ? 1e-8 : 1.5e-8;
  const double apart =
      problem.layout == Layout::kChannelsLast ? std::min(1.6e-9 * double(problem.out_channels), most) : 0;
  // Weights that few boxes read come from memory.
  const double cold = t.wide && t.boxes < 16 ? 1.25 : 1;
  return (0.011 + t.cycles / rate) * cold + apart * double(problem.out_elements());
}

}  // namespace fastconvt
