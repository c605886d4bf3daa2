// One phase of one row by the definition, in float32 and for every value: where an input, a weight or a gradient is not
// finite or S leaves the safe range. A product counts if its input and its output exist, and only then: here a padded
// zero never meets an infinity.
#pragma once

#include "chain_backward_tile.cuh"

namespace fastconvt::cuda {

template <typename T>
__device__ __forceinline__ int64_t input_offset(const FusedParams& p, const FusedPlace& place, int neighbour, int cell,
                                                bool& exists) {
  int64_t offset = place.batch * p.input_stride.batch;
  exists = true;
#pragma unroll
  for (int a = 0; a < 3; ++a) {
    const int i = place.cell[a] + (a == 2 ? cell : 0) - (neighbour >> (2 - a) & 1);
    exists = exists && i >= 0 && i < p.axis[a].in;
    offset += i * p.input_stride.axis[a];
  }
  return offset;
}

template <typename T>
__device__ __noinline__ float careful_product(const FusedParams& p, const FusedPlace& place, int channel, int cell) {
  const T* bias = static_cast<const T*>(p.bias);
  float sum = bias != nullptr ? to_accumulator(__ldg(bias + channel)) : 0;
#pragma unroll 1
  for (int neighbour = 0; neighbour < 8; ++neighbour) {
    const int tap = find_tap(p, place.phase, neighbour);
    bool exists;
    const int64_t offset = input_offset<T>(p, place, neighbour, cell, exists);
    if (tap < 0 || !exists) continue;
#pragma unroll 1
    for (int c = 0; c < p.in_channels; ++c) {
      const T* input = static_cast<const T*>(p.input) + offset + c * p.input_stride.channel;
      sum += to_accumulator(__ldg(input)) * load_weight<T>(p, c, channel, tap);
    }
  }
  return sum * Log2Domain<float>::kLog2E;
}

// Writes du (channel, cell) to the warp's patch, 0 where the output does not exist; a lane makes a cell. Returns G.
template <typename T>
__device__ __noinline__ float careful_du(const FusedParams& p, const FusedPlace& place, int channels, float* patch) {
  const int cell = threadIdx.x % kLanes;
  const bool exists = output_exists(p, place, cell);
  ChannelSum<float, true> total;
  if (exists) {
#pragma unroll 1
    for (int c = 0; c < p.out_channels; ++c) {
      patch[c * kPatchPitch + cell] = total.add(careful_product<T>(p, place, c, cell));
    }
  }
  const Activation<float> a = total.activate();
  float passed = 0, factor = 0;
  if (exists) {
    const float subtrahend = to_accumulator(__ldg(static_cast<const T*>(p.subtrahend)));
    const float before_clamp = a.value * a.gate * (1.0f / 6) - subtrahend;
    if (before_clamp >= p.min && before_clamp <= p.max) {
      passed = to_accumulator(__ldg(static_cast<const T*>(p.grad_output) + output_offset(p, place, cell)));
    }
    factor = passed * (a.gate + a.value * a.gate * a.complement) * (1.0f / 6);
  }
#pragma unroll 1
  for (int c = 0; c < channels; ++c) {
    float& value = patch[c * kPatchPitch + cell];
    value = exists && c < p.out_channels ? factor * total.restore(value) : 0;
  }
  __syncwarp();
  return cell < place.own ? passed : 0;
}

// What the row's du adds to four places of D: cells cell and cell + 8, columns 2 t and 2 t + 1 of the pair.
template <typename T>
__device__ __noinline__ float4 careful_input_sums(const FusedParams& p, const FusedPlace& place, const float* patch,
                                                  int pair, int cell) {
  float sum[4] = {};
#pragma unroll 1
  for (int i = 0; i < 4; ++i) {
    const int column = threadIdx.x % 4 * 2 + i % 2, at = cell + i / 2 * 8;
    const int tap = find_tap(p, place.phase, pair * 2 + column / 4);
    if (tap < 0 || !output_exists(p, place, at)) continue;
    float total = 0;
#pragma unroll 1
    for (int c = 0; c < p.out_channels; ++c) {
      if (column % 4 < p.in_channels) total += patch[c * kPatchPitch + at] * load_weight<T>(p, column % 4, c, tap);
    }
    if (i == 0) sum[0] = total;
    if (i == 1) sum[1] = total;
    if (i == 2) sum[2] = total;
    if (i == 3) sum[3] = total;
  }
  return make_float4(sum[0], sum[1], sum[2], sum[3]);
}

// Adds the row's part to four sums of the weight's gradient: channels `channel` and channel + 8, columns of the step.
template <typename T>
__device__ __noinline__ void careful_weight_sums(const FusedParams& p, const FusedPlace& place, const float* patch,
                                                 int step, int channel, float* sums) {
#pragma unroll 1
  for (int i = 0; i < 4; ++i) {
    const int column = threadIdx.x % 4 * 2 + i % 2, c = channel + i / 2 * 8;
    const int neighbour = p.neighbours[step][column / 4];
    if (c >= p.out_channels || column % 4 >= p.in_channels || (column >= 4 && !p.second_exists[step])) continue;
    float total = 0;
#pragma unroll 1
    for (int cell = 0; cell < place.own; ++cell) {
      bool exists;
      const int64_t offset = input_offset<T>(p, place, neighbour, cell, exists);
      if (!exists || !output_exists(p, place, cell)) continue;
      const T* input = static_cast<const T*>(p.input) + offset + column % 4 * p.input_stride.channel;
      total += patch[c * kPatchPitch + cell] * to_accumulator(__ldg(input));
    }
    sums[i] += total;
  }
}

}  // namespace fastconvt::cuda
