// Asynchronous copies of a thread and their groups (compute capability 8.0; empty below).
#pragma once

#include <cstdint>

namespace fastconvt::cuda {

// 4, 8 or 16 bytes to shared memory, or zeros where the source does not exist; it is an address all the same.
template <int kBytes>
__device__ __forceinline__ void copy_or_zero(uint32_t target, const void* source, bool exists) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  const int bytes = exists ? kBytes : 0;
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(source), "r"(bytes) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(target), "l"(source), "n"(kBytes), "r"(bytes)
                 : "memory");
  }
#endif
}

__device__ __forceinline__ void commit_copies() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Until all but the latest `pending` groups of copies have landed; 0 <= pending <= 2.
__device__ __forceinline__ void wait_for_groups(int pending) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  if (pending >= 2) {
    asm volatile("cp.async.wait_group 2;" ::: "memory");
  } else if (pending == 1) {
    asm volatile("cp.async.wait_group 1;" ::: "memory");
  } else {
    asm volatile("cp.async.wait_group 0;" ::: "memory");
  }
#endif
}

}  // namespace fastconvt::cuda
