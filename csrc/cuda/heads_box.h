// Heads in one turn (csrc/core/heads_box.h), as the head family's launcher sees them.
#pragma once

#include <cuda_runtime_api.h>

#include "../core/heads_box.h"

namespace fastconvt::cuda {

cudaError_t launch_heads_box(const Problem& problem, const void* input, const void* weight, const void* bias,
                             void* output, cudaStream_t stream);

}  // namespace fastconvt::cuda
