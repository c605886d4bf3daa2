// The row kernels as host and device see them.
#pragma once

#include <cstdint>

#include "data_rows.h"
#include "rectifier.h"

namespace fastconvt::cuda {

constexpr int kRowsWarps = 4;
constexpr int kRowsThreads = 32 * kRowsWarps;
constexpr int kRowsQuads = 4;  // of output channels, in one block

// Tensors are channels_last. A block makes one data row (an output row whose phase can have taps) of up to 16 output
// channels, kRowColumns bases of the last axis and a few more outputs beyond them, and stores its share of the constant
// rows that follow. Data rows are first_row + i * row_step; the output rows between them are bias and nothing else.
struct RowsParams : DataRows {
  const float* input;
  const float* weight;
  const float* bias;  // or null
  float* output;
  Rectifier rectify;
  Strides input_stride;
  Strides output_stride;
  int64_t weight_channel;      // between input channels
  int weight_filter;           // between output channels
  int leading, gap, trailing;  // constant pixels before, between and after the data rows of a sample
  int groups;
  int in_channels, out_channels;    // of one group
  int block_groups, block_quads;    // groups of a block, channel quads of each in the block
  int quad_blocks, channel_blocks;  // blocks of one group, of all
  int channel_chunk, tap_chunk;     // staged at once
  int weight_slot;                  // floats of one tap's weights
  bool vector_input;                // four channels of a pixel can be loaded at once
  bool vector_output;               // and stored
  int constant_pitch;               // floats of whole pixels that are stored in bulk; 0: store them one by one
  // A burst of blocks fetches the input of the next one into the L2 cache, all at once: reads that trickle into a
  // stream of stores cost far more than their bytes. 0: the input is small.
  int64_t input_bytes;
  int burst_blocks, burst_bytes;
  FastDivide by_segment, by_row, by_channel_block, by_quad_block, by_burst;
};

}  // namespace fastconvt::cuda
