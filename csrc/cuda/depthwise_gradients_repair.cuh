// What is not finite of the gradients of depthwise layers, by the definition.
#pragma once

#include "depthwise_gradients_params.cuh"
#include "depthwise_weight_gradient.cuh"

namespace fastconvt::cuda {

// One input's gradient by the definition.
template <typename T>
__device__ __noinline__ T depthwise_input_gradient_at(const DepthwiseGradientsParams& p, int sample, int channel, int z,
                                                      int y, int x) {
  const AxisParams &depth = p.axis[0], &height = p.axis[1], &width = p.axis[2];
  const T* const grad = static_cast<const T*>(p.grad) + sample * p.grad_batch + channel * p.grad_channel;
  const int filter = depth.kernel * height.kernel * width.kernel;
  double sum = 0;
#pragma unroll 1
  for (int i = 0; i < filter; ++i) {
    const int tx = i % width.kernel, ty = i / width.kernel % height.kernel, tz = i / (width.kernel * height.kernel);
    const int gx = x * width.stride - width.padding + tx;
    const int gy = y * height.stride - height.padding + ty * height.dilation;
    const int gz = z * depth.stride - depth.padding + tz * depth.dilation;
    if (gx < 0 || gx >= width.out || gy < 0 || gy >= height.out || gz < 0 || gz >= depth.out) continue;
    sum += static_cast<double>(to_accumulator(
               grad[gz * p.grad_plane + static_cast<int64_t>(gy) * p.grad_row + int64_t{gx} * p.grad_column])) *
           to_accumulator(static_cast<const T*>(p.weight)[static_cast<int64_t>(channel) * filter + i]);
  }
  return from_accumulator<T>(static_cast<float>(sum));
}

// Makes what is not finite of a thread's inputs' gradients again.
template <class Traits>
__device__ __noinline__ void repair_inputs(const DepthwiseGradientsParams& p, int number, int channel, int group) {
  using T = typename Traits::T;
  const DepthwiseUnit unit(p, number);
  T* const image = static_cast<T*>(p.output) + unit.sample * p.input_batch + channel * p.input_channel;
  const int depth = static_cast<int>(p.axis[0].in), height = static_cast<int>(p.axis[1].in);
  const int width = static_cast<int>(p.axis[2].in);
  const int z1 = min(unit.z + p.depth_rows, depth), x0 = unit.x + group * Traits::kInputs;
  const int y1 = Traits::kFlat ? 1 : min(unit.y + p.height_rows, height);
#pragma unroll 1
  for (int z = unit.z; z < z1; ++z) {
#pragma unroll 1
    for (int y = unit.y; y < y1; ++y) {
#pragma unroll 1
      for (int x = x0; x < (Traits::kFlat ? width : min(x0 + Traits::kInputs, width));
           x += Traits::kFlat ? p.tile : 1) {
        T* element = image + z * p.input_plane + static_cast<int64_t>(y) * p.input_row + int64_t{x} * p.input_column;
        if (!is_finite(to_accumulator(*element))) {
          *element = depthwise_input_gradient_at<T>(p, unit.sample, channel, z, y, x);
        }
      }
    }
  }
}

// Makes those of a channel's gradients of weights and bias that are not finite again. All threads call it.
template <typename T, int kThreads>
__device__ __noinline__ void repair_sums(const DepthwiseWeightParams& p, int channel, double* sums) {
  const int64_t filter = p.output != nullptr ? int64_t{p.axis[0].kernel} * p.axis[1].kernel * p.axis[2].kernel : 0;
  const int thread = static_cast<int>(threadIdx.x);
  __syncthreads();
#pragma unroll 1
  for (int64_t i = 0; i < filter + (p.grad_bias != nullptr ? 1 : 0); ++i) {
    T* target = i < filter ? static_cast<T*>(p.output) + channel * filter + i : static_cast<T*>(p.grad_bias) + channel;
    const bool finite = is_finite(to_accumulator(*target));
    __syncthreads();
    if (finite) continue;
    sums[thread] = i < filter ? depthwise_weight_share<T>(p, channel * filter + i, thread, kThreads)
                              : depthwise_bias_share<T>(p, channel, thread, kThreads);
    __syncthreads();
    if (thread != 0) continue;
    double total = 0;
    for (int e = 0; e < kThreads; ++e) total += sums[e];
    *target = from_accumulator<T>(static_cast<float>(total));
  }
}

}  // namespace fastconvt::cuda
