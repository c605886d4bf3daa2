// What the gradients in TF32 from contiguous tensors (pairs_tf32_gradients.cu, boxes_tf32_gradients.cu) share on the
// host: their tensors, the maps by which copies read them, and what happens to tensors that copies cannot read.
#pragma once

#include <type_traits>

#include "launchers.h"
#include "tensor_map.h"

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

// Copies round to TF32. Sizes and boxes are width, height, depth, channels, batch.
inline bool make_tf32_map(const void* data, const int64_t (&size)[5], const int (&box)[5], CUtensorMapSwizzle swizzle,
                          CUtensorMap& map) {
  const auto encode = tensor_map_encoder();
  if (encode == nullptr) return false;
  cuuint64_t dims[5], pitches[4], pitch = 4;
  cuuint32_t boxes[5] = {}, steps[5] = {1, 1, 1, 1, 1};
  for (int i = 0; i < 5; ++i) {
    dims[i] = static_cast<cuuint64_t>(size[i]), boxes[i] = static_cast<cuuint32_t>(box[i]);
    if (i > 0) pitches[i - 1] = pitch;
    pitch *= dims[i];
  }
  return encode(&map, CU_TENSOR_MAP_DATA_TYPE_TFLOAT32, 5, const_cast<void*>(data), dims, pitches, boxes, steps,
                CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// launch(tiles of a block for the input's gradient, for the weight's), both as types.
template <class Plan, class Launch>
cudaError_t dispatch_tiles(const Plan& t, const Launch& launch) {
  using Tiles8 = std::integral_constant<int, 8>;
  using Tiles16 = std::integral_constant<int, 16>;
  using Tiles32 = std::integral_constant<int, 32>;
  if (t.input_tiles == 8) return launch(Tiles8{}, Tiles8{});
  if (t.input_tiles == 16) {
    return t.weight_tiles == 16 ? launch(Tiles16{}, Tiles16{}) : launch(Tiles16{}, Tiles32{});
  }
  return t.weight_tiles == 16 ? launch(Tiles32{}, Tiles16{}) : launch(Tiles32{}, Tiles32{});
}

// The launchers of a family, which has bytes(problem, of the input, of the weight) and launch(problem, tensors,
// workspace, stream). Tensors that are not aligned are left to the gradients by matrix products.
template <class Family>
struct Tf32Launchers {
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
