// What the fused kernel of the chain's gradients sees of a problem, and how a block divides its shared memory.
#pragma once

#include "../core/chain_backward.h"
#include "params.h"

namespace fastconvt::cuda {

constexpr int kTileCells = 32;  // along the width: one warp's
// Warps of a block, a row of cells each, by the octets of output channels: what the registers hold.
constexpr int max_tile_rows(int octets) { return octets <= 2 ? 16 : 12; }
constexpr int kPlanes = 3;  // of the input: those of a cell's two neighbours, and the next one on its way
// Cells of 4 channels from row to row of a plane: from row to row and from plane to plane the lanes' fragments move to
// other banks.
constexpr int kPlanePitch = 36;
constexpr int kPatchPitch = 36;  // floats from channel to channel
constexpr int kExchangeCells = kTileCells + 1;
constexpr int kFusedEntries = 4 * kFusedPhases;

struct FusedAxis {
  int in, out;
  int kernel, stride, padding;
  int cells;  // 0 to cells - 1: all inputs and all bases of outputs are among them
  int tile;   // own cells of a tile, except for the last one
  int tiles;
};

// One phase, as a warp reads it from shared memory.
struct alignas(16) FusedPhase {
  int residue[3];
  int pairs;  // bit 2 * z + y: it has such neighbours along depth and height
  int first_step, end_step;
  int first_entry;  // of its pairs
  int padding;
  int64_t output;  // elements from phase 0's to its own
  int64_t more_padding;
};

// Offsets in floats; each part is aligned to 16 bytes.
struct FusedShared {
  int phases;           // FusedPhase
  int offsets;          // plane, step, which of two neighbours: bytes from a cell's input
  int forward_weights;  // step, octet of output channels, lane: high and low halves of two weights times log2(e)
  int input_weights;    // entry, octet, lane: of two weights
  int bias;             // times log2(e), -inf for channels that are padding
  int weight_sums;      // warp, step, half, lane: 4 sums
  int patches;  // warp: du of one phase, channel, cell; between planes the exchange: neighbour along the height,
                // cell, 2 neighbours x 4 channels of what the row adds to the input's gradient
  int patch_floats;
  int planes;  // plane, row, cell, 4 channels: the input
  int floats;
};

struct FusedParams {
  const void* grad_output;
  const void* input;
  const void* weight;
  const void* bias;        // or null
  const void* subtrahend;  // one element
  void* grad_input;        // or null
  float* seams;            // part, batch, seam, depth, channel, width: sums at the seams of tiles along the height
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
  FusedPhase phase[kFusedPhases];
  uint8_t step_phase[kFusedSteps];
  uint8_t neighbours[kFusedSteps][2];  // the second is the first again where a phase has an odd number
  bool second_exists[kFusedSteps];
  // Entries: (phase, neighbours along depth and height), for the input's gradient.
  uint8_t entry_phase[kFusedEntries];
  uint8_t entry_pair[kFusedEntries];
};

}  // namespace fastconvt::cuda
