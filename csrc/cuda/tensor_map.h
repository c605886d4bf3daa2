// Descriptions of tensors for bulk tensor copies (compute capability 9.0).
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

namespace fastconvt::cuda {

// cuTensorMapEncodeTiled of the driver, which the library is not linked to; null if it does not have it.
inline decltype(&cuTensorMapEncodeTiled) tensor_map_encoder() {
  static const auto encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
    return error == cudaSuccess && found == cudaDriverEntryPointSuccess ? function : nullptr;
  }();
  return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(encode);
}

}  // namespace fastconvt::cuda
