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

// An element of the input's gradient by its definition.
struct GradientGemmDefinition {
  GradientGemmAxis axis[3];
  int group_out;
  bool weight_turned;  // taps before channels of the output
  Strides out;
  const void* grad_output;
  const void* weight;
  // Of the weight's gradient: the input, else null.
  const void* input;
  Strides in;
  int batch;
};

struct GradientGemmParams {
  GradientGemmAxis axis[3];
  int rank;          // axes of a copy besides channels and batch: the last ones
  int positions;     // of the input, in all batch entries
  FastDivide image;  // positions of a batch entry
  int items, whole;  // whole: of them, the first ones, that a block makes alone; clusters share the others
  FastDivide column_blocks, row_blocks;
  int group_in;
  int group_pitch, out_channels;  // that copies read, of a group and of all: beyond them is zero
  int chunk, chunks, units, units_per_stage, inner, splits;
  int rows, columns, staged_columns;  // of a block, and of what it stages at a time
  int chunk_bytes;
  int swizzle;
  int unit_rows_bytes, unit_columns_bytes;  // of a unit of either operand
  int stages, stage_bytes;
  int staging_at, staging_share;  // of each warpgroup
  // Windows (core/gradient_gemm.h): padded planes, of what size, in elements, how many channels of an image one has.
  const void* planes;
  int plane, plane_row, plane_layer, slice;
  int64_t planes_image;  // bytes from image to image
  int image_positions;   // of the weight's gradient
  void* bias;            // its gradient is made as well, if this is not null
  // Staged lines: bytes of a block of a line, 1 << line_log2, from block to block, from line to line, and which bits of
  // a line's number turn it round.
  int line_bytes, line_log2, line_block, line_pitch, line_shift, line_mask;
  bool contiguous;
  GradientGemmStore store;
  int piece;  // elements that a thread stores at once
  // Whether what is read stands there already while the grid before may still run, and whether that one still reads
  // what is where the input's gradient will be.
  bool ready, stores_wait;
  Strides in;
  void* grad_input;
  GradientGemmDefinition definition;
};

}  // namespace fastconvt::cuda
