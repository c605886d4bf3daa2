// What the blocks of a gradient GEMM know of their problem.
#pragma once

#include "../core/gradient_gemm.h"
#include "device/fast_divide.h"
#include "params.h"

namespace fastconvt::cuda {

struct GradientGemmAxis {
  FastDivide in;
  int out, kernel, stride, padding, dilation;
};

struct GradientGemmParams {
  GradientGemmAxis axis[3];
  int rank;          // axes of a copy besides channels and batch: the last ones
  int positions;     // of the input, in all batch entries
  FastDivide image;  // positions of a batch entry
  int items;
  FastDivide column_blocks, row_blocks;
  int group_in, group_out;
  int group_pitch, out_channels;  // that copies read, of a group and of all: beyond them is zero
  int chunk, chunks, units, units_per_stage, inner, splits;
  int rows, columns, staged_columns;  // of a block, and of what it stages at a time
  int chunk_bytes;
  int swizzle;
  int unit_rows_bytes, unit_columns_bytes;  // of a unit of either operand
  int stages, stage_bytes;
  int staging_at, staging_share;  // of each warpgroup
  // Staged lines: bytes of a block of a line, 1 << line_log2, from block to block, from line to line, and which bits of
  // a line's number turn it round.
  int line_bytes, line_log2, line_block, line_pitch, line_shift, line_mask;
  bool contiguous;
  GradientGemmStore store;
  int piece;           // elements that a thread stores at once
  bool weight_turned;  // taps before channels of the output
  Strides in, out;
  const void* grad_output;
  const void* weight;
  void* grad_input;
};

}  // namespace fastconvt::cuda
