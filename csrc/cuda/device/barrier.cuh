// Barriers in shared memory, whose phases alternate in parity (compute capability 8.0), and the bulk copies that arrive
// at them (9.0); empty below.
#pragma once

#include <cstdint>

namespace fastconvt::cuda {

__device__ __forceinline__ void mbarrier_init(uint32_t barrier, int count) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
#endif
}
__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile("{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0]; }" ::"r"(barrier) : "memory");
#endif
}
// Arrives once this thread's asynchronous copies so far have landed.
__device__ __forceinline__ void mbarrier_arrive_after_copies(uint32_t barrier) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
#endif
}
// Arrives, and has the barrier wait for `bytes` of bulk copies as well.
__device__ __forceinline__ void mbarrier_arrive_expecting(uint32_t barrier, int bytes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
#endif
}
// Until the barrier's phase of this parity has ended.
__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, int parity) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "{ .reg .pred done; again: mbarrier.try_wait.parity.shared.b64 done, [%0], %1; @!done bra again; }" ::"r"(
          barrier),
      "r"(parity)
      : "memory");
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile(
      "{ .reg .pred done; again: mbarrier.test_wait.parity.shared.b64 done, [%0], %1; @!done bra again; }" ::"r"(
          barrier),
      "r"(parity)
      : "memory");
#endif
}
// Makes barriers that this thread has initialized visible to bulk copies.
__device__ __forceinline__ void fence_new_barriers() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}
// Makes what this thread has written to shared memory visible to matrix units and bulk copies.
__device__ __forceinline__ void fence_shared_writes() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}
// Addresses and size are multiples of 16 bytes.
__device__ __forceinline__ void bulk_load(uint32_t target, const void* source, int bytes, uint32_t barrier) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(target),
               "l"(source), "r"(bytes), "r"(barrier)
               : "memory");
#endif
}

// A place in a ring of barriers, and how often it went round: the parity to wait for.
struct BarrierRing {
  int place = 0, parity = 0;
  __device__ __forceinline__ void advance(int places) {
    if (++place == places) place = 0, parity ^= 1;
  }
};

}  // namespace fastconvt::cuda
