// The input's gradient of a layer of stride 1 by forward kernels: the weight is turned round, the rest is theirs.
#include "../core/dense_gradient.h"
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

// Float32 needs no memory but that of its result: all samples but the last one are made while the workspace stands in
// that one, which the dense kernel makes then: it needs none.
constexpr int64_t kPlaceAlignment = 256;

Problem with_batch(const Problem& problem, int64_t batch) {
  Problem part = problem;
  part.batch = batch;
  return part;
}

bool works_in_place(const Problem& problem) {
  constexpr double kLong = 0.5;     // milliseconds that hide more launches
  constexpr double kAdded = 0.125;  // of the time, by the slower kernel
  if (problem.dtype != DType::kFloat32 || problem.allow_tf32 || problem.batch < 2) return false;
  const Problem first = with_batch(problem, problem.batch - 1), last = with_batch(problem, 1);
  if (!mirrored_gradient_refusal(first).empty() || !dense_input_gradient_refusal(last).empty()) return false;
  const double cost = mirrored_gradient_cost_ms(problem), slower = dense_input_gradient_cost_ms(last);
  if (cost < kLong || slower > (1 / double(problem.batch) + kAdded) * cost) return false;
  return dense_input_gradient_workspace(last) == 0 &&
         workspace_bytes(first, nullptr) + kPlaceAlignment <= last.in_elements() * last.element_size();
}

cudaError_t launch_in_place(const Problem& problem, const float* grad_output, const float* weight, float* grad_input,
                            cudaStream_t stream) {
  const Problem first = with_batch(problem, problem.batch - 1), last = with_batch(problem, 1);
  float* const sample = grad_input + first.in_elements();
  void* const workspace = reinterpret_cast<void*>(round_up(reinterpret_cast<int64_t>(sample), kPlaceAlignment));
  const cudaError_t error = launch_with(first, grad_output, weight, grad_input, workspace, stream);
  if (error != cudaSuccess) return error;
  return launch_dense_input_gradient(last, grad_output + first.out_elements(), weight, sample, nullptr, stream);
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
