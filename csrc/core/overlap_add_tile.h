// The overlap-add family (overlap_add.h): what a block is told, and what all kinds of blocks share. Plain C++17.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "problem.h"

namespace fastconvt {

inline constexpr int64_t kOverlapAddMaxWarps = 16;  // of a block, and of a multiprocessor
inline constexpr int kOverlapAddMaxTiles = 3;       // column tiles of a warp
inline constexpr int kOverlapAddWords = 8;          // of 32 bits of input channels, in a step
// Additions to a sum of float32, one after the other. Equal terms round alike, in the worst case by 2^-26 of the sum
// each; so few of them, with what the products lose, stay below 2^-20.
inline constexpr int kOverlapAddAdds = 26;
inline constexpr int kOverlapAddWideAdds = 40;     // where products lose less
inline constexpr int kOverlapAddWideRows = 48;     // cells of an item
inline constexpr int kOverlapAddWideColumns = 32;  // and its columns
inline constexpr int64_t kOverlapAddShared = 227 * 1024;

// Cells of a warp with that many column tiles.
constexpr int overlap_add_rows(int tiles) { return tiles == 3 ? 48 : 64; }
// Warps of a multiprocessor where blocks are wide; `strict`: float32 that is not TF32.
constexpr int64_t overlap_add_wide_warps(bool strict) { return strict ? 12 : kOverlapAddMaxWarps; }
// Bytes of shared memory of a fragment of weights, which strictly are two terms; and, where a block is wide and factors
// are strictly three terms, of a granule of one column or position, and of a position in a step.
constexpr int overlap_add_fragment_bytes(bool strict) { return strict ? 512 : 256; }
constexpr int overlap_add_granule_bytes(bool strict) { return strict ? 48 : 16; }
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
  // Wide: warps take items, a chunk of cells by a set of columns.
  bool wide;
  int64_t chunks, block_sets, sets;    // of a box; of a block and in all
  int64_t channel_granules, granules;  // of an offset, and the inner dimension's
  int64_t right, rows, outputs;        // shared memory: weights, and where cells and columns are
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

}  // namespace fastconvt
