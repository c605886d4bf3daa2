// The fused chain on tensor cores, planned on the host: which inner products its matrix instructions make, from which
// 16-byte granules, and the tile. Plain C++17: no Torch, no CUDA.
//
// A cell is a base q of every axis; it makes one output in each phase. Two phases that differ along the last axis only
// make a unit. A granule holds 8 values of 16 bits that stand side by side in shared memory: four channels of two
// neighbouring cells, rounded (a pair granule); or four channels of one cell, rounded, and what rounding left of them
// (a split granule). A step multiplies two granules of 16 cells by the weights of one phase, or of both: a 16 x 16 x 8
// matrix product. float32 takes three products, high x high, low x high and high x low, of which a split granule makes
// the first two and a pair granule the third; every other precision takes one, with pair granules alone.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
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
  int channel_blocks;
  int column_tiles;   // of 8 channels, in a chunk
  int column_chunks;  // that one accumulator makes one after the other
  int num_steps = 0, num_units = 0, num_fragments = 0;
  Step step[kMaxSteps];
  Unit unit[kMaxUnits];
  int low[3], reach[3];  // a cell reads inputs low .. low + reach along each axis
  int first_cell[3], cells[3];
  int tile[3], region[3], tiles[3];
  int64_t num_tiles = 0;
  int64_t block_bytes = 0, team_bytes = 0;  // of shared memory

  int planes() const { return channel_blocks * (split ? 2 : 1); }
  int positions() const { return region[0] * region[1] * region[2]; }
  int tile_groups() const { return (tile[0] * tile[1] * tile[2] + kCellsPerGroup - 1) / kCellsPerGroup; }
};

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// A block's: weights, bias, the places of positions, the positions of cells.
inline int64_t block_bytes(const Plan& plan) {
  const int64_t weights = int64_t{plan.column_chunks} * plan.num_fragments * plan.column_tiles * 256;
  const int64_t bias = int64_t{plan.column_chunks} * plan.column_tiles * 32;
  const int64_t tables = 4 * int64_t{plan.positions()} + 2 * int64_t{plan.tile_groups()} * kCellsPerGroup;
  return (weights + bias + tables + 15) / 16 * 16;
}

// A team's: granules of a region, and what it knows of its cells.
inline int64_t team_bytes(const Plan& plan) {
  return int64_t{plan.planes()} * 16 * plan.positions() + int64_t{plan.tile_groups()} * kCellsPerGroup * 8;
}

// A warp's cycles for kCellsPerGroup cells: matrix products, exponentials, the rest.
inline double group_cycles(const Plan& plan) {
  const double products = plan.num_fragments * plan.column_tiles + 2 * plan.num_units;
  const double exponentials = plan.num_units * (8 * plan.column_tiles + 1);
  return 2 * (6.8 * products * plan.column_chunks + 8 * exponentials * plan.column_chunks);
}

// Cycles of one tile with its staging, where all four warps share the load. Short rows are loaded less well.
inline double tile_cycles(const Plan& plan) {
  const double positions = 128.0 * ceil_div(plan.positions(), 128) + 2 * plan.region[0] * plan.region[1];
  return ceil_div(plan.tile_groups(), kWarps) * group_cycles(plan) + 0.5 * plan.planes() * positions +
         0.35 * plan.tile_groups() * kCellsPerGroup + 400;
}

inline void set_tile(Plan& plan, const Problem& problem, const int (&tile)[3]) {
  plan.num_tiles = problem.batch;
  for (int a = 0; a < 3; ++a) {
    plan.tile[a] = tile[a];
    plan.region[a] = tile[a] + plan.reach[a];
    plan.tiles[a] = static_cast<int>(ceil_div(plan.cells[a], tile[a]));
    plan.num_tiles *= plan.tiles[a];
  }
  plan.block_bytes = block_bytes(plan);
  plan.team_bytes = team_bytes(plan);
}

// The largest part below `part` that an even cut of `size` has; 0 if there is none.
inline int next_part(int size, int part) {
  return part == 1 ? 0 : static_cast<int>(ceil_div(size, ceil_div(size, part - 1)));
}

// A region's byte offsets are 16 bits.
inline bool fits(const Plan& plan, int teams, int64_t limit) {
  for (const int size : plan.region) {
    if (size > kMaxRegion) return false;
  }
  return plan.block_bytes + teams * plan.team_bytes <= limit &&
         int64_t{plan.planes()} * plan.positions() * 16 < 1 << 16;
}

// Whether the smallest tile that choose_tile() may take fits.
inline bool set_smallest_tile(Plan& plan, const Problem& problem) {
  int x = std::min(plan.cells[2], kMaxCells);
  for (int next = x; next >= std::min(8, plan.cells[2]); next = next_part(plan.cells[2], next)) x = next;
  set_tile(plan, problem, {1, 1, x});
  return fits(plan, 1, kSmallShared);
}

// The tile of least time on a device of 132 multiprocessors. Requires set_smallest_tile().
inline void choose_tile(Plan& plan, const Problem& problem) {
  constexpr int kSlots = 132 * kMaxTeams;
  double best = std::numeric_limits<double>::infinity();
  int chosen[3] = {plan.tile[0], plan.tile[1], plan.tile[2]};
  for (const int teams : {kMaxTeams, 1}) {
    for (int x = std::min(plan.cells[2], kMaxCells); x >= std::min(8, plan.cells[2]); x = next_part(plan.cells[2], x)) {
      for (int y = std::min(plan.cells[1], 64); y > 0; y = next_part(plan.cells[1], y)) {
        for (int z = std::min(plan.cells[0], 8); z > 0; z = next_part(plan.cells[0], z)) {
          if (int64_t{x} * y * z > kMaxCells) continue;
          set_tile(plan, problem, {z, y, x});
          if (!fits(plan, 1, kSmallShared) || !fits(plan, teams, kLargeShared)) continue;
          const double cycles = std::max(1.0, double(plan.num_tiles) / kSlots) * tile_cycles(plan);
          if (cycles < best) best = cycles, chosen[0] = z, chosen[1] = y, chosen[2] = x;
        }
      }
    }
    if (best < std::numeric_limits<double>::infinity()) break;
  }
  set_tile(plan, problem, chosen);
}

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
    plan_.num_fragments += phases == 3 ? 2 : 1;
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
    const int t = tap_at(axis, unit.residue[2] + phase, phase == 0 || unit.paired, offset);
    return t < 0 ? -1 : row_tap * static_cast<int>(axis.kernel) + t;
  };
  for (int block = 0; block < plan.channel_blocks; ++block) {
    for (int x = plan.low[2]; x <= plan.low[2] + plan.reach[2]; ++x) {
      const Granule single{false, block, {depth, height, x}, {{tap(0, x), -1}, {tap(1, x), -1}}};
      if (plan.split) list.add(single);
    }
    for (int x = plan.low[2]; x <= plan.low[2] + plan.reach[2]; ++x) {
      if (tap(0, x) < 0 && tap(1, x) < 0) continue;
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

// Why the sizes do not suit, or "".
inline std::string size_refusal(const Problem& p) {
  constexpr int64_t kLimit = int64_t{1} << 29;
  if (p.dtype == DType::kFloat64) return "float64";
  if (p.groups != 1) return "groups";
  if (p.in_channels > 16) return "more than 16 input channels";
  if (p.out_channels > 128) return "more than 128 output channels";
  int64_t units = 1;
  for (int a = 0; a < 3; ++a) {
    const Axis& axis = p.axis[a];
    if (std::max({axis.kernel, axis.stride, axis.dilation}) > 64) return "a kernel, stride or dilation above 64";
    if (axis.padding >= kLimit || axis.in >= kLimit || axis.out() >= kLimit) return "an axis of 2^29 or more";
    const int64_t residues = std::min(axis.stride, axis.out());
    if (residues > kMaxResidues) return "a stride above 32";
    units *= a == 2 ? ceil_div(residues, 2) : residues;
  }
  if (units > kMaxUnits) return "a product of strides above 16";
  const double in = double(p.in_channels) * double(p.axis[0].in) * double(p.axis[1].in) * double(p.axis[2].in);
  const double out = double(p.axis[0].out()) * double(p.axis[1].out()) * double(p.axis[2].out());
  if (std::max(in, out) >= 2147483648.0) return "a batch entry of 2^31 elements or more";
  return "";
}

inline void set_offsets(Plan& plan, const Problem& problem) {
  for (int a = 0; a < 3; ++a) {
    const Axis& axis = problem.axis[a];
    int64_t low = axis.kernel * axis.dilation, high = -low;
    for (int64_t r = 0; r < axis.stride; ++r) {
      for (int64_t t = axis.first_tap(r); t < axis.kernel; t += axis.tap_step()) {
        low = std::min(low, axis.offset(r, t)), high = std::max(high, axis.offset(r, t));
      }
    }
    plan.low[a] = static_cast<int>(low);
    plan.reach[a] = static_cast<int>(high - low);
    plan.first_cell[a] = static_cast<int>(axis.padding / axis.stride);
    plan.cells[a] = static_cast<int>((axis.out() - 1 + axis.padding) / axis.stride) - plan.first_cell[a] + 1;
  }
}

// All but the tile; sets plan.refusal if it cannot be done.
inline void plan_steps(const Problem& problem, Plan& plan) {
  plan.refusal = size_refusal(problem);
  if (!plan.refusal.empty()) return;
  plan.split = problem.dtype == DType::kFloat32 && !problem.allow_tf32;
  plan.channel_blocks = static_cast<int>(ceil_div(problem.in_channels, kBlock));
  plan.column_tiles = problem.out_channels <= 8 ? 1 : 2;
  plan.column_chunks = static_cast<int>(ceil_div(problem.out_channels, 8 * plan.column_tiles));
  set_offsets(plan, problem);
  // Only residues that have outputs: with few outputs, those of the first ones on.
  int residues[3][kMaxResidues], count[3] = {0, 0, 0};
  for (int a = 0; a < 3; ++a) {
    for (int64_t r = 0; r < problem.axis[a].stride; ++r) {
      if (problem.axis[a].num_outputs(r) > 0) residues[a][count[a]++] = static_cast<int>(r);
    }
  }
  for (int z = 0; z < count[0]; ++z) {
    for (int y = 0; y < count[1]; ++y) {
      for (int x = 0; x < count[2]; ++x) {
        const bool paired = x + 1 < count[2] && residues[2][x + 1] == residues[2][x] + 1;
        if (plan.num_units == kMaxUnits) {
          plan.refusal = "a product of strides above 16";
          return;
        }
        if (!add_unit(plan, problem, {{residues[0][z], residues[1][y], residues[2][x]}, paired, 0, 0, {0, 0}})) {
          plan.refusal = "too many taps";
          return;
        }
        x += paired;
      }
    }
  }
  if (!set_smallest_tile(plan, problem)) {
    plan.refusal = "taps too far apart, or too many, for the shared memory";
  } else if (plan.num_tiles >= int64_t{1} << 30) {
    plan.refusal = "2^30 tiles or more";
  }
}

inline void make_plan(const Problem& problem, Plan& plan) {
  plan_steps(problem, plan);
  if (plan.refusal.empty()) choose_tile(plan, problem);
}

}  // namespace fastconvt::chain_mma

namespace fastconvt {

// "" if the kernel can make the call, else why not.
inline std::string chain_mma_refusal(const Problem& problem) {
  chain_mma::Plan plan{};
  chain_mma::plan_steps(problem, plan);
  return plan.refusal;
}

// On an H200, fitted to the reference layer and its relatives: instructions of the tensor and the special function
// units, which overlap in part, and what a group of cells costs beside. Without a plan: it has to be quick.
inline double chain_mma_cost_ms(const Problem& problem) {
  using chain_mma::ceil_div;
  const bool split = problem.dtype == DType::kFloat32 && !problem.allow_tf32;
  const double taps = double(problem.kernel_positions()) * double(ceil_div(problem.in_channels, chain_mma::kBlock));
  const double columns = double(ceil_div(problem.out_channels, 8));
  double cells = double(problem.batch), units = 1;
  for (int a = 0; a < 3; ++a) {
    const Axis& axis = problem.axis[a];
    cells *= double(ceil_div(axis.out() + axis.padding % axis.stride, axis.stride));
    units *= double(a == 2 ? ceil_div(axis.stride, 2) : axis.stride);
  }
  const double products = taps * (split ? 0.85 : 0.4) * columns + 2 * units;
  const double exponentials = units * (8 * columns + 1);
  const double cycles = 1.4 * (6.8 * products + 8 * exponentials) + 450;
  return 0.009 + cells / chain_mma::kCellsPerGroup * cycles / (4 * 132 * 1.75e9) * 1e3;
}

}  // namespace fastconvt
