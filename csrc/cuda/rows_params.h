// The row kernels as host and device see them.
#pragma once

#include <cstdint>

#include "../core/rows.h"
#include "device/fast_divide.h"
#include "params.h"

namespace fastconvt::cuda {

// A team is four warps that compute and one that feeds them; a block is some teams and the feeding warps of them all.
constexpr int kRowsWarps = 4;
constexpr int kRowsTeamThreads = 32 * kRowsWarps;
constexpr int kRowsMaxRows = 32;  // data rows of a block
constexpr int kRowsQuads = 4;  // of output channels, in one block

// A team makes `block_rows` neighbouring data rows (output rows whose phase can have taps) of up to 16 output
// channels, kRowColumns bases of the last axis and a few more outputs beyond them, and stores the constant rows that
// follow each. Data rows are first_row + i * row_step; the output rows between them are bias and nothing else.
//
// Where shared memory allows, all weights of the block and a ring of input rows stay there, and a data row costs at most
// one new input row. Elsewhere every data row is made in chunks of taps and channels.
struct RowsParams {
  const float* input;
  const float* weight;
  const float* bias;  // or null
  float* output;
  Strides input_stride;
  Strides output_stride;
  int64_t weight_channel;  // between input channels
  int weight_filter;       // between output channels
  int in_height, in_width, out_height, out_width;
  int padding, first_base, bases, segments;  // of the last axis
  int kernel_height, row_dilation;           // row_dilation: input rows between neighbouring taps of a phase
  int first_row, last_row, row_step, rows;   // data rows
  int leading, gap, trailing;                // constant outputs of a plane before, between and after data rows
  int leading_lines, gap_lines, trailing_lines;  // of them, how many a data row may take: a line's, or none
  int row_phase;                             // (first_row + padding) / row_step
  int row_inverse;                           // of dilation / gcd modulo stride / gcd, along the height
  int row_reach;                             // input rows between the first and the last that a data row can read
  bool tapless;                              // no output row has a phase with taps: row 0 stands for a data row
  int groups;
  int in_channels, out_channels;    // of one group
  int block_groups, block_quads;    // groups of a block, channel quads of each in the block
  int quad_blocks, channel_blocks;  // blocks of one group, of all
  int block_rows, units;            // teams' shares of a plane's rows
  int teams;                        // of the whole problem
  int team_bytes;                   // of shared memory
  int ring;                         // its rows; chunked: taps staged at once
  int channel_chunk;                // channels staged at once
  int weight_slot, input_slot;      // floats of one tap's weights, of one input row
  int weight_slots;
  int ring_step, ring_size, weight_step;  // floats between taps of a phase; of the ring
  bool vector_input;   // rows (channels_last: pixels) can be copied 16 bytes at a time
  bool vector_output;  // channels_last: four channels can be stored at once
  int constant_pitch;  // floats that are stored at once from the constant buffer; 0: store them from registers
  // Every so many data rows a team fetches the inputs of as many into the L2 cache, all at once: reads that trickle
  // into a stream of stores cost far more than their bytes. 0: the input is small.
  int burst_rows;
  FastDivide by_segment, by_unit, by_channel_block, by_quad_block;
  FastDivide by_row_phase;     // stride / gcd of the height: phases with taps, and the taps' step
  FastDivide by_row_dilation;  // row_dilation
  FastDivide by_ring;
};

}  // namespace fastconvt::cuda
