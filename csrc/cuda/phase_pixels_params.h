// What the kernels of the phase GEMM on tensor copies see of a Problem.
#pragma once

#include "../core/phase_pixels.h"
#include "device/fast_divide.h"
#include "params.h"
#include "rectifier.h"

namespace fastconvt::cuda {

// A phase along an axis, as in core/axis_phases.h.
struct PhasePixelsPhaseParams {
  int shift;  // of the first tap
  short taps;
  short before;  // taps of the phases before it
  short first_tap;
  short slot;  // among the phases with taps; -1: no tap
  int cells;   // that have an output
};

struct PhasePixelsAxisParams {
  int in, out;
  int kernel, stride, padding, dilation;
  int tap_step, offset_step;
  int box;
  int step_bytes;            // from a staged input to its neighbour
  FastDivide tiles, phases;  // that items differ in
  PhasePixelsPhaseParams phase[kPhasePixelsMaxStride];
};

struct PhasePixelsParams {
  PhasePixelsAxisParams axis[3];
  FastDivide tiles_batch, channel_blocks;
  int items;
  int batch, box_batch;
  int group_in, group_out;
  PhaseTmaSplit split;
  bool batch_inner;    // order of the copies' coordinates
  int taps;            // of the kernel
  int chunk, chunks;   // input channels, and how many
  int group_channels;  // of the tensor that copies read
  // A cell's number, a sum of shifted coordinates; the width's low and high bits stand apart.
  int shift_batch, shift_depth, shift_height, shift_width, low_width_log2, shift_high_width;
  int batch_bytes;  // from a staged batch entry to its neighbour
  int group_bytes;  // from eight cells to the next
  // Of weights, from eight input channels, 64 columns, and a tap, to the next; taps of a copy.
  int weight_group_bytes, weight_block_bytes, weight_tap_bytes, copied_taps;
  int swizzle;  // the layout of operands, as descriptors have it
  int stages, taps_per_stage, buffers;
  int unit_columns, unit_bytes, stage_bytes;  // of a warpgroup's weights of a tap; of a stage
  int staging_pitch;                          // from a cell's staged channels to the next one's
  int buffer_bytes, copied_bytes;             // of a box of inputs: its place, and the copy
  bool vectors;                               // every store may have 16 bytes
  bool bulk;                                  // a cell's channels leave by a bulk store
  bool permuted;                              // packed so that a thread's sums are of eight neighbouring channels
  int columns;                                // output channels of a block
  int tasks_at, terms_at, inputs_at, weights_at, staging_at;
  Strides in, out;                    // of the caller's tensors
  int64_t weight_column, weight_tap;  // strides of the caller's weights, in elements
  Rectifier rectify;
  const void* packed_weight;  // null: copies read the caller's weights
  const void* input;          // the caller's tensors
  const void* weight;
  const void* bias;
  void* output;
};

}  // namespace fastconvt::cuda
