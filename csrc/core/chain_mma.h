// The fused chain on tensor cores, planned on the host: its steps (chain_mma_steps.h), its shared memory and the tile.
// Plain C++17: no Torch, no CUDA.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>

#include "chain_mma_steps.h"
#include "problem.h"

namespace fastconvt::chain_mma {

// A block's: weights, bias, the places of positions, the positions of cells.
inline int64_t block_bytes(const Plan& plan) {
  const int64_t weights = int64_t{plan.column_chunks} * plan.num_fragments * plan.column_tiles * 256;
  const int64_t bias = int64_t{plan.column_chunks} * plan.column_tiles * 32;
  const int64_t tables = 4 * int64_t{plan.positions()} + 2 * int64_t{plan.tile_groups()} * kCellsPerGroup;
  return (weights + bias + tables + 15) / 16 * 16;
}

// A team's: granules of a region, and what it knows of its cells.
inline int64_t team_bytes(const Plan& plan) {
  return int64_t{plan.planes()} * plan.position_bytes() * plan.positions() +
         int64_t{plan.tile_groups()} * kCellsPerGroup * 8;
}

// A warp's cycles for kCellsPerGroup cells: matrix products, exponentials, the rest.
inline double group_cycles(const Plan& plan) {
  const double fragments = plan.num_fragments * (plan.rests ? 1.5 : 1);
  const double products = fragments * plan.column_tiles + 2 * plan.num_units;
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
    plan.region[a] = (tile[a] - 1) * (a == 2 ? plan.cell_inputs() : 1) + plan.reach[a] + 1;
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
         int64_t{plan.planes()} * plan.positions() * plan.position_bytes() < 1 << 16;
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
    plan.stride[a] = static_cast<int>(axis.stride);
    plan.padding[a] = static_cast<int>(axis.padding);
    if (plan.twins && a == 2) {  // they begin with the first output, and read a multiple of two inputs
      plan.low[a] += plan.padding[a];
      plan.reach[a] = (plan.reach[a] + 1) | 1;
      plan.stride[a] = 2, plan.padding[a] = 0;
    }
    plan.first_cell[a] = plan.padding[a] / plan.stride[a];
    plan.cells[a] = static_cast<int>((axis.out() - 1 + plan.padding[a]) / plan.stride[a]) - plan.first_cell[a] + 1;
  }
}

// Whether a phase has a tap for both inputs of most pairs.
inline bool fills_pairs(const Axis& axis) { return axis.dilation == 1 && 2 * axis.kernel >= 3 * axis.stride; }

// Whether the kernel has straight-line code (Kernel3Stride2): in that, split granules are 2 % faster.
inline bool has_straight_code(const Problem& problem) {
  for (const Axis& axis : problem.axis) {
    if (axis.kernel != 3 || axis.stride != 2 || axis.dilation != 1) return false;
  }
  return problem.in_channels < kBlock && problem.out_channels > 8 && problem.out_channels <= 16;
}

// All but the tile, with twins or without; sets plan.refusal if it cannot be done.
inline void plan_cells(const Problem& problem, bool twins, Plan& plan) {
  const Axis& width = problem.axis[2];
  plan.twins = twins;
  plan.split = problem.dtype == DType::kFloat32 && !problem.allow_tf32;
  plan.rests = plan.split && (twins || fills_pairs(width)) && !has_straight_code(problem);
  plan.channel_blocks = static_cast<int>(ceil_div(problem.in_channels, kBlock));
  plan.column_tiles = problem.out_channels <= 8 ? 1 : 2;
  plan.column_chunks = static_cast<int>(ceil_div(problem.out_channels, 8 * plan.column_tiles));
  set_offsets(plan, problem);
  // Only residues that have outputs: with few outputs, those of the first ones on.
  int residues[3][kMaxResidues], count[3] = {0, 0, 0};
  for (int a = 0; a < 3; ++a) {
    for (int r = 0; r < plan.stride[a]; ++r) {
      if ((twins && a == 2) || problem.axis[a].num_outputs(r) > 0) residues[a][count[a]++] = r;
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

// The same, with twins where that can be done.
inline void plan_steps(const Problem& problem, Plan& plan) {
  plan.refusal = size_refusal(problem);
  if (!plan.refusal.empty()) return;
  if (problem.axis[2].stride == 1 && problem.axis[2].out() > 1) {
    plan_cells(problem, true, plan);
    if (plan.refusal.empty()) return;
    plan = Plan{};
  }
  plan_cells(problem, false, plan);
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
