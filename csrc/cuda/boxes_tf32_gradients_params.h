// What the kernels of boxes_tf32_gradients see; see core/boxes_tf32_gradients.h.
#pragma once

#include <cuda.h>

#include "device/fast_divide.h"
#include "params.h"

namespace fastconvt::cuda {

constexpr int kBoxesThreads = 384;

// Positions of a copy; axes are width, height, depth, batch.
struct BoxesUnitParams {
  int positions, count;
  FastDivide box[4];
  FastDivide tiles[3];  // batch entries follow
  int offset[4];        // bytes from a position to the next one along an axis, in shared memory
  int pitch;            // of a unit
  int bytes;            // copied
};

struct BoxesTf32Params {
  int size[4];  // of the input
  int stride[3], padding[3];
  int lead;                // outputs before the first that a unit sees
  int in_channels, inner;  // inner: terms of the input's gradient
  int image;               // positions of a batch entry
  int input_blocks, blocks;
  // Of the input's gradient.
  BoxesUnitParams input;
  int stages, stage_bytes;
  int items, chunks, input_splits, column_blocks;
  int phases;                       // chunks after which terms begin with the same tap again
  int depth_taps, parts;            // of a copy, and copies of a channel
  int input_channel, input_tap[3];  // bytes from a channel or a tap to the next one
  // Of the weight's.
  BoxesUnitParams weight;
  int weight_stages, weight_stage_bytes;
  bool flat, shifted;
  int steps, row_blocks, row_channels, kinds, splits;
  int weight_channel, weight_tap[3];
  // Tensors; grad_bias and bias_partial are null where nobody asks for the bias's gradient.
  const float *grad_output, *input_tensor, *weight_tensor;
  float *grad_input, *grad_weight, *grad_bias;
  // (splits, input channels, inner); (input_splits, input); (splits, inner)
  float *partial, *input_partial, *bias_partial;
  // For the definition.
  AxisParams axis[3];
  Strides in, out;
  int64_t batch;
  int out_channels, taps;
  FastDivide by_taps, by_width, by_height;  // the kernel's elements, width and height
  bool uncounted;                           // some outputs are met by no counted tap
  int64_t counted[3];  // outputs that these meet, of depth, height and width, from the first one on
};

struct BoxesTf32Maps {
  CUtensorMap grads_of_chunk, grads_of_rows, weights, inputs;
};

}  // namespace fastconvt::cuda
