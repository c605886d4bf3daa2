// The gradients of depthwise layers (one input channel a group) with respect to weight and bias:
//
//   grad_weight[c, t] = sum over n and i of input[n, c, i] * grad_output[n, c, i * stride - padding + t * dilation].
//
// Outputs of one phase of depth and height, a class, meet the same taps. A block takes one class of some channels, and
// a thread a column of it, of one phase too: it walks along the height from base to base, reads each gradient once, and
// keeps the input rows that it reaches. Sums are by the place of the input in that window; which tap a place is, or
// that it is none, only matters at the end. 1D problems walk along the row. In channels_last a thread has kVector
// channels.
#pragma once

#include "depthwise_weight_gradient_walk.cuh"
#include "device/dependent_launch.cuh"

namespace fastconvt::cuda {

// The sums of a walk, and the rows of the input, expanded to taps and columns or channels, that it still reaches. Steps
// are added first, then walks, then threads, so that no chain of float32 sums is long.
template <class Shape>
struct DepthwiseWeightSums {
  using T = typename Shape::T;
  using Walk = DepthwiseWalk<Shape>;
  static constexpr int kVector = Shape::kVector, kDepth = Shape::kDepth, kHeight = Shape::kHeight;
  static constexpr int kTaps = Shape::kTaps, kSteps = Shape::kSteps;
  using Grad = typename Walk::Grad;
  using Loaded = typename Walk::Input;
  using Row = float[kDepth][kTaps][kVector];

  float weight[kDepth][kHeight][kTaps][kVector];
  float bias[kVector];
  Row history[kHeight];  // the latest first; one more than is needed
  bool carry[kVector];

  __device__ __forceinline__ void expand(const Loaded& loaded, Row& row) const {
#pragma unroll
    for (int i = 0; i < kDepth * kTaps * kVector; ++i) {
      const int v = i % kVector, t = i / kVector % kTaps, d = i / (kVector * kTaps);
      if constexpr (Shape::kColumns) {
        const int at = v / Shape::kStride + kTaps - 1 - t;
        const bool may_carry = Shape::kStride > 1 && v % Shape::kStride > 0;
        const float value = to_accumulator(loaded[d][at].value[0]);
        row[d][t][v] = may_carry && carry[v] ? to_accumulator(loaded[d][may_carry ? at + 1 : at].value[0]) : value;
      } else {
        row[d][t][v] = to_accumulator(loaded[d][t].value[v]);
      }
    }
  }

  __device__ __forceinline__ float& sum_at(int i) {
    return weight[i / (kVector * kTaps * kHeight)][i / (kVector * kTaps) % kHeight][i / kVector % kTaps][i % kVector];
  }

  // To this thread's column of shared memory: the weights' sums, then the biases'.
  __device__ __forceinline__ void keep(float* column) {
#pragma unroll
    for (int i = 0; i < Shape::kSums; ++i) {
      if (i % 4 == 0) asm volatile("" ::: "memory");  // few loads at a time: registers are rare
      column[i * kDepthwiseGradientThreads] += sum_at(i);
    }
#pragma unroll
    for (int v = 0; v < kVector; ++v) column[(Shape::kSums + v) * kDepthwiseGradientThreads] += bias[v];
  }

  template <int kCount>
  __device__ __forceinline__ void add(const Grad (&grad)[kSteps], const Loaded (&loaded)[kSteps], bool with_bias) {
    Row row[kCount] = {};
    const auto product = [&](int s, int i) {
      const int v = i % kVector, t = i / kVector % kTaps, h = i / (kVector * kTaps) % kHeight;
      const int d = i / (kVector * kTaps * kHeight);
      const float x = s >= h ? row[s >= h ? s - h : 0][d][t][v] : history[s >= h ? 0 : h - s - 1][d][t][v];
      return to_accumulator(grad[s].value[v]) * x;
    };
    if constexpr (kCount > 1 && Shape::kSums <= 16 && sizeof(T) == 4) {
#pragma unroll
      for (int s = 0; s < kCount; ++s) expand(loaded[s], row[s]);
#pragma unroll
      for (int i = 0; i < Shape::kSums; ++i) {
        float part = product(0, i);
#pragma unroll
        for (int s = 1; s < kCount; ++s) part += product(s, i);
        sum_at(i) += part;
      }
    } else {  // many sums: walks are shorter; 16 bits need no more
#pragma unroll
      for (int s = 0; s < kCount; ++s) {
        expand(loaded[s], row[s]);
#pragma unroll
        for (int i = 0; i < Shape::kSums; ++i) sum_at(i) += product(s, i);
      }
    }
    if (with_bias) {
#pragma unroll
      for (int v = 0; v < kVector; ++v) {
        float part = to_accumulator(grad[0].value[v]);
#pragma unroll
        for (int s = 1; s < kCount; ++s) part += to_accumulator(grad[s].value[v]);
        bias[v] += part;
      }
    }
#pragma unroll
    for (int h = kHeight - 2; h >= 0; --h) {  // the oldest first
#pragma unroll
      for (int i = 0; i < kDepth * kTaps * kVector; ++i) {
        const int v = i % kVector, t = i / kVector % kTaps, d = i / (kVector * kTaps);
        history[h][d][t][v] =
            h < kCount ? row[h < kCount ? kCount - 1 - h : 0][d][t][v] : history[h < kCount ? 0 : h - kCount][d][t][v];
      }
    }
  }

  __device__ __forceinline__ void add_walk(const DepthwiseWeightParams& p, const Walk& walk) {
    const bool with_bias = p.grad_bias != nullptr;
    Grad grad[kSteps];
    Loaded loaded[kSteps] = {};
#pragma unroll
    for (int i = 0; i < Shape::kSums; ++i) sum_at(i) = 0;
#pragma unroll
    for (int v = 0; v < kVector; ++v) bias[v] = 0;
#pragma unroll
    for (int h = 0; h < kHeight - 1; ++h) {
      walk.load_input_checked(p, -1 - h, loaded[0]);
      expand(loaded[0], history[h]);
    }
    const T* grad_at = walk.grad;
    int64_t input_at = 0;
    int step = 0;
#pragma unroll 1
    while (step < walk.steps) {
      if (step >= walk.fast_begin && step + kSteps <= walk.fast_end) {
#pragma unroll
        for (int s = 0; s < kSteps; ++s, grad_at += walk.grad_step, input_at += walk.input_step) {
          grad[s] = *reinterpret_cast<const Grad*>(grad_at);
          walk.load_input(input_at, loaded[s]);
        }
        add<kSteps>(grad, loaded, with_bias);
        step += kSteps;
      } else {
        walk.load_grad_checked(p, step, grad[0]);
        walk.load_input_checked(p, step, loaded[0]);
        add<1>(grad, loaded, with_bias);
        ++step, grad_at += walk.grad_step, input_at += walk.input_step;
      }
    }
  }
};

// Adds each of kCount rows over all columns whose number is the same modulo `period`, of the first `columns`: to those
// below `period`. A fixed order. All threads call it.
template <int kCount>
__device__ __forceinline__ void sum_columns(float* rows, int period, int columns) {
  const int thread = static_cast<int>(threadIdx.x);
  __syncthreads();
#pragma unroll 1
  for (int copies = columns / period; copies > 1; copies = (copies + 1) / 2) {
    const int half = (copies + 1) / 2;
    if (thread < (copies - half) * period) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        float* sum = rows + i * kDepthwiseGradientThreads + thread;
        *sum += sum[half * period];
      }
    }
    __syncthreads();
  }
}

// The tap of window place `place` in phase r; negative if there is none.
__device__ __forceinline__ int window_tap(const AxisParams& axis, int r, int place) {
  const int tap = (r + place * axis.stride) / axis.dilation;
  return tap < axis.kernel && tap * axis.dilation == r + place * axis.stride ? tap : -1;
}

// Writes the sums of a thread's channels, added over its like.
template <class Shape>
__device__ __forceinline__ void store_channels(const DepthwiseWeightParams& p, const DepthwiseWeightBlock& block,
                                               const DepthwiseWeightThread<Shape>& thread, const float* column) {
  const AxisParams &depth = p.axis[0], &height = p.axis[1], &width = p.axis[2];
  constexpr int kVector = Shape::kVector, kTaps = Shape::kTaps, kHeight = Shape::kHeight;
  const int filter = depth.kernel * height.kernel * width.kernel;
  float* partial = p.partial + block.split * p.weight_elements + static_cast<int64_t>(thread.channel) * filter;
#pragma unroll
  for (int i = 0; i < Shape::kDepth * kHeight * kTaps; ++i) {
    const int tz = window_tap(depth, block.depth_phase, i / (kHeight * kTaps));
    const int ty = window_tap(height, block.height_phase, i / kTaps % kHeight);
    const int tx = thread.first_tap + i % kTaps * width.tap_step();
    if (tz < 0 || ty < 0 || tx >= width.kernel) continue;
#pragma unroll
    for (int v = 0; v < kVector; ++v) {
      partial[v * filter + (tz * height.kernel + ty) * width.kernel + tx] =
          column[(i * kVector + v) * kDepthwiseGradientThreads];
    }
  }
}

// Writes a channel's sums: those of a tap are in the columns of its phase, in one or more of the `period` first
// threads.
template <class Shape>
__device__ __forceinline__ void store_columns(const DepthwiseWeightParams& p, const DepthwiseWeightBlock& block,
                                              const float* sums) {
  const AxisParams &depth = p.axis[0], &height = p.axis[1], &width = p.axis[2];
  constexpr int kVector = Shape::kVector, kTaps = Shape::kTaps, kHeight = Shape::kHeight;
  const int filter = depth.kernel * height.kernel * width.kernel;
  float* partial = p.partial + block.split * p.weight_elements + static_cast<int64_t>(block.tile) * filter;
#pragma unroll 1
  for (int i = threadIdx.x; i < Shape::kDepth * kHeight * width.kernel; i += static_cast<int>(blockDim.x)) {
    const int place = i / width.kernel, tx = i - place * width.kernel;
    const int tz = window_tap(depth, block.depth_phase, place / kHeight);
    const int ty = window_tap(height, block.height_phase, place % kHeight);
    if (tz < 0 || ty < 0) continue;
    const int tap = tx / width.stride, phase = tx - tap * width.stride;
    float total = 0;
    int own = width.padding % width.stride;  // phase of column c
#pragma unroll 1
    for (int c = 0; c < p.period * kVector; ++c) {
      const int row = (place * kTaps + tap) * kVector + c % kVector;
      if (own == phase) total += sums[row * kDepthwiseGradientThreads + c / kVector];
      if (++own == width.stride) own = 0;
    }
    partial[(tz * height.kernel + ty) * width.kernel + tx] = total;
  }
}

template <class Shape>
__global__ void __launch_bounds__(kDepthwiseGradientThreads,
                                  Shape::kVector == 1 && Shape::kSums <= 4 && Shape::kTaps < 4 ? 3 : 2)
    depthwise_weight_gradient_kernel(const __grid_constant__ DepthwiseWeightParams p) {
  constexpr int kVector = Shape::kVector;
  constexpr int kThreads = kDepthwiseGradientThreads, kRows = Shape::kSums + kVector;
  __shared__ float sums_of_block[kRows * kThreads];
  const DepthwiseWeightBlock block(p);
  const bool has_taps = first_tap_or_none(p.axis[0], block.depth_phase) < p.axis[0].kernel &&
                        first_tap_or_none(p.axis[1], block.height_phase) < p.axis[1].kernel && p.output != nullptr;
  if (!has_taps && p.grad_bias == nullptr) return;
  const DepthwiseWeightThread<Shape> thread(p, block);
  const int number = static_cast<int>(threadIdx.x);
  float* column = sums_of_block + number;
#pragma unroll
  for (int i = 0; i < kRows; ++i) column[i * kThreads] = 0;
  if (thread.exists && (Shape::kColumns || p.grad_bias != nullptr || thread.first_tap < p.axis[2].kernel)) {
    DepthwiseWeightSums<Shape> sums;
#pragma unroll
    for (int v = 0; v < kVector; ++v) sums.carry[v] = thread.carries(p, v);
#pragma unroll 1
    for (int unit = block.split * p.slots + thread.slot; unit < p.units; unit += p.splits * p.slots) {
      DepthwiseWalk<Shape> walk;
      if (!walk.begin(p, block, thread, unit)) continue;
      sums.add_walk(p, walk);
      sums.keep(column);
    }
  }
  const int threads = p.slots * p.slot_threads;
  if (has_taps) {
    sum_columns<Shape::kSums>(sums_of_block, p.period, threads);
    if constexpr (Shape::kColumns) {
      store_columns<Shape>(p, block, sums_of_block);
    } else if (number < p.period && thread.exists) {
      store_channels<Shape>(p, block, thread, column);
    }
  }
  if (p.grad_bias == nullptr) return;
  sum_columns<kVector>(sums_of_block + Shape::kSums * kThreads, p.vectors, threads);
  if (number >= p.vectors || !thread.exists) return;
  float* partial = p.bias_partial + (static_cast<int64_t>(block.split) * p.classes + block.number) * p.channels;
  const float* biases = column + Shape::kSums * kThreads;
  if constexpr (Shape::kColumns) {
    float sum = 0;
#pragma unroll
    for (int v = 0; v < kVector; ++v) sum += biases[v * kThreads];
    partial[thread.channel] = sum;
  } else {
#pragma unroll
    for (int v = 0; v < kVector; ++v) partial[thread.channel + v] = biases[v * kThreads];
  }
}

// By the definition: what thread `thread` of `threads` adds to a weight's gradient.
template <typename T>
__device__ inline double depthwise_weight_share(const DepthwiseWeightParams& p, int64_t element, int thread,
                                                int threads) {
  const AxisParams &depth = p.axis[0], &height = p.axis[1], &width = p.axis[2];
  const int tx = static_cast<int>(element % width.kernel);
  element /= width.kernel;
  const int ty = static_cast<int>(element % height.kernel);
  element /= height.kernel;
  const int tz = static_cast<int>(element % depth.kernel), channel = static_cast<int>(element / depth.kernel);
  const T* input = static_cast<const T*>(p.input) + channel / p.by_multiplier.divisor * p.input_channel;
  const T* grad = static_cast<const T*>(p.grad) + channel * p.grad_channel;
  double sum = 0;
#pragma unroll 1
  for (int64_t i = thread; i < p.batch * depth.in * height.in * width.in; i += threads) {
    const int64_t x = i % width.in, y = i / width.in % height.in, rest = i / (width.in * height.in);
    const int64_t z = rest % depth.in, n = rest / depth.in;
    const int64_t gx = x * width.stride - width.padding + tx * width.dilation;
    const int64_t gy = y * height.stride - height.padding + ty * height.dilation;
    const int64_t gz = z * depth.stride - depth.padding + tz * depth.dilation;
    if (gx < 0 || gx >= width.out || gy < 0 || gy >= height.out || gz < 0 || gz >= depth.out) continue;
    sum += static_cast<double>(
               to_accumulator(input[n * p.input_batch + z * p.input_plane + y * p.input_row + x * p.input_column])) *
           to_accumulator(grad[n * p.grad_batch + gz * p.grad_plane + gy * p.grad_row + gx * p.grad_column]);
  }
  return sum;
}

// Likewise to a bias's.
template <typename T>
__device__ inline double depthwise_bias_share(const DepthwiseWeightParams& p, int64_t channel, int thread,
                                              int threads) {
  const int64_t positions = p.axis[0].out * p.axis[1].out * p.axis[2].out;  // dense, grad_column apart
  const T* grad = static_cast<const T*>(p.grad) + channel * p.grad_channel;
  double sum = 0;
#pragma unroll 1
  for (int64_t i = thread; i < p.batch * positions; i += threads) {
    sum += to_accumulator(grad[i / positions * p.grad_batch + i % positions * p.grad_column]);
  }
  return sum;
}

constexpr int kDepthwiseReduceElements = 32, kDepthwiseReduceShares = 8;

// Adds the partial sums of all weights, then of all biases, whichever are asked for.
template <typename T>
__global__ void __launch_bounds__(kDepthwiseReduceElements* kDepthwiseReduceShares)
    depthwise_weight_reduction_kernel(const __grid_constant__ DepthwiseWeightParams p) {
  constexpr int kThreads = kDepthwiseReduceElements * kDepthwiseReduceShares;
  __shared__ double sums[kThreads];
  __shared__ unsigned repeated;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kDepthwiseReduceElements;
  wait_for_previous_grid();
  const int64_t weights = p.output != nullptr ? p.weight_elements : 0;
  const int64_t elements = weights + (p.grad_bias != nullptr ? p.channels : 0);
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kDepthwiseReduceElements, element = first + lane;
  const bool is_weight = element < weights;
  const auto store = [&](int64_t e, double sum) {
    T* target = e < weights ? static_cast<T*>(p.output) + e : static_cast<T*>(p.grad_bias) + (e - weights);
    *target = from_accumulator<T>(static_cast<float>(sum));
  };
  double sum = 0;
  if (element < elements) {
    const float* partial = is_weight ? p.partial + element : p.bias_partial + (element - weights);
    const int64_t step = is_weight ? p.weight_elements : p.channels;
    const int count = is_weight ? p.splits : p.splits * p.classes;
#pragma unroll 4
    for (int i = thread / kDepthwiseReduceElements; i < count; i += kDepthwiseReduceShares) sum += partial[i * step];
  }
  sums[thread] = sum;
  __syncthreads();
  if (thread < kDepthwiseReduceElements) {
    for (int i = 1; i < kDepthwiseReduceShares; ++i) sum += sums[i * kDepthwiseReduceElements + lane];
    if (element < elements) store(element, sum);
    const unsigned mask = __ballot_sync(0xffffffffu, element < elements && !isfinite(sum));
    if (lane == 0) repeated = mask;
  }
  __syncthreads();
#pragma unroll 1
  for (unsigned mask = repeated; mask != 0; mask &= mask - 1) {  // all threads share each
    const int64_t which = first + __ffs(mask) - 1;
    sums[thread] = which < weights ? depthwise_weight_share<T>(p, which, thread, kThreads)
                                   : depthwise_bias_share<T>(p, which - weights, thread, kThreads);
    __syncthreads();
    if (thread == 0) {
      double total = 0;
      for (int i = 0; i < kThreads; ++i) total += sums[i];
      store(which, total);
    }
    __syncthreads();
  }
}

}  // namespace fastconvt::cuda
