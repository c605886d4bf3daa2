// The input's gradient of a layer of stride 1 by forward kernels: the weight is turned round, the rest is theirs.
#include "../core/mirrored_gradient.h"

#include <cuda_runtime.h>

#include "dispatch.h"
#include "launchers.h"

namespace fastconvt::cuda {
namespace {

constexpr int kThreads = 256;

struct TurnParams {
  const void* weight;  // (groups x rows, columns, taps), or taps before columns
  void* turned;        // (groups x columns, rows, taps), the taps in reverse
  int64_t elements;
  int rows, columns, taps;
  bool taps_first;
};

template <typename T>
__global__ void __launch_bounds__(kThreads) turn_weight_kernel(const __grid_constant__ TurnParams p) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= p.elements) return;
  int64_t rest = i / p.taps;
  const int tap = p.taps - 1 - static_cast<int>(i - rest * p.taps);
  const int64_t line = rest / p.rows;
  const int row = static_cast<int>(rest - line * p.rows);
  const int64_t group = line / p.columns;
  const int column = static_cast<int>(line - group * p.columns);
  const int64_t from = (group * p.rows + row) * p.columns * p.taps;
  const int64_t place =
      p.taps_first ? static_cast<int64_t>(tap) * p.columns + column : static_cast<int64_t>(column) * p.taps + tap;
  static_cast<T*>(p.turned)[i] = static_cast<const T*>(p.weight)[from + place];
}

int64_t turned_bytes(const Problem& problem) {
  return round_up(problem.weight_elements() * problem.element_size(), 1024);
}

int64_t workspace_bytes(const Problem& problem, const void* grad_output) {
  const Problem mirrored = mirrored_problem(problem);
  switch (mirrored_family(mirrored)) {
    case MirroredFamily::kPhaseTma:
      return turned_bytes(problem) + phase_tma_workspace(mirrored, grad_output);
    case MirroredFamily::kPhaseTf32:
      return turned_bytes(problem) + phase_tf32_workspace(mirrored, grad_output);
    default:
      return turned_bytes(problem) + flat_gemm_workspace(mirrored);
  }
}

cudaError_t launch_with(const Problem& problem, const void* grad_output, const void* weight, void* grad_input,
                        void* workspace, cudaStream_t stream) {
  TurnParams p{};
  p.weight = weight, p.turned = workspace;
  p.elements = problem.weight_elements();
  p.rows = static_cast<int>(problem.in_channels_per_group());
  p.columns = static_cast<int>(problem.out_channels_per_group());
  p.taps = static_cast<int>(problem.kernel_positions());
  p.taps_first = problem.weight_layout == Layout::kChannelsLast;
  const unsigned blocks = static_cast<unsigned>(ceil_div(p.elements, int64_t{kThreads}));
  const cudaError_t error = dispatch_up_to_float32(problem.dtype, [&](auto tag) {
    turn_weight_kernel<typename decltype(tag)::type><<<blocks, kThreads, 0, stream>>>(p);
    return cudaGetLastError();
  });
  if (error != cudaSuccess) return error;
  const Problem mirrored = mirrored_problem(problem);
  void* const rest = static_cast<char*>(workspace) + turned_bytes(problem);
  switch (mirrored_family(mirrored)) {
    case MirroredFamily::kPhaseTma:
      return launch_phase_tma(mirrored, grad_output, workspace, nullptr, grad_input, rest, stream);
    case MirroredFamily::kPhaseTf32:
      return launch_phase_tf32(mirrored, grad_output, workspace, nullptr, grad_input, rest, stream);
    default:
      return launch_flat_gemm(mirrored, grad_output, workspace, nullptr, grad_input, rest, stream);
  }
}

// Float32 that is contiguous needs no memory but that of its result: all samples but the last one are made while the
// workspace stands in the last one, its channels but the last while it stands in the last one, and that by this kernel.
constexpr int64_t kPlaceAlignment = 256;

struct LastChannelParams {
  const float *grad_output, *weight;  // the sample's; the channel's
  float* grad_input;
  int columns, taps;
  bool taps_first;
  int positions;
  int in[3], out[3], kernel[3], padding[3], dilation[3];
};

// Taps of an axis, the first one and behind the last one, that read positions which exist, the first at `place`.
struct TapRange {
  int first, end, place;
};
__device__ TapRange taps_at(const LastChannelParams& p, int axis, int position) {
  const int begin = position - p.padding[axis], step = p.dilation[axis];
  const int first = begin < 0 ? (step - 1 - begin) / step : 0;
  const int end = begin < p.out[axis] ? min(p.kernel[axis], (p.out[axis] - begin + step - 1) / step) : 0;
  return {first, end, begin + first * step};
}

__global__ void __launch_bounds__(kThreads) last_channel_kernel(const __grid_constant__ LastChannelParams p) {
  const int position = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x);
  if (position >= p.positions) return;
  const int line = position / p.in[2];
  const TapRange of_depth = taps_at(p, 0, line / p.in[1]), of_height = taps_at(p, 1, line % p.in[1]);
  const TapRange of_width = taps_at(p, 2, position % p.in[2]);
  const int next_tap = p.taps_first ? p.columns : 1, next_column = p.taps_first ? 1 : p.taps;
  const int64_t plane = int64_t{p.out[0]} * p.out[1] * p.out[2];
  double sum = 0;
  for (int column = 0; column < p.columns; ++column) {
    float part = 0;
    for (int i = of_depth.first, z = of_depth.place; i < of_depth.end; ++i, z += p.dilation[0]) {
      for (int j = of_height.first, y = of_height.place; j < of_height.end; ++j, y += p.dilation[1]) {
        const float* grad = p.grad_output + column * plane + (int64_t{z} * p.out[1] + y) * p.out[2] + of_width.place;
        const float* weight =
            p.weight + column * next_column + ((i * p.kernel[1] + j) * p.kernel[2] + of_width.first) * next_tap;
#pragma unroll 3
        for (int k = of_width.first; k < of_width.end; ++k, grad += p.dilation[2], weight += next_tap) {
          part += *grad * *weight;
        }
      }
    }
    sum += part;
  }
  p.grad_input[position] = static_cast<float>(sum);
}

// All samples but the last one; of that one all channels but the last.
Problem first_samples(const Problem& problem) {
  Problem part = problem;
  --part.batch;
  return part;
}
Problem last_sample(const Problem& problem) {
  Problem part = problem;
  part.batch = 1;
  --part.in_channels;
  return part;
}

bool works_in_place(const Problem& problem) {
  constexpr int64_t kPlanes = 128;  // the slower kernel makes one of at least so many
  constexpr double kLong = 0.5;     // milliseconds that hide more launches
  if (problem.dtype != DType::kFloat32 || problem.allow_tf32 || problem.layout != Layout::kContiguous) return false;
  if (problem.groups != 1 || problem.batch < 2 || problem.in_channels < 16) return false;
  if (problem.batch * problem.in_channels < kPlanes || mirrored_gradient_cost_ms(problem) < kLong) return false;
  if (problem.in_positions() >= int64_t{1} << 30) return false;
  for (const Problem& part : {first_samples(problem), last_sample(problem)}) {
    if (!mirrored_gradient_refusal(part).empty()) return false;
    if (workspace_bytes(part, nullptr) + kPlaceAlignment > problem.in_positions() * problem.element_size())
      return false;
  }
  return true;
}

cudaError_t launch_last_channel(const Problem& problem, const float* grad_output, const float* weight,
                                float* grad_input, cudaStream_t stream) {
  LastChannelParams p{};
  p.grad_output = grad_output, p.grad_input = grad_input;
  p.columns = static_cast<int>(problem.out_channels), p.taps = static_cast<int>(problem.kernel_positions());
  p.weight = weight + (problem.in_channels - 1) * p.columns * p.taps;
  p.taps_first = problem.weight_layout == Layout::kChannelsLast;
  p.positions = static_cast<int>(problem.in_positions());
  for (int a = 0; a < 3; ++a) {
    const Axis& axis = problem.axis[a];
    p.in[a] = static_cast<int>(axis.in), p.out[a] = static_cast<int>(axis.out());
    p.kernel[a] = static_cast<int>(axis.kernel), p.padding[a] = static_cast<int>(axis.padding);
    p.dilation[a] = static_cast<int>(axis.dilation);
  }
  const unsigned blocks = static_cast<unsigned>(ceil_div(problem.in_positions(), int64_t{kThreads}));
  last_channel_kernel<<<blocks, kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

cudaError_t launch_in_place(const Problem& problem, const float* grad_output, const float* weight, float* grad_input,
                            cudaStream_t stream) {
  const int64_t image = problem.in_positions(), last = (problem.batch - 1) * problem.in_channels * image;
  const auto aligned = [](float* place) {
    return reinterpret_cast<void*>(round_up(reinterpret_cast<int64_t>(place), kPlaceAlignment));
  };
  float* const sample = grad_input + last;
  float* const plane = sample + (problem.in_channels - 1) * image;
  cudaError_t error = launch_with(first_samples(problem), grad_output, weight, grad_input, aligned(sample), stream);
  grad_output += (problem.batch - 1) * problem.out_channels * problem.out_positions();
  if (error == cudaSuccess) {
    error = launch_with(last_sample(problem), grad_output, weight, sample, aligned(plane), stream);
  }
  return error == cudaSuccess ? launch_last_channel(problem, grad_output, weight, plane, stream) : error;
}

}  // namespace

int64_t mirrored_input_gradient_workspace(const Problem& problem, const void* grad_output, const void* /*input*/,
                                          const void* /*weight*/) {
  return last_result<works_in_place>(problem) ? 0 : workspace_bytes(problem, grad_output);
}

cudaError_t launch_mirrored_input_gradient(const Problem& problem, const void* grad_output, const void* weight,
                                           void* grad_input, void* workspace, cudaStream_t stream) {
  if (problem.in_elements() == 0) return cudaSuccess;
  if (!mirrored_gradient_refusal(problem).empty()) return cudaErrorNotSupported;
  if (last_result<works_in_place>(problem)) {
    return launch_in_place(problem, static_cast<const float*>(grad_output), static_cast<const float*>(weight),
                           static_cast<float*>(grad_input), stream);
  }
  return launch_with(problem, grad_output, weight, grad_input, workspace, stream);
}

}  // namespace fastconvt::cuda
