// The gradient of depthwise layers (one input channel a group) with respect to the input, contiguous:
//
//   grad_input[n, c, i] = sum over t of grad_output[n, c, i * stride - padding + t * dilation] * weight[c, t].
//
// A thread owns columns of the output's gradient, all of one phase of the last axis, so loads are whole lines whatever
// stride and padding are. It sums over the taps of the other axes, for each of its columns and each tap that the phase
// has along the last axis. These partial sums meet in shared memory, where an input adds those of its taps.
#pragma once

#include "depthwise_input_gradient_params.cuh"

namespace fastconvt::cuda {

// The partial sums of column `column` stand here: inputs a power of two apart read from different banks.
__device__ __forceinline__ int skewed(int column) { return column + (column >> 5); }

// A unit's first input, and its columns of the output's gradient: `first` is the one of column 0 of thread 0.
struct DepthwiseInputTile {
  int sample, z, y, x, columns;
  int first;

  __device__ DepthwiseInputTile(const DepthwiseInputParams& p, int unit) {
    const AxisParams& width = p.axis[2];
    int rest = unit;
    y = rest;
    rest = p.by_row(y);
    z = rest;
    rest = p.by_plane(z);
    x = rest;
    sample = p.by_column(x);
    y *= p.row_slots;
    z *= p.plane_slots * kDepthwiseInputRows;
    x *= p.columns;
    columns = min(p.columns, static_cast<int>(width.in) - x);
    first = max(0, x * width.stride - width.padding);
  }
};

// The weights of a channel, by output channel of the group, tap of the outer axes, phase, and tap of the phase.
template <typename T, int kTaps>
__device__ __forceinline__ void fill_table(const DepthwiseInputParams& p, int channel, float* table) {
  const AxisParams& width = p.axis[2];
  const int rows = p.multiplier * p.axis[0].kernel * p.axis[1].kernel;
  const T* weight = static_cast<const T*>(p.weight) + static_cast<int64_t>(channel) * rows * width.kernel;
#pragma unroll 1
  for (int i = threadIdx.x; i < rows * width.stride * kTaps; i += static_cast<int>(blockDim.x)) {
    int phase = i / kTaps;
    const int row = p.by_stride(phase);
    const int tap = min(width.first_tap(phase), width.kernel) + i % kTaps * width.tap_step();
    table[i] = tap < width.kernel ? to_accumulator(weight[row * width.kernel + tap]) : 0.f;
  }
}

// The partial sums of one slot's thread: [input along the first axis][tap][column].
template <typename T, int kTaps>
struct DepthwiseInputSums {
  static constexpr int kColumns = kDepthwiseGradientColumns;
  float sum[kDepthwiseInputRows][kTaps][kColumns] = {};

  __device__ __forceinline__ void add(const DepthwiseInputParams& p, const DepthwiseInputTile& tile, int channel, int z,
                                      int y, int column, const float* table) {
    const AxisParams &depth = p.axis[0], &height = p.axis[1], &width = p.axis[2];
    int place[kColumns];
#pragma unroll
    for (int e = 0; e < kColumns; ++e) {  // those beyond the end are loaded somewhere, and never used
      place[e] = min(tile.first + column + e * p.threads, static_cast<int>(width.out) - 1);
    }
    int phase = tile.first + column + width.padding;
    p.by_stride(phase);
    const int row_weights = width.stride * kTaps;
    const T* grad = static_cast<const T*>(p.grad) + tile.sample * p.grad_batch +
                    static_cast<int64_t>(channel) * p.multiplier * p.grad_channel;
#pragma unroll 1
    for (int i = 0; i < p.multiplier * height.kernel; ++i) {
      const int multiple = i / height.kernel, ty = i - multiple * height.kernel;
      const int gy = y * height.stride - height.padding + ty * height.dilation;
      if (static_cast<unsigned>(gy) >= static_cast<unsigned>(height.out)) continue;
      const T* row = grad + multiple * p.grad_channel + static_cast<int64_t>(gy) * p.grad_row;
      const int table_row = multiple * depth.kernel * height.kernel + ty;
      add_planes(p, row, z * depth.stride - depth.padding, place, table + table_row * row_weights + phase * kTaps,
                 height.kernel * row_weights);
    }
  }

  __device__ __forceinline__ void add_planes(const DepthwiseInputParams& p, const T* row, int first,
                                             const int (&place)[kColumns], const float* weights, int step) {
    const AxisParams& depth = p.axis[0];
    constexpr int kFirst = 16;  // planes that are added first, so that no chain of float32 sums is long
#pragma unroll 1
    for (int begin = 0; begin < depth.kernel; begin += kFirst) {
      float part[kDepthwiseInputRows][kTaps][kColumns] = {};
      const int end = min(begin + kFirst, depth.kernel);
#pragma unroll 2
      for (int tz = begin; tz < end; ++tz, weights += step) {
        T grad[kDepthwiseInputRows][kColumns];
#pragma unroll
        for (int r = 0; r < kDepthwiseInputRows; ++r) {
          const int gz = first + r * depth.stride + tz * depth.dilation;
          const bool exists = static_cast<unsigned>(gz) < static_cast<unsigned>(depth.out);
          const T* plane = row + gz * p.grad_plane;
#pragma unroll
          for (int e = 0; e < kColumns; ++e) grad[r][e] = exists ? plane[place[e]] : T{};
        }
        const auto weight = *reinterpret_cast<const Pack<float, kTaps>*>(weights);
#pragma unroll
        for (int r = 0; r < kDepthwiseInputRows; ++r) {
#pragma unroll
          for (int i = 0; i < kColumns; ++i) {
#pragma unroll
            for (int t = 0; t < kTaps; ++t) part[r][t][i] += weight.value[t] * to_accumulator(grad[r][i]);
          }
        }
      }
#pragma unroll
      for (int i = 0; i < kDepthwiseInputRows * kTaps * kColumns; ++i) {
        const int r = i / (kTaps * kColumns), t = i / kColumns % kTaps;
        sum[r][t][i % kColumns] += part[r][t][i % kColumns];
      }
    }
  }

  // Rows of `pitch` floats: [slot][input along the first axis][tap].
  __device__ __forceinline__ void save(const DepthwiseInputParams& p, int slot, int column, float* saved) const {
    float* row = saved + slot * kDepthwiseInputRows * kTaps * p.pitch;
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const int place = skewed(column + i * p.threads);
#pragma unroll
      for (int r = 0; r < kDepthwiseInputRows * kTaps; ++r) row[r * p.pitch + place] = sum[r / kTaps][r % kTaps][i];
    }
  }
};

// The inputs of a unit, each from the partial sums of its taps.
template <typename T, int kTaps>
__device__ __forceinline__ void fold(const DepthwiseInputParams& p, const DepthwiseInputTile& tile, int channel,
                                     const float* saved) {
  const AxisParams &depth = p.axis[0], &height = p.axis[1], &width = p.axis[2];
  const int step = width.tap_step();
#pragma unroll 1
  for (int i = threadIdx.x; i < p.slots * kDepthwiseInputRows * p.columns; i += static_cast<int>(blockDim.x)) {
    int x = i;
    const int row = p.by_columns(x);
    int y = row / kDepthwiseInputRows, z = p.by_row_slot(y);
    z = tile.z + z * kDepthwiseInputRows + row % kDepthwiseInputRows;
    y += tile.y;
    if (x >= tile.columns || y >= height.in || z >= depth.in) continue;
    x += tile.x;
    const float* line = saved + row * kTaps * p.pitch;
    int column = x * width.stride - width.padding;
    float sum = 0, part = 0;
    int left = step;
#pragma unroll 4
    for (int t = 0; t < width.kernel; ++t, column += width.dilation) {
      if (static_cast<unsigned>(column) < static_cast<unsigned>(width.out)) part += line[skewed(column - tile.first)];
      if (--left == 0) left = step, line += p.pitch, sum += part, part = 0;
    }
    sum += part;
    T* target = static_cast<T*>(p.output) + tile.sample * p.output_batch + channel * p.output_channel +
                z * p.output_plane + static_cast<int64_t>(y) * p.output_row + x;
    *target =
        is_finite(sum) ? from_accumulator<T>(sum) : depthwise_input_gradient_at<T>(p, tile.sample, channel, z, y, x);
  }
}

template <typename T, int kTaps>
__global__ void __launch_bounds__(kDepthwiseGradientThreads, 2)
    depthwise_input_gradient_kernel(const __grid_constant__ DepthwiseInputParams p) {
  extern __shared__ __align__(16) float shared[];
  float* saved = shared + p.table_size;
  int part = static_cast<int>(blockIdx.x);
  const int channel = p.by_part(part);
  fill_table<T, kTaps>(p, channel, shared);
  int column = static_cast<int>(threadIdx.x);
  const int slot = p.by_threads(column);
  int row_slot = slot;
  const int plane_slot = p.by_row_slot(row_slot);
  const int end = min(p.units, (part + 1) * p.units_of_part);
#pragma unroll 1
  for (int unit = part * p.units_of_part; unit < end; ++unit) {
    const DepthwiseInputTile tile(p, unit);
    __syncthreads();
    if (slot < p.slots) {
      DepthwiseInputSums<T, kTaps> sums;
      sums.add(p, tile, channel, tile.z + plane_slot * kDepthwiseInputRows, tile.y + row_slot, column, shared);
      sums.save(p, slot, column, saved);
    }
    __syncthreads();
    fold<T, kTaps>(p, tile, channel, saved);
  }
}

}  // namespace fastconvt::cuda
