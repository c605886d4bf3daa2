// The gradient of depthwise layers with respect to the input, for kernels of at most kKernel at stride kStride and
// dilation 1 along the last axis. A thread owns kInputs neighbouring inputs, in channels_last of kVector channels, and
// marches down the rows of the output's gradient: it loads the columns that its inputs reach, and adds each row to the
// kReach rows of the input that it reaches. Padding, and all of the other axes, are run time.
#pragma once

#include "depthwise_input_gradient_window_table.cuh"

namespace fastconvt::cuda {

// The columns of a row that a thread reads, as they are loaded.
template <class Shape, bool kVectors = Shape::kLead != kNoLead>
struct DepthwiseWindowColumns {
  using T = typename Shape::T;
  Pack<T, Shape::kVector> column[Shape::kColumns] = {};

  __device__ __forceinline__ float at(int i, int v) const { return to_accumulator(column[i].value[v]); }

  // Columns that do not exist, those without a bit in `mask`, stay zero.
  __device__ __forceinline__ void load(const T* row, int column_stride, unsigned mask) {
#pragma unroll
    for (int i = 0; i < Shape::kColumns; ++i, row += column_stride) {
      if (mask >> i & 1) column[i] = *reinterpret_cast<const Pack<T, Shape::kVector>*>(row);
    }
  }
};

template <class Shape>
struct DepthwiseWindowColumns<Shape, true> {
  using T = typename Shape::T;
  static constexpr int kLead = Shape::kLead, kVectors = (Shape::kColumns - kLead) / 4;
  static constexpr int kLone = Shape::kColumns - 4 * kVectors;
  Pack<T, 4> vector[kVectors] = {};
  T lone[kLone > 0 ? kLone : 1] = {};

  __device__ __forceinline__ float at(int i, int) const {
    const bool is_lone = i < kLead || i >= kLead + 4 * kVectors;
    return to_accumulator(is_lone ? lone[is_lone ? (i < kLead ? i : i - 4 * kVectors) : 0]
                                  : vector[is_lone ? 0 : (i - kLead) / 4].value[is_lone ? 0 : (i - kLead) % 4]);
  }

  __device__ __forceinline__ void load(const T* row, int, unsigned mask) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int column = kLead + 4 * i;
      if (mask >> column & 1) vector[i] = *reinterpret_cast<const Pack<T, 4>*>(row + column);
    }
#pragma unroll
    for (int i = 0; i < kLone; ++i) {
      const int column = i < kLead ? i : i + 4 * kVectors;
      if (mask >> column & 1) lone[i] = row[column];
    }
  }
};

template <class Shape>
struct DepthwiseWindowSums {
  using T = typename Shape::T;
  static constexpr int kVector = Shape::kVector, kInputs = Shape::kInputs, kReach = Shape::kReach;
  float sum[kReach][kInputs][kVector] = {};

  __device__ __forceinline__ void add(const DepthwiseWindowColumns<Shape>& grad, const float* table,
                                      const DepthwiseWindowItem& row) {
    // In float32 a row's products first, so that no chain of sums is long.
    constexpr bool kRowFirst = sizeof(T) == 4;
#pragma unroll
    for (int w = 0; w < kReach; ++w) {
      const float* weights = table + row.weights[w];
      float part[kInputs][kVector] = {};
#pragma unroll
      for (int i = 0; i < (Shape::kKernel * kVector + 3) / 4; ++i) {
        const auto pack = reinterpret_cast<const Pack<float, 4>*>(weights)[i];
#pragma unroll
        for (int e = 0; e < 4 * kInputs; ++e) {
          const int at = 4 * i + e / kInputs, tap = at / kVector, v = at % kVector, input = e % kInputs;
          if (tap >= Shape::kKernel) continue;
          const float product = pack.value[e / kInputs] * grad.at(input * Shape::kStride + tap, v);
          float& to = kRowFirst ? part[input][v] : sum[w][input][v];
          to = kRowFirst && tap == 0 ? product : to + product;
        }
      }
#pragma unroll
      for (int i = 0; i < kInputs * kVector; ++i) {
        if (kRowFirst) sum[w][i / kVector][i % kVector] += part[i / kVector][i % kVector];
      }
    }
  }

  __device__ __forceinline__ void shift() {
#pragma unroll
    for (int w = kReach - 1; w >= 0; --w) {
#pragma unroll
      for (int i = 0; i < kInputs * kVector; ++i) {
        sum[w][i / kVector][i % kVector] = w > 0 ? sum[w > 0 ? w - 1 : 0][i / kVector][i % kVector] : 0.f;
      }
    }
  }
};

// One input's gradient by the definition.
template <typename T>
__device__ __noinline__ T depthwise_window_at(const DepthwiseWindowParams& p, const T* grad, const T* weight, int z,
                                              int y, int x) {
  const AxisParams &depth = p.axis[0], &height = p.axis[1], &width = p.axis[2];
  double sum = 0;
#pragma unroll 1
  for (int i = 0; i < depth.kernel * height.kernel * width.kernel; ++i) {
    const int tx = i % width.kernel, ty = i / width.kernel % height.kernel, tz = i / (width.kernel * height.kernel);
    const int gx = x * width.stride - width.padding + tx * width.dilation;
    const int gy = y * height.stride - height.padding + ty * height.dilation;
    const int gz = z * depth.stride - depth.padding + tz * depth.dilation;
    if (gx < 0 || gx >= width.out || gy < 0 || gy >= height.out || gz < 0 || gz >= depth.out) continue;
    sum +=
        static_cast<double>(to_accumulator(grad[gz * p.grad_plane + gy * p.grad_row + int64_t{gx} * p.grad_column])) *
        to_accumulator(weight[i]);
  }
  return from_accumulator<T>(static_cast<float>(sum));
}

// Makes what is not finite of a thread's rows [begin, end) again; `target` is the first one.
template <class Shape>
__device__ __noinline__ void repair_window(const DepthwiseWindowParams& p, const typename Shape::T* grad, int channel,
                                           int z, int begin, int end, int x, typename Shape::T* target) {
  using T = typename Shape::T;
  const int64_t filter = static_cast<int64_t>(p.axis[0].kernel) * p.axis[1].kernel * p.axis[2].kernel;
#pragma unroll 1
  for (int y = begin; y < end; ++y, target += p.output_row) {
#pragma unroll 1
    for (int i = 0; i < Shape::kInputs * Shape::kVector && x + i / Shape::kVector < p.axis[2].in; ++i) {
      const int v = i % Shape::kVector;
      T* element = target + static_cast<int64_t>(i / Shape::kVector) * p.output_column + v;
      if (is_finite(to_accumulator(*element))) continue;
      *element = depthwise_window_at<T>(p, grad + v, static_cast<const T*>(p.weight) + (channel + v) * filter, z, y,
                                        x + i / Shape::kVector);
    }
  }
}

// Whether all sums are finite.
template <class Shape>
__device__ __forceinline__ bool store_window(const DepthwiseWindowParams& p, int inputs, typename Shape::T* target,
                                             const float (&sum)[Shape::kInputs][Shape::kVector]) {
  using T = typename Shape::T;
  constexpr int kInputs = Shape::kInputs, kVector = Shape::kVector;
  bool finite = true;
#pragma unroll
  for (int i = 0; i < kInputs * kVector; ++i) finite = finite && is_finite(sum[i / kVector][i % kVector]);
  if (kVector == 1 && kInputs > 1 && p.vector_store) {
    Pack<T, kInputs> pack;
#pragma unroll
    for (int i = 0; i < kInputs; ++i) pack.value[i] = from_accumulator<T>(sum[i][0]);
    *reinterpret_cast<Pack<T, kInputs>*>(target) = pack;
    return finite;
  }
#pragma unroll
  for (int i = 0; i < kInputs; ++i, target += p.output_column) {
    if (i >= inputs) break;
    Pack<T, kVector> pack;
#pragma unroll
    for (int v = 0; v < kVector; ++v) pack.value[v] = from_accumulator<T>(sum[i][v]);
    *reinterpret_cast<Pack<T, kVector>*>(target) = pack;
  }
  return finite;
}

template <class Shape>
__global__ void __launch_bounds__(kDepthwiseGradientThreads, Shape::kResident)
    depthwise_input_gradient_window_kernel(const __grid_constant__ DepthwiseWindowParams p) {
  using T = typename Shape::T;
  using Columns = DepthwiseWindowColumns<Shape>;
  constexpr int kReach = Shape::kReach, kBatch = Shape::kBatch;
  extern __shared__ __align__(16) float shared[];
  DepthwiseWindowItem* items = reinterpret_cast<DepthwiseWindowItem*>(shared);
  const AxisParams &depth = p.axis[0], &height = p.axis[1], &width = p.axis[2];
  float* table = shared + p.items * static_cast<int>(sizeof(DepthwiseWindowItem) / sizeof(float));
  fill_window_table<Shape>(p, table, items);
  __syncthreads();
  const auto t = DepthwiseWindowThread::make<Shape>(p);
  if (!t.exists) return;
  table += p.channels_last ? t.vector * Shape::kWeights : t.slot * p.by_table_rows.divisor * Shape::kWeights;
  const T* const grad = static_cast<const T*>(p.grad) + t.outer * p.grad_outer + (p.channels_last ? t.channel : 0);
  const int first = t.x * Shape::kStride - width.padding;
  unsigned mask = 0;  // of the columns that exist
#pragma unroll
  for (int i = 0; i < Shape::kColumns; ++i) {
    mask |= static_cast<unsigned>(static_cast<unsigned>(first + i) < static_cast<unsigned>(width.out)) << i;
  }
  const int begin = t.segment * p.march, end = min(begin + p.march, static_cast<int>(height.in));
  const int z = t.plane * depth.stride - depth.padding;
  int y = begin * height.stride - height.padding;
  // Bases whose rows all exist, and only add to rows of the input that this thread makes.
  const bool all_planes = z >= 0 && z + (depth.kernel - 1) * depth.dilation < depth.out;
  const int room = static_cast<int>(height.out) - height.stride + height.padding;
  const int whole_begin = max(begin + kReach - 1, (height.padding + height.stride - 1) / height.stride);
  const int whole_end = all_planes && room >= 0 ? min(end, room / height.stride + 1) : 0;
  const T* row = grad + (z * p.grad_plane + y * p.grad_row + static_cast<int64_t>(first) * p.grad_column);
  T* target = static_cast<T*>(p.output) + t.outer * p.output_outer + t.plane * p.output_plane + begin * p.output_row +
              static_cast<int64_t>(t.x) * p.output_column + (p.channels_last ? t.channel : 0);
  const int inputs = min(Shape::kInputs, static_cast<int>(width.in) - t.x);
  DepthwiseWindowSums<Shape> sums;
  bool finite = true;
  const auto finish_base = [&](int base) {
    if (base >= begin + kReach - 1) {
      finite = store_window<Shape>(p, inputs, target, sums.sum[kReach - 1]) && finite;
      target += p.output_row;
    }
    sums.shift();
  };
  const int64_t base_step = height.stride * p.grad_row;
  int base = begin;
#pragma unroll 1
  while (base < end + kReach - 1) {
    if (base >= whole_begin && base < whole_end) {
      const T* next = row;
      int next_item = 0, item = 0;
      const auto load = [&](Columns(&columns)[kBatch]) {
#pragma unroll
        for (int b = 0; b < kBatch; ++b) columns[b].load(next + items[next_item + b].place, p.grad_column, mask);
        next_item += kBatch;
        if (next_item == p.items) next_item = 0, next += base_step;
      };
      const auto add = [&](const Columns(&columns)[kBatch]) {
#pragma unroll
        for (int b = 0; b < kBatch; ++b) sums.add(columns[b], table, items[item + b]);
        item += kBatch;
        if (item == p.items) item = 0, finish_base(base++);
      };
      Columns columns[kBatch], others[kBatch];
      load(columns);
#pragma unroll 1
      for (int left = (whole_end - base) * (p.items / kBatch);;) {
        if (Shape::kAhead && left > 1) load(others);
        add(columns);
        if (--left == 0) break;
        if constexpr (Shape::kAhead) {
          if (left > 1) load(columns);
          add(others);
          if (--left == 0) break;
        } else {
          load(columns);
        }
      }
      row = next;
      y = base * height.stride - height.padding;
      continue;
    }
    const int own = ((2 << min(base - begin, kReach - 1)) - 1) & -(1 << max(0, base - end + 1));
    Columns columns;
#pragma unroll 1
    for (int i = 0; i < p.items; ++i) {
      const DepthwiseWindowItem& item = items[i];
      if ((item.taps & own) != 0 && static_cast<unsigned>(y + item.phase) < static_cast<unsigned>(height.out) &&
          static_cast<unsigned>(z + item.depth) < static_cast<unsigned>(depth.out)) {
        columns.load(row + item.place, p.grad_column, mask);
        sums.add(columns, table, item);
      }
    }
    finish_base(base++);
    y += height.stride;
    row += base_step;
  }
  if (finite) return;
  repair_window<Shape>(p, grad, t.channel, t.plane, begin, end, t.x, target - (end - begin) * p.output_row);
}

}  // namespace fastconvt::cuda
