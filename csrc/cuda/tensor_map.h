// Descriptions of tensors for bulk tensor copies (compute capability 9.0).
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "../core/problem.h"

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

// A tensor of 16 bits as copies read it, the innermost axis dense, and their box.
template <int kRank>
cudaError_t encode_map(DType dtype, const void* tensor, const cuuint64_t (&dims)[kRank],
                       const cuuint64_t (&pitches)[kRank - 1], const cuuint32_t (&box)[kRank], CUtensorMap& map,
                       CUtensorMapL2promotion promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                       CUtensorMapSwizzle swizzle = CU_TENSOR_MAP_SWIZZLE_128B) {
  const auto encode = tensor_map_encoder();
  if (encode == nullptr) return cudaErrorNotSupported;
  const cuuint32_t steps[5] = {1, 1, 1, 1, 1};
  const CUtensorMapDataType type =
      dtype == DType::kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  return encode(&map, type, kRank, const_cast<void*>(tensor), dims, pitches, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                swizzle, promotion, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS
             ? cudaSuccess
             : cudaErrorNotSupported;
}

}  // namespace fastconvt::cuda
