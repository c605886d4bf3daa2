// What the phase GEMM's kernels see of a Problem.
#pragma once

#include "../core/phase_gemm.h"
#include "device/fast_divide.h"
#include "params.h"

namespace fastconvt::cuda {

// A phase along an axis, as in core/phase_gemm.h.
struct PhaseGemmPhaseParams {
  int shift;  // of the first tap
  short taps;
  short before;  // taps of the phases before it
  short first_tap;
};

struct PhaseGemmAxisParams {
  int in, out;
  int kernel, stride, padding, dilation;
  int tap_step, offset_step;
  FastDivide box, halo, tiles, phases;  // cells and inputs of a block, and how many blocks; the stride
  PhaseGemmPhaseParams phase[kPhaseGemmMaxStride];
};

struct PhaseGemmParams {
  PhaseGemmAxisParams axis[3];
  FastDivide tiles_batch, channel_blocks;
  int items;
  int batch, box_batch;
  int group_in, group_out;
  int passes;
  bool contiguous;
  bool direct;             // channels-last outputs are stored from registers
  bool resident;           // chunks stay staged for all passes
  int taps;                // of the kernel
  int cells, inputs;       // of a block
  int granules_log2;       // of 16 bytes, in a staged input
  int steps, last_steps;   // products along a chunk, and along the last one
  int chunks;              // of input channels
  int group_granules;      // that exist in a group of the input that blocks read
  int64_t pixel_granules;  // of a position in it
  int64_t image_granules;  // of a batch entry in it
  int stages, taps_per_stage, buffers;
  int min_shift;     // of the last axis, over all phases
  int vector_bytes;  // that every store may have
  int pitch, buffer_bytes, stage_bytes, staging_pitch;
  int rows_at, taps_at, barriers_at, inputs_at, weights_at, staging_at;  // in shared memory
  Strides in, out;                                                       // of the caller's tensors
  const void* source;                                                    // the input that blocks read
  const void* packed_weight;
  const void* input;  // the caller's tensors
  const void* weight;
  const void* bias;
  void* output;
};

}  // namespace fastconvt::cuda
