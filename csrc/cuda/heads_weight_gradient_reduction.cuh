// The second pass of the gradients of weight and bias: partial sums are added in float64, and what is not finite is
// made again by the definition.
#pragma once

#include "device/dependent_launch.cuh"
#include "heads_gradient.cuh"

namespace fastconvt::cuda {

struct HeadsReductionParams {
  struct {
    int in, out, kernel, stride, padding, dilation;
  } axis[3];
  const void *grad, *input;
  const float* partial;
  const float* bias_partial;  // (bias_splits, output channels); null: there is none
  void *grad_weight, *grad_bias;
  Strides grad_strides, input_strides;
  int64_t weight_elements, batch;
  int group_in, group_out, pairs, out_channels, splits, bias_splits;
};

// All but the partial sums.
inline HeadsReductionParams heads_reduction_params(const Problem& problem, const void* grad, const void* input,
                                                   void* grad_weight, void* grad_bias) {
  HeadsReductionParams r{};
  for (int a = 0; a < 3; ++a) {
    const Axis& axis = problem.axis[a];
    r.axis[a] = {static_cast<int>(axis.in),     static_cast<int>(axis.out()),   static_cast<int>(axis.kernel),
                 static_cast<int>(axis.stride), static_cast<int>(axis.padding), static_cast<int>(axis.dilation)};
  }
  r.grad = grad, r.input = input;
  r.grad_weight = grad_weight, r.grad_bias = grad_bias;
  r.grad_strides = output_strides(problem), r.input_strides = input_strides(problem);
  r.weight_elements = problem.weight_elements(), r.batch = problem.batch;
  r.group_in = static_cast<int>(problem.in_channels_per_group());
  r.group_out = static_cast<int>(problem.out_channels_per_group());
  r.pairs = static_cast<int>(r.group_out * problem.kernel_positions());
  r.out_channels = static_cast<int>(problem.out_channels);
  return r;
}

constexpr int kHeadsReduced = 32;   // elements of a block
constexpr int kHeadsReducers = 32;  // threads that share one

// This thread's share of an element of the weight's gradient.
template <typename T>
__device__ double heads_weight_share(const HeadsReductionParams& p, int64_t element, int thread, int threads) {
  const int64_t channel = element / p.pairs;
  int rest = static_cast<int>(element - channel * p.pairs);
  int tap[3];
  for (int a = 2; a >= 0; --a) {
    tap[a] = rest % p.axis[a].kernel;
    rest /= p.axis[a].kernel;
  }
  const T* input = static_cast<const T*>(p.input) + channel * p.input_strides.channel;
  const T* grad = static_cast<const T*>(p.grad) + (channel / p.group_in * p.group_out + rest) * p.grad_strides.channel;
  const int64_t plane = static_cast<int64_t>(p.axis[0].in) * p.axis[1].in * p.axis[2].in;
  double sum = 0;
  for (int64_t i = thread; i < p.batch * plane; i += threads) {
    const int64_t n = i / plane;
    int position = static_cast<int>(i - n * plane);
    int64_t from = n * p.grad_strides.batch, at = n * p.input_strides.batch;
    bool exists = true;
    for (int a = 2; a >= 0; --a) {
      const int x = a == 0 ? position : position % p.axis[a].in;
      position /= p.axis[a].in;
      const int o = x * p.axis[a].stride - p.axis[a].padding + tap[a] * p.axis[a].dilation;
      exists = exists && o >= 0 && o < p.axis[a].out;
      from += o * p.grad_strides.axis[a];
      at += x * p.input_strides.axis[a];
    }
    if (!exists) continue;
    const float a = to_accumulator(input[at]), b = to_accumulator(grad[from]);
    sum += static_cast<double>(a) * b;
  }
  return sum;
}

template <typename T>
__device__ double heads_bias_share(const HeadsReductionParams& p, int64_t channel, int thread, int threads) {
  const int64_t plane = static_cast<int64_t>(p.axis[0].out) * p.axis[1].out * p.axis[2].out;
  const T* grad = static_cast<const T*>(p.grad) + channel * p.grad_strides.channel;
  double sum = 0;
  for (int64_t i = thread; i < p.batch * plane; i += threads) {
    const int64_t n = i / plane;  // rows follow each other
    sum += to_accumulator(grad[n * p.grad_strides.batch + (i - n * plane) * p.grad_strides.axis[2]]);
  }
  return sum;
}

template <typename T>
__global__ void __launch_bounds__(kHeadsReduced* kHeadsReducers)
    heads_weight_reduction_kernel(const __grid_constant__ HeadsReductionParams p) {
  wait_for_previous_grid();
  __shared__ double sums[kHeadsReducers][kHeadsReduced];
  __shared__ unsigned repeated;
  const int column = threadIdx.x % kHeadsReduced, share = threadIdx.x / kHeadsReduced;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kHeadsReduced, element = first + column;
  const int64_t bias = element - p.weight_elements;
  const int64_t elements = p.weight_elements + (p.bias_partial != nullptr ? p.out_channels : 0);
  double sum = 0;
  if (element < p.weight_elements) {
#pragma unroll 16
    for (int split = share; split < p.splits; split += kHeadsReducers) {
      sum += p.partial[split * p.weight_elements + element];
    }
  } else if (element < elements) {
#pragma unroll 16
    for (int split = share; split < p.bias_splits; split += kHeadsReducers) {
      sum += p.bias_partial[static_cast<int64_t>(split) * p.out_channels + bias];
    }
  }
  sums[share][column] = sum;
  __syncthreads();
  const auto output = [&](int64_t e) {
    return e < p.weight_elements ? static_cast<T*>(p.grad_weight) + e
                                 : static_cast<T*>(p.grad_bias) + (e - p.weight_elements);
  };
  bool again = false;
  if (share == 0 && element < elements) {
    for (int other = 1; other < kHeadsReducers; ++other) sum += sums[other][column];
    again = !isfinite(sum);
    *output(element) = from_accumulator<T>(static_cast<float>(sum));
  }
  // The first warp knows which elements to make again; all threads share each.
  if (share == 0) {
    const unsigned mask = __ballot_sync(0xffffffffu, again);
    if (column == 0) repeated = mask;
  }
  __syncthreads();
  for (unsigned mask = repeated; mask != 0; mask &= mask - 1) {
    const int64_t which = first + __ffs(mask) - 1;
    constexpr int kThreads = kHeadsReduced * kHeadsReducers;
    sums[share][column] = which < p.weight_elements
                              ? heads_weight_share<T>(p, which, threadIdx.x, kThreads)
                              : heads_bias_share<T>(p, which - p.weight_elements, threadIdx.x, kThreads);
    __syncthreads();
    if (threadIdx.x == 0) {
      double total = 0;
      for (int i = 0; i < kThreads; ++i) total += sums[i / kHeadsReduced][i % kHeadsReduced];
      *output(which) = from_accumulator<T>(static_cast<float>(total));
    }
    __syncthreads();
  }
}

template <typename T>
cudaError_t launch_heads_reduction(const HeadsReductionParams& r, cudaStream_t stream) {
  const int64_t elements = r.weight_elements + (r.grad_bias != nullptr ? r.out_channels : 0);
  const dim3 grid(static_cast<unsigned>(ceil_div(elements, int64_t{kHeadsReduced})));
  return launch_early(heads_weight_reduction_kernel<T>, grid, kHeadsReduced * kHeadsReducers, 0, stream, r);
}

}  // namespace fastconvt::cuda
