// What the kernel of the weight's gradient from tensors as they lie sees of a Problem.
#pragma once

#include "../core/few_weight_gradient.h"
#include "device/fast_divide.h"
#include "gemm_weight_gradient_params.h"

namespace fastconvt::cuda {

struct FewWeightParams {
  GemmWeightDefinition definition;
  const float *grad, *input;
  float *output, *bias;             // bias: null if nobody asks for it
  int step[3], padding[3], out[3];  // of the axes
  int in_pitch[3], out_pitch[3];    // elements
  int in_channel, in_batch, out_channel, out_batch;
  FastDivide positions, plane, width;  // of an image; of depth; of a row
  FastDivide taps, tap_plane, tap_width;
  int dilation[3];
  int all;                           // positions of all images
  int group_in, group_out, columns;  // columns: of the output, (channel, tap)
  FastDivide row_blocks, column_blocks;
  int weight_blocks;  // of the grid; the others sum the bias
  int out_channels, out_positions, batch;
  bool gathers_pairs;  // two taps of a channel meet two outputs side by side, which stand aligned
  bool pairs;          // two neighbours of a row of the output stand aligned
};

}  // namespace fastconvt::cuda
