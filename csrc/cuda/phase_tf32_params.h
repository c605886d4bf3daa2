// What the kernels of the phase GEMM on tensor copies see of a Problem.
#pragma once

#include "../core/phase_tf32.h"
#include "device/fast_divide.h"
#include "params.h"
#include "rectifier.h"

namespace fastconvt::cuda {

// A phase along an axis, as in core/axis_phases.h.
struct PhaseTf32PhaseParams {
  int shift;  // of the first tap
  short taps;
  short before;  // taps of the phases before it
  short first_tap;
  short slot;  // among the phases with taps; -1: no tap
  int cells;   // that have an output
};

struct PhaseTf32AxisParams {
  int in, out;
  int kernel, stride, padding, dilation;
  int tap_step, offset_step;
  int box;
  int step_bytes;            // from a staged input to its neighbour
  FastDivide tiles, phases;  // that items differ in
  PhaseTf32PhaseParams phase[kPhaseTmaMaxStride];
};

struct PhaseTf32Params {
  PhaseTf32AxisParams axis[3];
  FastDivide tiles_batch, channel_blocks;
  int items;
  int batch, box_batch;
  int group_in, group_out;
  PhaseTmaSplit split;
  bool contiguous, merged;
  bool batch_inner;  // order of the copies' coordinates
  int width_passes;  // of an item, one after the other, along the last axis; the height's are outside
  int passes;
  int width_group;     // contiguous: phases of the last axis that an item makes
  int taps;            // of the kernel
  int chunk, chunks;   // input channels, and how many
  int group_channels;  // of the tensor that copies read
  int slot_pitch;      // of a staged phase, in elements
  int width_slots;
  // A cell's number, a sum of shifted coordinates; the width's low and high bits stand apart.
  int shift_batch, shift_depth, shift_height, shift_width, low_width_log2, shift_high_width;
  int batch_bytes;  // from a staged batch entry to its neighbour
  int group_bytes;  // from eight cells to the next
  int swizzle;      // the layout of operands, as descriptors have it
  int stages, taps_per_stage, buffers;
  int unit_bytes, stage_bytes, channel_pitch;
  int buffer_bytes, copied_bytes;  // of a box of inputs: its place, and the copy
  int run_rows, run_width, lines;
  bool vectors;  // every store may have 16 bytes
  bool wide;     // contiguous: runs are whole groups of eight cells, aligned
  int columns;   // output channels of a block
  int tasks_at, lines_at, terms_at, table_at, inputs_at, weights_at, staging_at;
  Strides in, out;                 // of the caller's tensors
  int weight_channel, weight_tap;  // steps of weights
  Rectifier rectify;
  const void* packed_weight;
  const void* input;  // the caller's tensors
  const void* weight;
  const void* bias;
  void* output;
};

}  // namespace fastconvt::cuda
