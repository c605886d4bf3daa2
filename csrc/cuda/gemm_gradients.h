// What the gradients by matrix products share: the output's gradient, packed once for both.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "../core/problem.h"

namespace fastconvt::cuda {

// The output's gradient with channels innermost, (batch, positions, groups, channels of a group, rounded up to whole
// vectors of 16 bytes); TF32 is rounded. 0 bytes: it is so already.
int64_t gradient_gemm_packed_bytes(const Problem& problem, const void* grad_output);
// The same launch packs the weight into the workspace of the input's gradient, where that needs it.
cudaError_t launch_gradient_gemm_pack(const Problem& problem, const void* grad_output, void* packed, const void* weight,
                                      void* workspace, cudaStream_t stream);

// Bytes of a workspace; `packed`: without room for the output's gradient.
int64_t gemm_input_gradient_workspace(const Problem& problem, bool packed);
// The input's gradient; `packed` is null where launch_gradient_gemm_pack was not called.
cudaError_t launch_packed_gemm_input_gradient(const Problem& problem, const void* grad_output, const void* packed,
                                              const void* weight, void* grad_input, void* workspace,
                                              cudaStream_t stream);

// The weight's gradient, with the bias's if that is not null.
cudaError_t launch_packed_gemm_weight_gradient(const Problem& problem, const void* grad_output, const void* packed,
                                               const void* input, void* grad_weight, void* grad_bias, void* workspace,
                                               cudaStream_t stream);

}  // namespace fastconvt::cuda
