// What both kernels of depthwise_input_gradient.cu share.
#pragma once

#include <cuda_runtime.h>

#include "../core/depthwise_gradient.h"
#include "device/fast_divide.h"
#include "device/numeric.cuh"
#include "params.h"

namespace fastconvt::cuda {

// For few taps at a stride of a closed list along the last axis; a depthwise_gradient_view(). cudaErrorNotSupported
// leaves the rest to the general kernels.
cudaError_t launch_depthwise_input_window(const Problem& problem, const void* grad_output, const void* weight,
                                          void* grad_input, cudaStream_t stream);

constexpr int kDepthwiseInputRows = 2;  // inputs of a thread in contiguous tensors, along the first axis

// A unit is what a block makes at a time: of one sample, in contiguous tensors a tile of rows of one channel, in
// channels_last a stretch of the height of some channels.
struct DepthwiseInputParams {
  const void* grad;
  const void* weight;
  void* output;
  AxisParams axis[3];                            // contiguous: the first may be the batch
  int64_t grad_batch, grad_channel, grad_plane;  // strides, in elements
  int64_t output_batch, output_channel, output_plane;
  int grad_row, grad_column, output_row, output_column;
  int channels;    // of the input
  int multiplier;  // output channels a group
  int parts, units, units_of_part;
  int table_size;  // floats of weights in shared memory, with room to the next 16 bytes
  FastDivide by_part, by_plane, by_row, by_column;  // blocks of a channel (tile); units along each axis

  // Contiguous: slots of `threads` threads each, neighbours along the last axis.
  int threads, slots;
  int plane_slots, row_slots;  // slots = plane_slots * row_slots
  int columns;                 // inputs of a tile
  int pitch;                   // of a row of partial sums
  FastDivide by_threads, by_row_slot, by_columns, by_stride, by_taps;

  // channels_last: threads are (column, vector), the channel vector fastest.
  int vectors, thread_columns, march;
  FastDivide by_vectors;
};

// One input's gradient by the definition. z, y and x are along the axes of `p`.
template <typename T>
__device__ __noinline__ T depthwise_input_gradient_at(const DepthwiseInputParams& p, int64_t n, int channel, int z,
                                                      int y, int x) {
  const AxisParams &depth = p.axis[0], &height = p.axis[1], &width = p.axis[2];
  const int64_t filter = static_cast<int64_t>(depth.kernel) * height.kernel * width.kernel;
  double sum = 0;
#pragma unroll 1
  for (int64_t i = 0; i < p.multiplier * filter; ++i) {
    const int tx = static_cast<int>(i % width.kernel), ty = static_cast<int>(i / width.kernel % height.kernel);
    const int tz = static_cast<int>(i / (width.kernel * height.kernel) % depth.kernel);
    const int64_t out = static_cast<int64_t>(channel) * p.multiplier + i / filter;
    const int64_t gx = int64_t{x} * width.stride - width.padding + tx * width.dilation;
    const int64_t gy = int64_t{y} * height.stride - height.padding + ty * height.dilation;
    const int64_t gz = int64_t{z} * depth.stride - depth.padding + tz * depth.dilation;
    if (gx < 0 || gx >= width.out || gy < 0 || gy >= height.out || gz < 0 || gz >= depth.out) continue;
    const int64_t index =
        n * p.grad_batch + out * p.grad_channel + gz * p.grad_plane + gy * p.grad_row + gx * p.grad_column;
    sum += static_cast<double>(to_accumulator(static_cast<const T*>(p.grad)[index])) *
           to_accumulator(static_cast<const T*>(p.weight)[out * filter + i % filter]);
  }
  return from_accumulator<T>(static_cast<float>(sum));
}

}  // namespace fastconvt::cuda
