// The launchers of gradients whose copies read tensors as they lie, which have to be aligned: the tensors of a call,
// and what happens to others.
#pragma once

#include <cstdint>

#include "launchers.h"

namespace fastconvt::cuda {

// Those of a call; null where there is none.
struct GradientTensors {
  const void *grad_output, *input, *weight;
  void *grad_input = nullptr, *grad_weight = nullptr, *grad_bias = nullptr;

  // Null pointers are.
  bool aligned() const {
    uintptr_t bits = 0;
    for (const void* x :
         {grad_output, input, weight, static_cast<const void*>(grad_input), static_cast<const void*>(grad_weight)}) {
      bits |= reinterpret_cast<uintptr_t>(x);
    }
    return bits % 16 == 0;
  }
};

// The launchers of a family, which has bytes(problem, of the input, of the weight) and launch(problem, tensors,
// workspace, stream). Tensors that are not aligned are left to the gradients by matrix products.
template <class Family>
struct AlignedLaunchers {
  static int64_t input_workspace(const Problem& problem, const void* grad_output, const void* weight) {
    return GradientTensors{grad_output, nullptr, weight}.aligned()
               ? Family::bytes(problem, true, false)
               : gemm_input_gradient_workspace(problem, grad_output, nullptr, weight);
  }
  static cudaError_t input(const Problem& problem, const void* grad_output, const void* weight, void* grad_input,
                           void* workspace, cudaStream_t stream) {
    if (!GradientTensors{grad_output, nullptr, weight}.aligned()) {
      return launch_gemm_input_gradient(problem, grad_output, weight, grad_input, workspace, stream);
    }
    return Family::launch(problem, {grad_output, nullptr, weight, grad_input}, workspace, stream);
  }

  static int64_t weight_workspace(const Problem& problem, const void* grad_output, const void* input) {
    return GradientTensors{grad_output, input, nullptr}.aligned()
               ? Family::bytes(problem, false, true)
               : gemm_weight_gradient_workspace(problem, grad_output, input, nullptr);
  }
  static cudaError_t weight(const Problem& problem, const void* grad_output, const void* input, void* grad_weight,
                            void* grad_bias, void* workspace, cudaStream_t stream) {
    if (!GradientTensors{grad_output, input, nullptr}.aligned()) {
      return launch_gemm_weight_gradient(problem, grad_output, input, grad_weight, grad_bias, workspace, stream);
    }
    return Family::launch(problem, {grad_output, input, nullptr, nullptr, grad_weight, grad_bias}, workspace, stream);
  }

  static cudaError_t all(const Problem& problem, const GradientTensors& of, void* workspace, cudaStream_t stream) {
    if (of.grad_input == nullptr || of.grad_weight == nullptr) return cudaErrorNotSupported;
    return Family::launch(problem, of, workspace, stream);
  }
};

}  // namespace fastconvt::cuda
