// What the fused kernel of the chain's gradients sees of a problem, and how a block divides its shared memory.
#pragma once

#include "../core/chain_backward.h"
#include "params.h"

namespace fastconvt::cuda {

constexpr int kTileCells = 32;    // along the width: one warp's
constexpr int kMaxTileRows = 12;  // warps of a block, a row of cells each
constexpr int kPlanes = 3;        // of the input: those of a cell's two neighbours, and the next one on its way
constexpr int kPlanePitch = 36;   // cells of 4 channels from row to row: the rows' fragments lie in different banks
constexpr int kPatchPitch = 36;   // floats from channel to channel
constexpr int kExchangeCells = kTileCells + 1;

struct FusedAxis {
  int in, out;
  int kernel, stride, padding;
  int cells;      // 0 to cells - 1: all inputs and all bases of outputs are among them
  int last_cell;  // the last one that has outputs
  int tile;       // own cells of a tile, except for the last one
  int tiles;
};

// Offsets in floats; each part is aligned to 16 bytes.
struct FusedShared {
  int forward_weights;  // step, octet of output channels, lane: high and low halves of two weights times log2(e)
  int input_weights;    // entry, octet, lane: of two weights
  int bias;             // times log2(e), -inf for channels that are padding
  int weight_sums;      // warp, step, half, lane: 4 sums
  int patches;          // warp, channel, cell: du of one phase
  int planes;           // plane, row, cell, 4 channels: the input
  int exchange;         // row, neighbour along the height, cell, 2 neighbours x 4 channels: the input's gradient
  int floats;
};

struct FusedParams {
  const void* grad_output;
  const void* input;
  const void* weight;
  const void* bias;        // or null
  const void* subtrahend;  // one element
  void* grad_input;        // or null
  float* sums;             // block, sums_stride: the weight's as in shared memory, the bias's, the subtrahend's
  float min, max;
  FusedAxis axis[3];
  Strides input_stride;
  FusedShared shared;
  int in_channels, out_channels;
  int batch, tiles;
  int rows;  // of cells a block can make: its warps
  int sums_stride;
  bool wants_weight;
  int phases, steps, entries;
  // Neighbours have three bits: along depth, height and width, whether the cell's input or the one before.
  uint8_t residue[kFusedPhases][3];
  uint8_t first_step[kFusedPhases + 1];
  uint8_t neighbours[kFusedSteps][2];  // the second is that of the first again where a phase has an odd number
  bool second_exists[kFusedSteps];
  uint8_t step_phase[kFusedSteps];
  // Entries: (phase, neighbours along depth and height), for the input's gradient.
  uint8_t pairs[kFusedPhases];  // bit 2 * z + y: the phase has such neighbours
  uint8_t first_entry[kFusedPhases];
  uint8_t entry_phase[4 * kFusedPhases];
  uint8_t entry_pair[4 * kFusedPhases];
};

}  // namespace fastconvt::cuda
