// Groups of asynchronous copies (compute capability 8.0; empty below).
#pragma once

namespace fastconvt::cuda {

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
