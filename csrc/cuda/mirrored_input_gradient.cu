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

}  // namespace

int64_t mirrored_input_gradient_workspace(const Problem& problem, const void* grad_output, const void* /*input*/,
                                          const void* /*weight*/) {
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

cudaError_t launch_mirrored_input_gradient(const Problem& problem, const void* grad_output, const void* weight,
                                           void* grad_input, void* workspace, cudaStream_t stream) {
  if (problem.in_elements() == 0) return cudaSuccess;
  if (!mirrored_gradient_refusal(problem).empty()) return cudaErrorNotSupported;
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

}  // namespace fastconvt::cuda
