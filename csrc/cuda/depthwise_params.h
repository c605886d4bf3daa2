// What the depthwise kernels see of a problem and of its division into blocks and threads.
#pragma once

#include "device/fast_divide.h"
#include "params.h"
#include "rectifier.h"

namespace fastconvt::cuda {

constexpr int kDepthwiseRowThreads = 128;  // of a block, at most, in contiguous layout

// Along the last axis a thread owns `column` and some more at equal distances, which are in the same phase. Threads of
// a row are neighbours; then come segments of bases of the height, along which a thread marches, bases of the depth,
// and samples. A block is a chunk of those threads, for one channel, or in channels_last a tile of channels, and for a
// group of the height's phases.
//
// If the height is trivial, in contiguous layout, threads march along the last axis instead: its tiles pose as rows.
struct DepthwiseParams {
  const void* input;
  const void* weight;
  const void* bias;  // or null
  void* output;
  Rectifier rectify;
  AxisParams axis[3];

  // In elements. Rows and planes of inputs and outputs fit 31 bits.
  int64_t input_batch, input_channel, output_batch, output_channel;
  int input_plane, input_row, input_inner, output_plane, output_row, output_inner;

  int batch, channels;
  int rows_in, rows_out, row_stride, row_padding;  // of the height, or of tiles
  int row_step;                                    // inputs from one row to the next; 0 for tiles
  int step_in, step_out;                           // columns from one tile to the next; 0 for a real height
  int first_row, num_rows;                         // bases
  int first_plane;

  int columns;                // threads along a row
  int column_in, column_out;  // from one column of a thread to its next
  int align;                  // a thread's columns begin at addresses that are multiples of so many elements
  int align_columns;          // a multiple of the stride, at least `align`
  int march;                  // bases that a thread makes
  int phases;                 // of the height that a block makes
  // The table's places for phases of the last axis. In contiguous layout those of neighbouring vectors are neighbours,
  // and slot_pitch is from one column of a vector to the next; in channels_last, from one phase to the next.
  int num_slots, slot_pitch;
  int table_size, table_offset, mask_offset;
  int channel_tile;
  bool odd_rows;  // rows of 16-bit outputs that begin in the middle of a word

  FastDivide by_columns, by_segment, by_plane, by_chunk, by_phase_group, by_phases, by_multiplier, by_stride;
  FastDivide by_vectors, by_entries, by_depth_phases, by_slot_pitch, by_dilation[3];
};

}  // namespace fastconvt::cuda
