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
// columns many, it is wide: it holds all channels of its cells and all weights of some columns, which are numbered as
// they lie in the output. The inner dimension is then a list of granules, 16 bytes of channels of one offset each.
#pragma once

#include <string>

#include "overlap_add_wide.h"

namespace fastconvt {

// Shared memory.
inline void overlap_add_share(OverlapAddTile& t) {
  t.stage_bytes = t.stage_steps * t.step_bytes;
  t.entries = std::max(t.teams * t.stage_bytes, (t.teams - 1) * t.team_sum_bytes());
  t.positions = t.entries + t.column_warps * t.entry_count() * 16;
  t.weights = t.positions + round_up(t.held_positions, 8) * 4;
  t.pointers = t.weights + t.fragments * 32, t.totals = t.pointers + 16;
  t.shared_bytes = t.totals + (t.fold_entries > 0 ? t.teams * t.team_sum_bytes() : 0);
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

// Milliseconds on an H200.
inline double overlap_add_tile_ms(const Problem& problem, const OverlapAddTile& t) {
  if (t.wide) return overlap_add_wide_ms(problem, t);
  const double rate = problem.element_size() == 2 ? 0.83e6 : problem.allow_tf32 ? 1.4e6 : 1.3e6;  // cycles
  // channels_last: neighbouring outputs of a lane are apart.
  const double apart =
      problem.layout == Layout::kChannelsLast ? std::min(1.6e-9 * double(problem.out_channels), 1.5e-8) : 0;
  return 0.011 + t.cycles / rate + apart * double(problem.out_elements());
}

inline OverlapAddTile find_overlap_add_tile(const Problem& problem) {
  OverlapAddTile t{};
  t.strict = problem.dtype == DType::kFloat32 && !problem.allow_tf32;
  overlap_add_columns(problem, t);
  t.steps = ceil_div(problem.in_channels_per_group() * problem.element_size(), 4 * kOverlapAddWords);
  if (t.entry_count() > 512) return t;
  OverlapAddTile wide = t;
  overlap_add_choose_wide(problem, wide);
  overlap_add_choose_box(problem, t);
  if (wide.shared_bytes == 0) return t;
  return t.shared_bytes == 0 || overlap_add_tile_ms(problem, wide) < overlap_add_tile_ms(problem, t) ? wide : t;
}

inline const OverlapAddTile& overlap_add_tile(const Problem& problem) {
  return last_result<find_overlap_add_tile>(problem);
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
  const OverlapAddTile& t = overlap_add_tile(problem);
  return t.shared_bytes == 0 ? 1e9 : overlap_add_tile_ms(problem, t);
}

}  // namespace fastconvt
