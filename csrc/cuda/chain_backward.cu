#include "chain_backward.cuh"

#include <algorithm>

#include "dispatch.h"
#include "gradients.cuh"
#include "launchers.h"

namespace fastconvt::cuda {
namespace {

// Aim for the du of one window: 22 batch entries of the 3D reference layer. Larger windows are a little faster.
constexpr int64_t kGradientBytes = int64_t{184} << 20;
constexpr int kWarps = kThreads / kLanes;
constexpr int kMaxBlocks = 1024;
constexpr int kMaxColumns = 16;

// Partial sums of grad_bias have a row a warp, those of grad_subtrahend an element a warp.
template <typename T>
struct GradientParams {
  const T* grad_output;  // (batch, 1, D', H', W'), contiguous
  accumulator_t<T>* du;
  accumulator_t<T>* bias_sums;
  accumulator_t<T>* subtrahend_sums;
  accumulator_t<T> min, max;
  PhaseView view;  // of du
  // To a channel of a block and a cell of a thread, from the first ones: an address costs one addition of a constant.
  int64_t du_bytes[kMaxColumns][kCells];
};

// Writes du, and sums G and du over the thread's own outputs. Unless the channels are one block, du first holds what
// the channel sums return.
template <typename T, int kColumns, bool kOneBlock>
struct StoreGradient {
  using Acc = accumulator_t<T>;

  const GradientParams<T>& g;
  Acc* thread_sums;    // of bias, kThreads apart, in shared memory; kOneBlock only
  Acc subtrahend_sum;  // of the thread

  // Where du of the thread's first cell goes in channel 0.
  __device__ __forceinline__ Acc* find_gradient(const ChainParams& p, const Phase& phase, const Place& place) const {
    Acc* to = g.du + (place.batch - p.window.batch_begin) * g.view.cell.batch;
#pragma unroll
    for (int a = 0; a < 3; ++a) {
      to += (place.cells.coordinate[a] - g.view.axis[a].first_cell) * g.view.cell.axis[a] +
            g.view.residue_offset(a, phase.residue[a], p.axis[a].stride);
    }
    return to;
  }

  __device__ __forceinline__ void add_block(const ChainParams& p, const Phase& phase, const Place& place,
                                            const ChannelBlock& block, const Acc (&sum)[kCells][kColumns]) const {
    if constexpr (kOneBlock) return;
    const Outputs outputs(p, phase, place);
    Acc* to = find_gradient(p, phase, place) +
              (static_cast<int64_t>(block.group) * p.product.columns + block.first_column) * g.view.cell.channel;
#pragma unroll
    for (int cell = 0; cell < kCells; ++cell) {
      if (!outputs.exists(p, cell)) continue;
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        if (block.first_column + c < p.product.columns) *at(to, c, cell) = sum[cell][c];
      }
    }
  }

  __device__ __forceinline__ Acc* at(Acc* to, int column, int cell) const {
    return reinterpret_cast<Acc*>(reinterpret_cast<char*>(to) + g.du_bytes[column][cell]);
  }

  template <typename Sum>
  __device__ __forceinline__ void finish(const ChainParams& p, const Phase& phase, const Place& place,
                                         const Sum (&total)[kCells], Acc (&sum)[kCells][kColumns]) {
    const Outputs outputs(p, phase, place);
    const T* grad_output = g.grad_output + outputs.offset(p, place);
    Acc* to = find_gradient(p, phase, place);
    const Acc subtrahend = to_accumulator(__ldg(static_cast<const T*>(p.subtrahend)));
    bool exists[kCells];
    Acc factor[kCells], own[kCells];  // du is factor times the channel's share of S; own is 1 or 0
#pragma unroll
    for (int cell = 0; cell < kCells; ++cell) {
      exists[cell] = outputs.exists(p, cell);
      own[cell] = exists[cell] & outputs.is_own(p, cell) ? 1 : 0;
      factor[cell] = exists[cell] ? to_accumulator(__ldg(grad_output + cell * outputs.step(p))) : Acc(0);
    }
#pragma unroll
    for (int cell = 0; cell < kCells; ++cell) {
      factor[cell] = exists[cell] ? differentiate(total[cell].activate(), subtrahend, factor[cell], own[cell]) : Acc(0);
      factor[cell] *= total[cell].scale();
    }
    if constexpr (kOneBlock) {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        if (c < p.channels) {
          Acc own_sum = 0;
#pragma unroll
          for (int cell = 0; cell < kCells; ++cell) {
            const Acc value = exists[cell] ? factor[cell] * total[cell].restore(sum[cell][c]) : Acc(0);
            own_sum += own[cell] * value;
            if (exists[cell]) *at(to, c, cell) = value;
          }
          thread_sums[c * kThreads] += own_sum;
        }
      }
    } else {
#pragma unroll 1
      for (int channel = 0; channel < p.channels; ++channel) {
        Acc own_sum = 0;
#pragma unroll
        for (int cell = 0; cell < kCells; ++cell) {
          if (exists[cell]) {
            Acc& element = to[channel * g.view.cell.channel + cell * g.view.cell.axis[1]];
            element = factor[cell] * total[cell].restore(element);
            own_sum += own[cell] * element;
          }
        }
        add_to_warp(p, channel, own_sum);
      }
    }
  }

  __device__ __forceinline__ void add_to_warp(const ChainParams& p, int channel, Acc value) const {
    __syncwarp();
    value = warp_sum(value);
    const int64_t warp = blockIdx.x * kWarps + threadIdx.x / kLanes;
    if (threadIdx.x % kLanes == 0) g.bias_sums[warp * p.channels + channel] += value;
  }

  // G * h'(v); adds G to the sum.
  __device__ __forceinline__ Acc differentiate(const Activation<Acc>& a, Acc subtrahend, Acc grad_output, Acc own) {
    const Acc before_clamp = a.value * a.gate * Acc(1.0 / 6) - subtrahend;
    const Acc passed = (before_clamp >= g.min) & (before_clamp <= g.max) ? grad_output : Acc(0);
    subtrahend_sum += own * passed;
    return passed * (a.gate + a.value * a.gate * a.complement) * Acc(1.0 / 6);
  }
};

template <typename T, int kColumns, bool kOneBlock>
__global__ void __launch_bounds__(kThreads, kMinBlocks<T>)
    chain_gradient_kernel(const __grid_constant__ ChainParams p, const __grid_constant__ GradientParams<T> g) {
  using Acc = accumulator_t<T>;
  extern __shared__ __align__(16) unsigned char shared[];
  Acc* thread_sums = reinterpret_cast<Acc*>(shared) + threadIdx.x;
  if constexpr (kOneBlock) {
    for (int channel = 0; channel < p.channels; ++channel) thread_sums[channel * kThreads] = 0;
  }
  StoreGradient<T, kColumns, kOneBlock> epilogue{g, thread_sums, Acc(0)};
  run_chain<T, kColumns>(p, shared + (kOneBlock ? kColumns * kThreads * sizeof(Acc) : 0), epilogue);
  if constexpr (kOneBlock) {
    for (int channel = 0; channel < p.channels; ++channel) {
      epilogue.add_to_warp(p, channel, thread_sums[channel * kThreads]);
    }
  }
  const Acc subtrahend_sum = warp_sum(epilogue.subtrahend_sum);
  if (threadIdx.x % kLanes == 0) g.subtrahend_sums[blockIdx.x * kWarps + threadIdx.x / kLanes] += subtrahend_sum;
}

template <typename T>
struct BackwardCall {
  using Acc = accumulator_t<T>;

  const Problem& problem;
  const T *grad_output, *input, *weight, *bias, *subtrahend;
  double min, max;
  T *grad_input, *grad_weight, *grad_bias, *grad_subtrahend;
  char* workspace;
  cudaStream_t stream;
  BackwardPlan plan;

  Acc* at(int64_t offset) const { return reinterpret_cast<Acc*>(workspace + offset); }

  cudaError_t make_du(const Window& window) const {
    return dispatch_columns<T>(problem.out_channels_per_group(), [&](auto columns) {
      ChainParams p = make_chain_params(problem, window, columns);
      p.input = input, p.weight = weight, p.bias = bias, p.subtrahend = subtrahend;
      const bool one_block = p.product.blocks == 1;
      GradientParams<T> g{grad_output,
                          at(plan.gradient),
                          at(plan.bias_sums),
                          at(plan.subtrahend_sums),
                          static_cast<Acc>(min),
                          static_cast<Acc>(max),
                          make_phase_view(problem, window),
                          {}};
      for (int c = 0; c < columns; ++c) {
        for (int cell = 0; cell < kCells; ++cell) {
          g.du_bytes[c][cell] = (c * g.view.cell.channel + cell * g.view.cell.axis[1]) * int64_t{sizeof(Acc)};
        }
      }
      const int64_t shared = plan_chain_memory(problem, columns, sizeof(Acc), p) +
                             (one_block ? columns * kThreads * int64_t{sizeof(Acc)} : 0);
      const auto kernel =
          one_block ? chain_gradient_kernel<T, columns, true> : chain_gradient_kernel<T, columns, false>;
      int64_t blocks;
      const cudaError_t error = count_blocks(reinterpret_cast<const void*>(kernel), shared, p.items, blocks);
      if (error != cudaSuccess) return error;
      const int64_t grid = std::min(blocks, plan.slots / kWarps);
      kernel<<<grid, kThreads, shared, stream>>>(p, g);
      return cudaGetLastError();
    });
  }

  cudaError_t run_window(const Window& window) const {
    cudaError_t error = make_du(window);
    if (error == cudaSuccess && grad_input != nullptr) {
      error = launch_input_gradient(problem, window, at(plan.gradient), weight, grad_input, stream);
    }
    if (error == cudaSuccess && grad_weight != nullptr) {
      error = launch_weight_gradient(problem, window, input, at(plan.gradient), at(plan.weight_sums), stream);
    }
    return error;
  }

  cudaError_t run_windows() const {
    int64_t length[3];
    for (int a = 0; a < 3; ++a) length[a] = (problem.axis[a].in + plan.parts[a] - 1) / plan.parts[a];
    const auto end = [&](int a, int64_t begin) { return std::min(begin + length[a], problem.axis[a].in); };
    Window window{};
    for (int64_t n = 0; n < problem.batch; n += plan.batch) {
      window.batch_begin = n;
      window.batch_count = std::min(plan.batch, problem.batch - n);
      for (int64_t z = 0; z < problem.axis[0].in; z += length[0]) {
        restrict_axis(problem, 0, z, end(0, z), window);
        for (int64_t y = 0; y < problem.axis[1].in; y += length[1]) {
          restrict_axis(problem, 1, y, end(1, y), window);
          for (int64_t x = 0; x < problem.axis[2].in; x += length[2]) {
            restrict_axis(problem, 2, x, end(2, x), window);
            const cudaError_t error = run_window(window);
            if (error != cudaSuccess) return error;
          }
        }
      }
    }
    return cudaSuccess;
  }

  cudaError_t reduce(int64_t offset, int64_t slots, int64_t count, double scale, T* output) const {
    return output == nullptr ? cudaSuccess : launch_reduction<T>(at(offset), slots, count, scale, output, stream);
  }

  cudaError_t run() const {
    cudaError_t error = cudaMemsetAsync(workspace, 0, plan.gradient, stream);  // all partial sums
    if (error == cudaSuccess) error = run_windows();
    if (error == cudaSuccess) {
      error = reduce(plan.weight_sums, plan.weight_slots, problem.weight_elements(), 1, grad_weight);
    }
    if (error == cudaSuccess) error = reduce(plan.bias_sums, plan.slots, problem.out_channels, 1, grad_bias);
    if (error == cudaSuccess) error = reduce(plan.subtrahend_sums, plan.slots, 1, -1, grad_subtrahend);
    return error;
  }
};

}  // namespace

BackwardPlan plan_backward(const Problem& problem) {
  constexpr int64_t kMaxSums = int64_t{8} << 20;  // elements of bias sums
  BackwardPlan plan{};
  const int64_t size = problem.dtype == DType::kFloat64 ? 8 : 4;
  // Elements of du for one batch entry of a window, at most.
  const auto entry_elements = [&] {
    int64_t elements = problem.out_channels;
    for (int a = 0; a < 3; ++a) {
      const Axis& axis = problem.axis[a];
      const int64_t length = (axis.in + plan.parts[a] - 1) / plan.parts[a];
      const int64_t outputs = std::min(axis.out(), length * axis.stride + axis.dilation * (axis.kernel - 1) +
                                                       axis.output_padding + axis.padding + 1);
      const int64_t cells = (outputs - 1 + axis.stride - 1) / axis.stride + 1;
      elements *= cells * std::min(axis.stride, outputs);
    }
    return elements;
  };
  for (int a = 0; a < 3; ++a) plan.parts[a] = 1;
  for (int a = 0; a < 3; ++a) {
    while (entry_elements() * size > kGradientBytes && plan.parts[a] < problem.axis[a].in) {
      plan.parts[a] = std::min(2 * plan.parts[a], problem.axis[a].in);
    }
  }
  const int64_t batch = std::max<int64_t>(problem.batch, 1);
  const int64_t entries = std::clamp<int64_t>(kGradientBytes / (entry_elements() * size), 1, batch);
  const int64_t windows = (batch + entries - 1) / entries;
  plan.batch = (batch + windows - 1) / windows;

  const auto place = [&](int64_t elements) {
    const int64_t offset = plan.bytes;
    plan.bytes += (elements * size + 255) / 256 * 256;
    return offset;
  };
  plan.weight_slots = weight_gradient_slots(problem);
  plan.slots = kWarps * std::clamp<int64_t>(kMaxSums / (kWarps * problem.out_channels), 1, kMaxBlocks);
  plan.weight_sums = place(plan.weight_slots * problem.weight_elements());
  plan.bias_sums = place(plan.slots * problem.out_channels);
  plan.subtrahend_sums = place(plan.slots);
  plan.gradient = place(plan.batch * entry_elements());
  return plan;
}

int64_t logsumexp_hardswish_backward_workspace(const Problem& problem) {
  return chain_supports(problem) ? plan_backward(problem).bytes : 0;
}

cudaError_t launch_logsumexp_hardswish_backward(const Problem& problem, const void* grad_output, const void* input,
                                                const void* weight, const void* bias, const void* subtrahend,
                                                double min, double max, void* grad_input, void* grad_weight,
                                                void* grad_bias, void* grad_subtrahend, void* workspace,
                                                cudaStream_t stream) {
  if (!chain_supports(problem)) return cudaErrorNotSupported;
  return dispatch_dtype(problem.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto in = [](const void* pointer) { return static_cast<const T*>(pointer); };
    const auto out = [](void* pointer) { return static_cast<T*>(pointer); };
    const BackwardCall<T> call{problem,
                               in(grad_output),
                               in(input),
                               in(weight),
                               in(bias),
                               in(subtrahend),
                               min,
                               max,
                               out(grad_input),
                               out(grad_weight),
                               out(grad_bias),
                               out(grad_subtrahend),
                               static_cast<char*>(workspace),
                               stream,
                               plan_backward(problem)};
    return call.run();
  });
}

}  // namespace fastconvt::cuda
