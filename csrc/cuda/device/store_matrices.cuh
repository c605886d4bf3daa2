// Four 8 x 8 matrices of 16-bit elements to shared memory: lane i gives the address of row i % 8 of matrix i / 8
// (compute capability 9.0; empty below).
#pragma once

#include <cstdint>

namespace fastconvt::cuda {

__device__ __forceinline__ void store_matrices(uint32_t address, const uint32_t (&r)[4]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r[0]), "r"(r[1]),
               "r"(r[2]), "r"(r[3])
               : "memory");
#endif
}

}  // namespace fastconvt::cuda
