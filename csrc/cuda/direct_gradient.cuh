// What both gradients of layers with few channels a group share on the device (core/direct_gradient.h).
#pragma once

#include <cuda_runtime.h>

#include "../core/direct_gradient.h"
#include "device/fast_divide.h"
#include "device/numeric.cuh"
#include "params.h"

namespace fastconvt::cuda {

struct DirectGradientAxis {
  int in, out, kernel, stride, padding, dilation;
  FastDivide by_in, by_kernel;
};

struct DirectGradientParams {
  DirectGradientAxis axis[3];
  const void *grad, *input, *weight;
  void* output;                                                  // the input's gradient
  float* partial;                                                // (splits, weight elements) of the weight's gradient
  float* bias_partial;                                           // (bias_parts, output channels)
  int64_t grad_batch, grad_channel, input_batch, input_channel;  // elements
  int64_t weight_elements;
  int batch, group_in, group_out, out_channels;
  int pairs, chunk_pairs;  // of a group; of a block
  int positions;           // of a channel
  int channels, kinds;     // of a block; of blocks
  FastDivide by_chunks, by_pair_chunks, by_splits;
  int splits, bias_parts;  // blocks that share positions; that share an output channel
  int units;               // of all samples
  FastDivide by_units;
};

// All but what the tile decides.
inline DirectGradientParams direct_gradient_params(const Problem& problem, const void* grad, const void* input,
                                                   const void* weight, void* output) {
  DirectGradientParams p{};
  for (int a = 0; a < 3; ++a) {
    const Axis& axis = problem.axis[a];
    DirectGradientAxis& to = p.axis[a];
    to.in = static_cast<int>(axis.in), to.out = static_cast<int>(axis.out());
    to.kernel = static_cast<int>(axis.kernel), to.stride = static_cast<int>(axis.stride);
    to.padding = static_cast<int>(axis.padding), to.dilation = static_cast<int>(axis.dilation);
    to.by_in = fast_divide(to.in), to.by_kernel = fast_divide(to.kernel);
  }
  p.grad = grad, p.input = input, p.weight = weight, p.output = output;
  const Strides grads = output_strides(problem), inputs = input_strides(problem);
  p.grad_batch = grads.batch, p.grad_channel = grads.channel;
  p.input_batch = inputs.batch, p.input_channel = inputs.channel;
  p.weight_elements = problem.weight_elements();
  p.batch = static_cast<int>(problem.batch);
  p.group_in = static_cast<int>(problem.in_channels_per_group());
  p.group_out = static_cast<int>(problem.out_channels_per_group());
  p.out_channels = static_cast<int>(problem.out_channels);
  p.pairs = static_cast<int>(direct_gradient_pairs(problem));
  p.positions = static_cast<int>(problem.in_positions());
  return p;
}

#ifdef __CUDACC__

// What a block makes: the first channel of a group.
struct DirectKind {
  int group, channel;

  __device__ explicit DirectKind(const DirectGradientParams& p) {
    channel = blockIdx.y;
    group = p.by_chunks(channel);
    channel *= p.channels;
  }
};

// A pair: where it lies from a position's place, in bytes, and a bit for its tap along each axis.
struct alignas(8) DirectPair {
  uint32_t offset, taps;

  // An absent pair is met only where all taps are.
  static __device__ DirectPair absent() { return {0, 0xffffffffu}; }

  static __device__ DirectPair make(const DirectGradientParams& p, int pair, int element_size) {
    int kw = pair;
    int kh = p.axis[2].by_kernel(kw);
    int kd = p.axis[1].by_kernel(kh);
    const int co = p.axis[0].by_kernel(kd);
    const int row = kd * p.axis[0].dilation * p.axis[1].out + kh * p.axis[1].dilation;
    const int offset = row * p.axis[2].out + kw * p.axis[2].dilation;
    const int heights = p.axis[0].kernel, widths = heights + p.axis[1].kernel;
    return {static_cast<uint32_t>(co * p.grad_channel + offset) * element_size,
            1u << kd | 1u << (heights + kh) | 1u << (widths + kw)};
  }
};

// A position of a channel: where its first tap lies, and which taps exist; a place that is none has no taps.
struct DirectPlace {
  int offset;
  uint32_t taps;

  __device__ __forceinline__ void make(const DirectGradientParams& p, int position) {
    int x[3] = {0, 0, position};
    x[1] = p.axis[2].by_in(x[2]);
    x[0] = p.axis[1].by_in(x[1]);
    bool inside = position < p.positions;
    int o[3];
#pragma unroll
    for (int a = 0; a < 3; ++a) {
      const DirectGradientAxis& axis = p.axis[a];
      o[a] = x[a] * axis.stride - axis.padding;
      inside = inside && o[a] >= 0 && o[a] + (axis.kernel - 1) * axis.dilation < axis.out;
    }
    offset = (o[0] * p.axis[1].out + o[1]) * p.axis[2].out + o[2];
    taps = 0xffffffffu;
    if (inside) return;
    taps = 0;
    if (position >= p.positions) return;
    int bit = 0;
#pragma unroll
    for (int a = 0; a < 3; ++a) {
#pragma unroll 1
      for (int t = 0, at = o[a]; t < p.axis[a].kernel; ++t, ++bit, at += p.axis[a].dilation) {
        if (static_cast<unsigned>(at) < static_cast<unsigned>(p.axis[a].out)) taps |= 1u << bit;
      }
    }
  }

  __device__ __forceinline__ bool has(uint32_t pair_taps) const { return (taps & pair_taps) == pair_taps; }
};

template <typename T>
__device__ __forceinline__ float direct_load(const unsigned char* place) {
  return to_accumulator(__ldg(reinterpret_cast<const T*>(place)));
}

#endif  // __CUDACC__

}  // namespace fastconvt::cuda
