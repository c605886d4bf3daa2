// What the kernels of pairs_tf32_gradients see; see core/pairs_tf32_gradients.h.
#pragma once

#include <cuda.h>

#include "params.h"

namespace fastconvt::cuda {

constexpr int kPairsRun = 16;  // positions of a run: 128 bytes of a row of the output's gradient
constexpr int kPairsThreads = 384;

// Runs of a row are counted first, then rows, planes and batch entries.
struct PairsRuns {
  int of_row, count;
};

struct PairsTf32Params {
  int width, height, depth;  // of the input
  int step[2], padding[2];   // of height and depth
  int in_channels, inner;    // inner: terms of the input's gradient, (output channel, tap)
  int image;                 // positions of a batch entry
  int input_blocks;          // blocks of the grid that make the input's gradient, of all
  int blocks;
  // Of the input's gradient.
  PairsRuns runs;
  int items, chunks, chunk_channels, column_blocks;
  bool stream;   // the L2 cache need not keep what is stored
  bool vectors;  // rows begin at multiples of 16 bytes
  // Of the weight's.
  PairsRuns steps;                              // two runs each
  int row_blocks, row_channels, kinds, splits;  // kinds: of blocks of rows and columns
  bool wide;                                    // the two runs of a step are neighbours
  bool flat;                                    // rows of the input are read as parts of whole images
  // Tensors; grad_bias and bias_partial are null where nobody asks for the bias's gradient.
  const float *grad_output, *input, *weight;
  float *grad_input, *grad_weight, *grad_bias;
  float *partial, *bias_partial;  // (splits, input channels, inner), (splits, inner)
  // For the definition.
  AxisParams axis[3];
  Strides in, out;
  int64_t batch;
  int out_channels, taps;
};

struct PairsTf32Maps {
  CUtensorMap grads_of_chunk, grads_of_rows, weights, inputs;
};

}  // namespace fastconvt::cuda
