// The fused chain on tensor cores: which inner products its matrix instructions make, from which 16-byte granules.
//
// A cell is a base q of every axis; it makes one output in each phase. Two phases that differ along the last axis only
// make a unit. A granule holds 8 values of 16 bits that stand side by side in shared memory: four channels of two
// neighbouring cells, rounded (a pair granule); or four channels of one cell, rounded, and what rounding left of them
// (a split granule). A step multiplies two granules of 16 cells by the weights of one phase, or of both: a 16 x 16 x 8
// matrix product. float32 takes three products, high x high, low x high and high x low, of which a split granule makes
// the first two and a pair granule the third; every other precision takes one, with pair granules alone. Where most
// pairs are full, float32 has no split granules either, but a second granule of rests, of what rounding left, for each
// pair; a step then makes the three products from both.
//
// Where the stride along the last axis is 1, a cell is two bases of it, twins. They take the part of two phases, so the
// same granules serve both, and a position is in one granule instead of two.
#pragma once

#include <cstdint>
#include <string>

#include "problem.h"

namespace fastconvt::chain_mma {

constexpr int kMaxSteps = 64;
constexpr int kMaxUnits = 8;
constexpr int kMaxResidues = 32;    // of an axis
constexpr int kMaxCells = 512;      // of a tile
constexpr int kMaxRegion = 512;     // along an axis
constexpr int kBlock = 4;           // input channels of a granule
constexpr int kWarps = 4;           // that share a tile: a team
constexpr int kMaxTeams = 5;        // of a block
constexpr int kCellsPerGroup = 32;  // what a warp makes at a time
// Shared memory of a block: for all teams on a large device, for one team on a small one.
constexpr int64_t kLargeShared = 220 << 10, kSmallShared = 96 << 10;

struct Granule {
  bool pair;
  int block;      // of kBlock input channels
  int offset[3];  // from the cell: the input that the granule begins with
  int tap[2][2];  // of each phase of the unit, for each cell of a pair: a linear index, or -1
  bool used_by(int phase) const { return tap[phase][0] >= 0 || tap[phase][1] >= 0; }
};

struct Step {
  Granule granule[2];
  int phases;          // bit mask
  int first_fragment;  // of 8 or 16 columns of weights, one a phase
};

// Steps of a unit: `both`, then single[0] of the first phase alone, then single[1] of the second alone.
struct Unit {
  int residue[3];  // of the first phase; the second has the next one along the last axis
  bool paired;
  int first_step, both, single[2];
};

struct Plan {
  std::string refusal;
  bool split;  // three products
  bool rests;  // from pair granules alone
  bool twins;
  int channel_blocks;
  int column_tiles;   // of 8 channels, in a chunk
  int column_chunks;  // that one accumulator makes one after the other
  int num_steps = 0, num_units = 0, num_fragments = 0;
  Step step[kMaxSteps];
  Unit unit[kMaxUnits];
  int low[3], reach[3];       // a cell reads inputs low .. low + reach along each axis
  int stride[3], padding[3];  // output stride * q + residue - padding is of cell q
  int first_cell[3], cells[3];
  int tile[3], region[3], tiles[3];
  int64_t num_tiles = 0;
  int64_t block_bytes = 0, team_bytes = 0;  // of shared memory

  int planes() const { return channel_blocks * (split ? 2 : 1); }
  int cell_inputs() const { return twins ? 2 : 1; }          // along the last axis
  int position_bytes() const { return 16 / cell_inputs(); }  // in a plane
  int positions() const { return region[0] * region[1] * region[2]; }
  int tile_groups() const { return (tile[0] * tile[1] * tile[2] + kCellsPerGroup - 1) / kCellsPerGroup; }
};

// Steps of a unit from its granules.
class StepList {
 public:
  explicit StepList(Plan& plan)
      : plan_(plan), last_{true, 0, {plan.low[0], plan.low[1], plan.low[2]}, {{-1, -1}, {-1, -1}}} {}

  void add(const Granule& granule) {
    const int phases = (granule.used_by(0) ? 1 : 0) | (granule.used_by(1) ? 2 : 0);
    if (phases == 0) return;
    full_ = full_ || count_[phases] == 2 * kMaxSteps;
    if (!full_) list_[phases][count_[phases]++] = granule;
  }

  // Appends the steps; false if there are too many. The first step serves both phases: it sets their accumulators.
  bool finish(Unit& unit) {
    unit.first_step = plan_.num_steps;
    for (int i = 0; i + 1 < count_[3]; i += 2) append(list_[3][i], list_[3][i + 1], 3);
    int next[4] = {0, 0, 0, count_[3] / 2 * 2};
    if (next[3] < count_[3] || count_[3] == 0) {
      Granule granule[2];
      for (Granule& g : granule) g = take(next);
      append(granule[0], granule[1], 3);
    }
    unit.both = plan_.num_steps - unit.first_step;
    for (int phase = 0; phase < 2; ++phase) {
      const int mask = 1 << phase, before = plan_.num_steps;
      while (next[mask] < count_[mask]) {
        const Granule first = list_[mask][next[mask]++];
        append(first, next[mask] < count_[mask] ? list_[mask][next[mask]++] : unused(first), mask);
      }
      unit.single[phase] = plan_.num_steps - before;
    }
    return !full_;
  }

 private:
  static Granule unused(Granule granule) {
    for (auto& taps : granule.tap) taps[0] = taps[1] = -1;
    return granule;
  }

  // The next granule of the longest list, or one without taps.
  Granule take(int (&next)[4]) {
    int from = 3;
    for (int mask = 1; mask <= 2; ++mask) {
      if (count_[from] - next[from] == 0 || (from != 3 && count_[mask] - next[mask] > count_[from] - next[from])) {
        from = mask;
      }
    }
    if (next[from] < count_[from]) return last_ = list_[from][next[from]++];
    return unused(last_);
  }

  void append(const Granule& a, const Granule& b, int phases) {
    full_ = full_ || plan_.num_steps == kMaxSteps;
    if (full_) return;
    plan_.step[plan_.num_steps++] = {{a, b}, phases, plan_.num_fragments};
    plan_.num_fragments += (phases == 3 ? 2 : 1) * (plan_.rests ? 2 : 1);
  }

  Plan& plan_;
  Granule list_[4][2 * kMaxSteps];
  Granule last_;  // stands in where none is left
  int count_[4] = {0, 0, 0, 0};
  bool full_ = false;
};

// The taps of one phase along one axis by offset: -1 where there is none.
inline int tap_at(const Axis& axis, int64_t residue, bool exists, int64_t offset) {
  if (!exists) return -1;
  for (int64_t t = axis.first_tap(residue); t < axis.kernel; t += axis.tap_step()) {
    if (axis.offset(residue, t) == offset) return static_cast<int>(t);
  }
  return -1;
}

// The granules of one row: a tap of the outer axes, given by its linear index without the last axis and its offsets.
inline void add_row(StepList& list, const Plan& plan, const Unit& unit, const Axis& axis, int row_tap, int depth,
                    int height) {
  const auto tap = [&](int phase, int offset) {
    const int t = plan.twins ? tap_at(axis, 0, true, offset - phase - axis.padding)
                             : tap_at(axis, unit.residue[2] + phase, phase == 0 || unit.paired, offset);
    return t < 0 ? -1 : row_tap * static_cast<int>(axis.kernel) + t;
  };
  for (int block = 0; block < plan.channel_blocks; ++block) {
    for (int x = plan.low[2]; plan.split && !plan.rests && x <= plan.low[2] + plan.reach[2]; ++x) {
      list.add({false, block, {depth, height, x}, {{tap(0, x), -1}, {tap(1, x), -1}}});
    }
    for (int x = plan.low[2]; x <= plan.low[2] + plan.reach[2]; ++x) {
      if (!plan.twins && tap(0, x) < 0 && tap(1, x) < 0) continue;
      list.add({true, block, {depth, height, x}, {{tap(0, x), tap(0, x + 1)}, {tap(1, x), tap(1, x + 1)}}});
      ++x;
    }
  }
}

inline bool add_unit(Plan& plan, const Problem& problem, Unit unit) {
  StepList list(plan);
  const Axis &depth = problem.axis[0], &height = problem.axis[1];
  for (int64_t z = depth.first_tap(unit.residue[0]); z < depth.kernel; z += depth.tap_step()) {
    for (int64_t y = height.first_tap(unit.residue[1]); y < height.kernel; y += height.tap_step()) {
      add_row(list, plan, unit, problem.axis[2], static_cast<int>(z * height.kernel + y),
              static_cast<int>(depth.offset(unit.residue[0], z)), static_cast<int>(height.offset(unit.residue[1], y)));
    }
  }
  const bool fits = list.finish(unit);
  plan.unit[plan.num_units++] = unit;
  return fits;
}

}  // namespace fastconvt::chain_mma
