// What the direct kernels see of a problem and of its division into blocks and threads.
#pragma once

#include "../core/direct.h"
#include "device/fast_divide.h"
#include "params.h"
#include "rectifier.h"

namespace fastconvt::cuda {

// A tap of depth and height: what it reads, from a base on.
struct DirectTapRow {
  int plane, row;
  int offset;  // of both, in elements
  int weight;  // floats from the first weight of a quad on
};

// A phase of depth and height: its outputs lie at base * stride - padding + (depth, row).
struct DirectPlace {
  int depth, row;
  int offset;  // of both, in elements
  int begin;   // of its taps
};

// Threads: columns fastest, or in channels_last four of them, then quads of output channels of a block (in contiguous
// layout it has one), then the other columns, segments of bases of the height, along which a thread marches, bases of
// the depth, and samples. A block is a chunk of those, for one tile of quads.
struct DirectParams {
  const void* input;
  const void* weight;
  const void* bias;  // or null
  void* output;
  Rectifier rectify;
  AxisParams axis[3];

  // In elements. Rows and planes of inputs and outputs fit 31 bits.
  int64_t input_batch, input_channel, output_batch, output_channel;
  int input_plane, input_row, input_inner, output_plane, output_row, output_inner;

  int batch, in_channels, out_channels;  // of a group
  int quads, quads_per_group, quad_tile;
  int first_row, num_rows, first_plane;  // bases
  int columns;                           // threads along a row
  int column_in, column_out;             // from one vector of a thread to its next
  int front, first_place;                // phase of column 0; see direct_first()
  int first_input;                       // of column 0
  int march;                             // bases of the height that a thread makes
  int quad_size, bias_offset;            // floats of a quad's weights, of which the bias is the last
  int table_size;                        // weights of a quad, with channels that do not exist
  unsigned mask;                         // direct_mask()
  bool input_vectors, output_vectors;    // aligned: in contiguous layout only outputs
  int output_unit;                       // elements that are aligned together in every row of outputs: 8, 4, 2 or 1
  bool output_runs;                      // pixels are three channels, and rows of them aligned
  // Marching with rows in registers: weights of each phase of the height and row of the window, as floats from the
  // first weight of a quad on; -1 where there is no tap. The window's first row, from a base on.
  int window_weight[kDirectTaps * 2];
  int window_row;

  FastDivide by_quad_tile, by_columns, by_segment, by_plane, by_chunk, by_quads_per_group;
  FastDivide by_filter_row, by_tap_rows, by_in_channels, by_phases, by_tiles;
  FastDivide by_dilation[2];  // of height and last axis
  bool tiles_first;           // tiles of quads are the fastest blocks, not chunks
  int num_places;
  DirectPlace places[kDirectTaps + 1];  // and one that begins at the end of `taps`
  DirectTapRow taps[kDirectTaps];
};

}  // namespace fastconvt::cuda
