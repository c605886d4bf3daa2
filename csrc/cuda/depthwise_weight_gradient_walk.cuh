// The way of a thread of depthwise_weight_gradient.cuh through the output's gradient and the input.
#pragma once

#include <cuda_runtime.h>

#include "../core/depthwise_gradient.h"
#include "device/fast_divide.h"
#include "device/numeric.cuh"
#include "params.h"

namespace fastconvt::cuda {

struct DepthwiseWeightParams {
  const void* grad;
  const void* input;
  float* partial;       // (splits, weight_elements)
  float* bias_partial;  // (splits, classes, channels)
  void* output;         // null: not asked for
  void* grad_bias;      // likewise
  AxisParams axis[3];
  int64_t weight_elements;
  int64_t grad_batch, grad_channel, input_batch, input_channel;  // strides, in elements
  int grad_plane, grad_row, grad_column, input_plane, input_row, input_column;
  int channels;              // of the output
  FastDivide by_multiplier;  // output channels a group
  int batch;
  bool flat;  // the walk is along the last axis
  // A block has `slots` times `slot_threads` threads: (share, channel vector), the vector fastest. A share is a column
  // of one or more channels, or several columns.
  int slots, slot_threads, vectors;
  int step_out, step_in;  // columns that all shares of a slot have, and the input columns between two such
  int period;             // threads this far apart make the same sums
  int march;              // steps of a walk
  int units, splits;      // a unit is a walk of a slot: (sample, depth base, segment of the walk, columns)
  int classes;            // phases of depth and height
  FastDivide by_slot_threads, by_vectors, by_chunk, by_segment, by_plane, by_class, by_height_phase, by_tile;
};

// The first tap of a phase, kernel if there is none.
__device__ __forceinline__ int first_tap_or_none(const AxisParams& axis, int r) {
  return min(axis.first_tap(r), axis.kernel);
}

struct DepthwiseWeightBlock {
  int number, depth_phase, height_phase;  // the class
  int tile, split;

  __device__ explicit DepthwiseWeightBlock(const DepthwiseWeightParams& p) {
    number = static_cast<int>(blockIdx.x);
    tile = p.by_class(number);
    split = p.by_tile(tile);
    height_phase = number;
    depth_phase = p.by_height_phase(height_phase);
  }
};

// What a thread takes of the output's gradient at a time: kVector channels of a column, or, where kStride > 0, kVector
// columns, of a convolution of that stride (4: or more) and of dilation 1 along the last axis; then all rows of the
// output's gradient are aligned to such vectors.
template <typename T_, int kDepth_, int kHeight_, int kTaps_, int kVector_, int kStride_>
struct DepthwiseWeightShape {
  using T = T_;
  static constexpr int kDepth = kDepth_, kHeight = kHeight_, kTaps = kTaps_, kVector = kVector_, kStride = kStride_;
  static constexpr bool kColumns = kStride > 0;
  // How many bases the last column's may be after the first one's.
  static constexpr int kBases = kStride == 0 ? 0 : kStride == 1 ? 3 : kStride == 2 ? 2 : 1;
  static constexpr int kLoads = kTaps + kBases;               // inputs of a plane that a thread loads,
  static constexpr int kLoadVector = kColumns ? 1 : kVector;  // of so many channels
  static constexpr int kPointers = kColumns ? 1 : kTaps;
  static constexpr int kSums = kDepth * kHeight * kTaps * kVector;
  // Steps that are loaded at a time.
  static constexpr int kSteps = kVector == 1                             ? (kSums > 4 ? 4 : 8)
                                : kColumns && kDepth == 1 && kHeight < 3 ? 4
                                : kSums > 32                             ? 1
                                                                         : 2;
};

template <class Shape>
struct DepthwiseWeightThread {
  int slot, column, channel;  // the first ones
  int phase, base;            // of its first column
  int first_tap;              // of that
  bool exists;

  __device__ DepthwiseWeightThread(const DepthwiseWeightParams& p, const DepthwiseWeightBlock& block) {
    const AxisParams& width = p.axis[2];
    int rest = static_cast<int>(threadIdx.x);
    slot = p.by_slot_threads(rest);
    const int share = p.by_vectors(rest);
    column = Shape::kColumns ? share * Shape::kVector : share;
    channel = Shape::kColumns ? block.tile : (block.tile * p.vectors + rest) * Shape::kVector;
    exists = slot < p.slots && channel < p.channels;
    base = (column + width.padding) / width.stride;
    phase = (column + width.padding) % width.stride;
    first_tap = first_tap_or_none(width, phase);
  }

  // How many bases after the first column's that of column `e` is: Shape::kStride tells, but for a carry.
  __device__ bool carries(const DepthwiseWeightParams& p, int e) const {
    return (phase + e) / p.axis[2].stride > e / (Shape::kStride > 0 ? Shape::kStride : 1);
  }
};

// A walk: step m reads the output's gradient at one place, and inputs of kDepth planes.
template <class Shape>
struct DepthwiseWalk {
  using T = typename Shape::T;
  static constexpr int kDepth = Shape::kDepth, kTaps = Shape::kTaps, kVector = Shape::kVector;
  static constexpr int kLoads = Shape::kLoads, kLoadVector = Shape::kLoadVector, kPointers = Shape::kPointers;

  const T* grad;
  const T* input[kDepth][kPointers];
  int64_t grad_step, input_step;
  int steps, fast_begin, fast_end;  // steps that need no checks but of what exists in all steps or in none
  unsigned exists;                  // inputs, a bit each
  int grad_position, input_position;
  int whole_columns;  // of the thread's that exist, where the walk is not along them

  // Whether there is one.
  __device__ __forceinline__ bool begin(const DepthwiseWeightParams& p, const DepthwiseWeightBlock& block,
                                        const DepthwiseWeightThread<Shape>& thread, int unit) {
    const AxisParams &depth = p.axis[0], &height = p.axis[1], &width = p.axis[2];
    constexpr int kColumns = Shape::kColumns ? kVector : 1;
    int chunk = unit, rest = p.by_chunk(chunk);
    int segment = rest;
    rest = p.by_segment(segment);
    int plane = rest;
    const int sample = p.by_plane(plane);
    plane += static_cast<int>(depth.first_base());
    const int z = plane * depth.stride + block.depth_phase - depth.padding;
    if (static_cast<unsigned>(z) >= static_cast<unsigned>(depth.out)) return false;
    const int first = segment * p.march, skipped = p.flat ? first : chunk;
    const int x = thread.column + skipped * p.step_out, width_out = static_cast<int>(width.out);
    if (x >= width_out) return false;
    const int base = p.flat ? 0 : static_cast<int>(height.first_base()) + first;
    const int y = p.flat ? 0 : base * height.stride + block.height_phase - height.padding;
    const int all =
        p.flat ? (width_out - thread.column + p.step_out - 1) / p.step_out : static_cast<int>(height.num_bases());
    steps = min(p.march, all - first);
    grad = static_cast<const T*>(p.grad) + sample * p.grad_batch + thread.channel * p.grad_channel +
           (static_cast<int64_t>(z) * p.grad_plane + static_cast<int64_t>(y) * p.grad_row +
            static_cast<int64_t>(x) * p.grad_column);
    whole_columns = width_out - x;
    grad_step =
        p.flat ? static_cast<int64_t>(p.step_out) * p.grad_column : static_cast<int64_t>(height.stride) * p.grad_row;
    input_step = p.flat ? static_cast<int64_t>(p.step_in) * p.input_column : p.input_row;
    grad_position = p.flat ? x : y;

    // The input of the first column's first tap; the others are before it, and those of further bases after it.
    const int column =
        thread.base + skipped * p.step_in + (Shape::kColumns ? 0 : width.offset(thread.phase, thread.first_tap));
    const int lowest = column - (kTaps - 1) * width.offset_step(), highest = column + Shape::kBases;
    const int width_in = static_cast<int>(width.in);
    input_position = p.flat ? column : base;
    int channel = thread.channel;
    channel = p.by_multiplier(channel);
    const T* const image = static_cast<const T*>(p.input) + sample * p.input_batch + channel * p.input_channel;
    exists = 0;
#pragma unroll
    for (int d = 0; d < kDepth; ++d) {
      const bool plane_exists = static_cast<unsigned>(plane - d) < static_cast<unsigned>(depth.in);
#pragma unroll
      for (int t = 0; t < kPointers; ++t) {
        const int64_t at = static_cast<int64_t>(plane - d) * p.input_plane + static_cast<int64_t>(base) * p.input_row +
                           static_cast<int64_t>(column - t * width.offset_step()) * p.input_column;
        input[d][t] = image + at;
      }
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const bool is_tap = Shape::kColumns || thread.first_tap + i * width.tap_step() < width.kernel;
        const int own = column + offset(i) * (Shape::kColumns ? 1 : width.offset_step());
        const bool inside = p.flat || static_cast<unsigned>(own) < static_cast<unsigned>(width_in);
        exists |= static_cast<unsigned>(plane_exists && is_tap && inside) << (d * kLoads + i);
      }
    }
    if (p.flat) {
      fast_begin = lowest < 0 ? (-lowest + p.step_in - 1) / p.step_in : 0;
      const int grads = width_out - kColumns - x, inputs = width_in - 1 - highest;
      fast_end = grads < 0 || inputs < 0 ? 0 : min(grads / p.step_out, inputs / p.step_in) + 1;
    } else {
      const bool whole = x + kColumns <= width_out;
      fast_begin = y < 0 ? (-y + height.stride - 1) / height.stride : 0;
      const int grads = static_cast<int>(height.out) - 1 - y, inputs = static_cast<int>(height.in) - base;
      fast_end = !whole || grads < 0 ? 0 : min(grads / height.stride + 1, inputs);
    }
    fast_end = min(fast_end, steps);
    return true;
  }

  // Columns of load i after that of the first tap.
  __device__ static constexpr int offset(int i) { return Shape::kColumns ? i - (kTaps - 1) : -i; }

  using Grad = Pack<T, kVector>;
  using Input = Pack<T, kLoadVector>[kDepth][kLoads];

  // Of a step whose inputs are `at` elements after the first step's. Those that do not exist in any step are not
  // loaded.
  __device__ __forceinline__ void load_input(int64_t at, Input& value) const {
#pragma unroll
    for (int i = 0; i < kDepth * kLoads; ++i) {
      if (exists >> i & 1) value[i / kLoads][i % kLoads] = load_pack(i / kLoads, i % kLoads, at);
    }
  }

  // With checks, and zero for what does not exist.
  __device__ __forceinline__ void load_grad_checked(const DepthwiseWeightParams& p, int step, Grad& value) const {
    const T* source = grad + step * grad_step;
    const int position = grad_position + step * (p.flat ? p.step_out : p.axis[1].stride);
    const int limit = static_cast<int>(p.flat ? p.axis[2].out : p.axis[1].out);
    const bool inside = step < steps && static_cast<unsigned>(position) < static_cast<unsigned>(limit);
    value = Grad{};
    if constexpr (!Shape::kColumns) {
      if (inside) value = *reinterpret_cast<const Grad*>(source);
    } else {
      const int columns = p.flat ? limit - position : whole_columns;
#pragma unroll
      for (int v = 0; v < kVector; ++v) {
        if (inside && v < columns) value.value[v] = source[v];
      }
    }
  }

  __device__ __forceinline__ void load_input_checked(const DepthwiseWeightParams& p, int step, Input& value) const {
    const int limit = static_cast<int>(p.flat ? p.axis[2].in : p.axis[1].in);
#pragma unroll
    for (int i = 0; i < kDepth * kLoads; ++i) {
      const int apart = Shape::kColumns ? 1 : p.axis[2].offset_step();
      const int position = input_position + (p.flat ? step * p.step_in + offset(i % kLoads) * apart : step);
      value[i / kLoads][i % kLoads] = {};
      if ((exists >> i & 1) && static_cast<unsigned>(position) < static_cast<unsigned>(limit)) {
        value[i / kLoads][i % kLoads] = load_pack(i / kLoads, i % kLoads, step * input_step);
      }
    }
  }

  __device__ __forceinline__ Pack<T, kLoadVector> load_pack(int d, int i, int64_t at) const {
    return *reinterpret_cast<const Pack<T, kLoadVector>*>(load_address(d, i, at));
  }

  __device__ __forceinline__ const T* load_address(int d, int i, int64_t at) const {
    return Shape::kColumns ? input[d][0] + at + offset(i) : input[d][Shape::kColumns ? 0 : i] + at;
  }
};

}  // namespace fastconvt::cuda
