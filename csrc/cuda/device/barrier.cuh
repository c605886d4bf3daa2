// Barriers in shared memory (compute capability 9.0; empty below).
#pragma once

#include <cstdint>

namespace fastconvt::cuda {

__device__ __forceinline__ void mbarrier_init(uint32_t barrier, int count) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
#endif
}
__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(barrier) : "memory");
#endif
}
// Until the barrier's phase of this parity has ended.
__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, int parity) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n.reg .pred done;\nrepeat:\nmbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n@!done bra repeat;\n}"
      :
      : "r"(barrier), "r"(parity)
      : "memory");
#endif
}
// Makes what this thread has written to shared memory visible to matrix units and bulk copies.
__device__ __forceinline__ void fence_shared_writes() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

}  // namespace fastconvt::cuda
