// The overlap-add family's wide blocks (overlap_add.h): their tile and its time. Plain C++17.
#pragma once

#include <cmath>

#include "overlap_add_tile.h"

namespace fastconvt {

// Neighbouring columns whose outputs are a vector, at multiples of its size from the output's begin: a cell's outputs
// begin and end there, as rows do.
inline int64_t overlap_add_wide_vector(const Problem& problem) {
  const Axis& width = problem.axis[2];
  const bool last = problem.layout == Layout::kChannelsLast;
  const int64_t unit = last ? problem.out_channels : 1, first = width.base(0) * width.stride - width.padding;
  int64_t vector = 16 / problem.element_size();
  const auto fits = [&](int64_t x) { return x % vector == 0; };
  while (last && problem.groups > 1 ? !fits(problem.out_channels_per_group())
                                    : !fits(width.stride * unit) || !fits(width.out() * unit) || !fits(first * unit)) {
    vector /= 2;
  }
  return vector;
}

// Time of all wide blocks in cycles: a multiprocessor's for the items of its blocks, or a warp's for its own ones one
// after the other, and what comes before.
inline double overlap_add_wide_time(const Problem& problem, const OverlapAddTile& t, int64_t resident) {
  const double inner = double(ceil_div(t.granules, int64_t{2})), size = double(problem.element_size());
  const int64_t blocks = t.boxes * t.column_blocks * problem.groups, slots = 132 * resident;
  const double here = double(std::min(resident, ceil_div(blocks, int64_t{132})));
  const int64_t vector = overlap_add_wide_vector(problem);
  const double narrow = vector == 1 ? (size == 4 ? 450 : 620) : (size == 4 ? 180 : 70) * std::log2(16 / size / vector);
  const double item = (t.strict ? 180 + inner * 168 : size == 4 ? 240 + inner * 31 : 250 + inner * 25) + narrow;
  const double alone = t.strict ? inner * 1400 : size == 4 ? 800 + inner * 363 : 1460 + inner * 218;
  const double items = double(t.chunks * t.block_sets), columns = double(t.block_sets * kOverlapAddWideColumns);
  const double bytes = double(t.box[0] * t.box[1] * t.box[2] * t.box[3]) * columns * size;
  const double rounds = double(ceil_div(t.chunks * t.block_sets, t.row_warps));
  const double make = std::max({here * items * item, rounds * (alone + 4 * narrow), here * bytes / 19});
  // Weights whose neighbours are other channels are not read in lines.
  const double words = double(t.held_positions * t.steps * kOverlapAddWords) +
                       columns * double(t.granules) * (problem.layout == Layout::kChannelsLast ? 10 : 4);
  const double fill = 5900 + here * words * 0.126 + words / double(t.row_warps * 32) * 50;
  const double waves =
      blocks <= slots ? 1 : 0.54 * double(blocks) / double(slots) + 0.46 * double(ceil_div(blocks, slots));
  return waves * (make + (here > 1 ? 0.83 : 1) * fill);
}

// Milliseconds on an H200.
inline double overlap_add_wide_ms(const Problem& problem, const OverlapAddTile& t) {
  // Pieces of sectors are written one by one.
  const int64_t vector = overlap_add_wide_vector(problem);
  const bool whole = vector * problem.element_size() == 16, last = problem.layout == Layout::kChannelsLast;
  const double pieces = whole ? 1 : last ? 8 : vector > 1 ? 1 : problem.element_size() == 4 ? 5 : 7;
  const double writes = pieces * double(problem.out_elements() * problem.element_size());
  return 0.0045 + std::max(t.cycles / 1.755e6, std::max(writes, problem.bytes()) / 4.2e9);
}

// Wide; shared_bytes stays 0 where it cannot be.
inline void overlap_add_choose_wide(const Problem& problem, OverlapAddTile& tile) {
  OverlapAddTile t = tile;
  tile.shared_bytes = 0;
  // Offsets in the weights of a group, and in the outputs of a box, are 32 bits.
  constexpr double kLimit = double(1 << 30);
  const double output = double(problem.out_channels) * double(problem.out_positions());
  if (t.copies > 1 || double(problem.weight_elements()) >= kLimit || output >= kLimit) return;
  int64_t columns = problem.out_channels_per_group();
  for (int a = 0; a < 3; ++a) {
    if (t.bases[a] > 1 || problem.axis[a].dilation > 1) return;
    columns *= problem.axis[a].stride;
  }
  if (double(columns) >= kLimit) return;
  // Fewer do not pay for their inputs, which groups do not share.
  if (columns < (problem.groups > 1 ? 4 : 2) * kOverlapAddWideColumns) return;
  t.channel_granules = ceil_div(problem.in_channels_per_group() * problem.element_size(), int64_t{t.strict ? 32 : 16});
  t.granules = t.channel_granules * t.entry_count();
  if (ceil_div(t.granules, int64_t{2}) > (t.strict ? kOverlapAddWideAdds : 64)) return;  // additions to a sum
  const int64_t granules = round_up(t.granules, int64_t{2}), max_warps = overlap_add_wide_warps(t.strict);
  t.wide = true, t.warp_columns = 2, t.column_warps = t.teams = 1, t.fragments = 0;
  t.sets = ceil_div(columns, int64_t{kOverlapAddWideColumns});
  for (const int64_t width : {t.cells[2], int64_t{32}, int64_t{16}}) {
    if (width > 192 || (width >= t.cells[2] && width != t.cells[2])) continue;
    for (const int64_t chunks : {1, 2, 3, 6, 9, 13}) {
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
      t.stage_steps = t.steps, t.stage_bytes = t.steps * t.step_bytes, t.right = t.stage_bytes;
      for (const int64_t sets : {1, 2, 3, 4, 6, 8}) {
        t.block_sets = std::min(sets, t.sets), t.column_blocks = ceil_div(t.sets, t.block_sets);
        const int64_t block_columns = t.block_sets * kOverlapAddWideColumns;
        t.rows = t.right + granules * block_columns * overlap_add_granule_bytes(t.strict);
        t.outputs = t.rows + t.chunks * kOverlapAddWideRows * 20, t.entries = t.outputs + block_columns * 12;
        t.positions = t.weights = t.entries + granules * 4;
        t.pointers = round_up(t.positions + t.held_positions * 4, int64_t{16}), t.shared_bytes = t.pointers + 16;
        const int64_t by_shared = kOverlapAddShared / (t.shared_bytes + 1024);
        if (by_shared == 0) break;
        for (const int64_t warps : {max_warps / 4, max_warps / 2, max_warps}) {
          t.row_warps = warps;
          const double time = overlap_add_wide_time(problem, t, std::min(by_shared, max_warps / warps));
          if (tile.shared_bytes > 0 && time >= tile.cycles) continue;
          tile = t, tile.cycles = time;
        }
        if (t.block_sets == t.sets) break;
      }
    }
  }
}

}  // namespace fastconvt
