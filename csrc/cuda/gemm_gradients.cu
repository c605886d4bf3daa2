// Both gradients by matrix products, and the bias's: what has to be packed of the output's gradient is packed once.
#include "gemm_gradients.h"

#include "../core/gemm_weight_gradient.h"
#include "../core/gradient_gemm.h"
#include "launchers.h"

namespace fastconvt::cuda {
namespace {

// Side by side, since a gradient may begin while the one before it ends. The packed gradient of the output is where the
// weight's gradient would pack it: at the end.
struct Workspaces {
  int64_t packed_at, weight_at, bytes;
  explicit Workspaces(const Problem& problem) {
    weight_at = round_up(gemm_input_gradient_workspace(problem, true), 1024);
    bytes = weight_at + gemm_weight_gradient_workspace(problem);
    packed_at = bytes - round_up(gradient_gemm_packed_bytes(problem, nullptr), 1024);
  }
};

}  // namespace

int64_t gemm_gradients_workspace(const Problem& problem) { return Workspaces(problem).bytes; }

cudaError_t launch_gemm_gradients(const Problem& problem, const void* grad_output, const void* input,
                                  const void* weight, void* grad_input, void* grad_weight, void* grad_bias,
                                  void* workspace, cudaStream_t stream) {
  if (!gradient_gemm_refusal(problem).empty() || !gemm_weight_gradient_refusal(problem).empty()) {
    return cudaErrorNotSupported;
  }
  const Workspaces of(problem);
  char* const base = static_cast<char*>(workspace);
  const void* packed = nullptr;
  if (gradient_gemm_packed_bytes(problem, grad_output) > 0) {
    if (gradient_gemm_packed_bytes(problem, nullptr) == 0) return cudaErrorNotSupported;  // for its alignment alone
    packed = base + of.packed_at;
    const cudaError_t error =
        launch_gradient_gemm_pack(problem, grad_output, base + of.packed_at, weight, base, stream);
    if (error != cudaSuccess) return error;
  }
  const cudaError_t error =
      launch_packed_gemm_input_gradient(problem, grad_output, packed, weight, grad_input, base, stream);
  if (error != cudaSuccess) return error;
  return launch_packed_gemm_weight_gradient(problem, grad_output, packed, input, grad_weight, grad_bias,
                                            base + of.weight_at, stream);
}

}  // namespace fastconvt::cuda
