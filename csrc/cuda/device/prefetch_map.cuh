// Descriptors of tensors, fetched before copies need them (compute capability 9.0; empty below).
#pragma once

#include <cuda.h>

namespace fastconvt::cuda {

__device__ __forceinline__ void prefetch_map(const CUtensorMap* map) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
#endif
}

}  // namespace fastconvt::cuda
