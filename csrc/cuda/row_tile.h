// The row-tile kernels as host and device see them.
#pragma once

#include <cstdint>

#include "../core/row_tile.h"
#include "data_rows.h"
#include "rectifier.h"

namespace fastconvt::cuda {

constexpr int kRowTileWarps = 4;
constexpr int kRowTileThreads = 32 * kRowTileWarps;
constexpr int kRowTileHead = 128;  // bytes of shared memory before the weights, for biases

// Blocks are (data row and segment of it, channels, batch). A block makes one data row (an output row whose phase can
// have taps) of up to 16 output channels, a warp four of them, kRowColumns bases of the last axis and a few more
// outputs beyond them, and stores the constant rows that follow. All pairs of an input channel and a tap of the height
// that the row reads are staged at once as far as shared memory allows, which is laid out so: weights; staged inputs
// (and the constants, if each channel has its own), whose place outputs on their way take later; constants, if one
// buffer serves all.
struct RowTileParams : DataRows {
  const float* input;
  const float* weight;
  const float* bias;  // or null
  float* output;
  Rectifier rectify;
  int64_t input_batch, output_batch;  // strides
  int input_channel, output_channel;
  int weight_channel, weight_filter;             // between input channels, output channels
  int tap_step;                                  // elements of the input between neighbouring taps of a phase
  int leading, gap, trailing;                    // constant outputs of a plane before, between and after data rows
  int leading_lines, gap_lines, trailing_lines;  // of them, how many a data row may take: a line's, or none
  int groups, in_channels, out_channels;         // channels of one group
  int block_groups, block_quads;                 // groups of a block, channel quads of each in the block
  int quad_blocks, channel_blocks;               // blocks of one group, of all
  int chunk_rows;                                // rows of inputs that are staged at once
  int weight_slab;                               // floats of one warp's weights
  int tile, constants;                           // where the staged inputs and the constants start, in floats
  int constant_pitch, constant_step;             // floats of a constant buffer; between two, 0: there is one
  bool vector_input;                             // rows can be copied 16 bytes at a time
  // A burst of blocks fetches the input of the next one into the L2 cache, all at once: reads that trickle into a
  // stream of stores cost far more than their bytes. 0: the input is small.
  int64_t input_bytes;
  int burst_blocks, burst_bytes;
  FastDivide by_segment, by_quad_block, by_burst;
};

}  // namespace fastconvt::cuda
