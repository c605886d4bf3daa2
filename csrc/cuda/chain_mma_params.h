// What the tensor-core chain's kernel sees of a plan (core/chain_mma.h): plain data that is passed by value.
#pragma once

#include <cstdint>

#include "../core/chain_mma.h"
#include "device/fast_divide.h"
#include "params.h"

namespace fastconvt::cuda::chain_mma {

using fastconvt::chain_mma::kBlock;
using fastconvt::chain_mma::kCellsPerGroup;
using fastconvt::chain_mma::kMaxSteps;
using fastconvt::chain_mma::kMaxTeams;
using fastconvt::chain_mma::kMaxUnits;
using fastconvt::chain_mma::kWarps;

constexpr int kTeamThreads = 32 * kWarps;
constexpr int kRows = 16;  // cells of a matrix product
constexpr int kTiles = kCellsPerGroup / kRows;
constexpr int kMaxShapeSteps = 16, kShapeDeltas = 4;
constexpr int kRoundUnits = 4;  // whose sums fill the columns of one 16 x 8 matrix

struct PackedGranule {
  bool pair;
  unsigned char block;
  short tap[2][2];
};

struct PackedUnit {
  int output;  // elements of the first phase's output from the cell's; the second phase's follows
  short first_step, first_fragment;
  unsigned char both, single[2], paired;
  unsigned char residue[4];  // of the first phase
};

struct alignas(8) Cell {
  int output;        // elements from that of the tile's first cell
  uint32_t outputs;  // bit 2 * unit + phase: it exists; kUnsafe bits further: it is left to make_by_definition()
};
constexpr int kUnsafe = 2 * kMaxUnits;
static_assert(kUnsafe == 16);

// In bytes. A block's: fragments of weights, then these; a team's: granules, then cells.
struct SharedOffsets {
  int bias, places, cell_positions, teams, team_bytes, cells;
  int rests;  // from a pair granule to that of its rests
};

struct Params {
  const void* input;
  const void* weight;
  const void* bias;        // or null
  const void* subtrahend;  // one element
  void* output;
  float min, max;
  int in_channels, out_channels, kernel_positions, weight_elements;
  int64_t input_batch, output_batch;
  int input_channel, input_axis[3];
  int in[3], out[3], stride[3], padding[3];  // the last two: of cells, as in the plan
  int tile[3], first_cell[3], low[3], region[3];
  FastDivide tiles[3], tile_size[3], region_size[3], parts;
  int tile_groups, positions;
  int twins;  // 0 or 1
  SharedOffsets shared;
  int num_tasks, whole_tiles;  // whole tiles; then the rest, each in so many parts
  int channel_blocks, column_chunks, num_steps, num_units, num_fragments;
  int last_cell[3];                                     // counted from the first one
  uint32_t all_exist, first_exists[3], last_exists[3];  // bit 2 * unit + phase
  uint32_t step[kMaxSteps + 1];                         // byte offsets of the two granules from the cell's first
  // For a shape: of the first granules alone, and how much further the second ones lie, by class; class 0: no further.
  int shape_step[kMaxShapeSteps], shape_delta[kShapeDeltas];
  short step_fragment[kMaxSteps];
  unsigned char step_phases[kMaxSteps];  // bit 2: the first step of its unit
  PackedGranule granule[kMaxSteps][2];
  PackedUnit unit[kMaxUnits];
  AxisParams axis[3];  // for the definition
};

}  // namespace fastconvt::cuda::chain_mma
