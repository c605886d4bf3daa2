// Asynchronous copies of compute capability 8.0 (16 and 4 bytes a thread) and 9.0 (bulk stores, L2 prefetches).
#pragma once

#include "barrier.cuh"
#include "shared_address.cuh"

namespace fastconvt::cuda {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

// L2 policies: what is touched once makes room first; what others will read soon stays.
__device__ inline uint64_t evict_first_policy() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ inline uint64_t evict_last_policy() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// Both aligned to 16 bytes; past the first-level cache.
__device__ inline void copy_16_async(float* target, const float* source, uint64_t policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(shared_address(target)),
               "l"(source), "l"(policy)
               : "memory");
}
__device__ inline void copy_4_async(float* target, const float* source) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(target)), "l"(source) : "memory");
}

// Bulk store from shared memory: both addresses and the size are multiples of 16 bytes. Writes to the source must be
// fenced (fence_shared_writes) by their threads; the source may change after wait_for_bulk_reads by the storing thread.
__device__ inline void bulk_store(float* target, const float* source, int count, uint64_t policy) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [%0], [%1], %2, %3;" ::"l"(target),
               "r"(shared_address(source)), "r"(count * 4), "l"(policy)
               : "memory");
}

// Address and size are multiples of 16 bytes.
__device__ inline void prefetch_bulk(const void* source, int bytes, uint64_t policy) {
  asm volatile("cp.async.bulk.prefetch.L2.global.L2::cache_hint [%0], %1, %2;" ::"l"(source), "r"(bytes), "l"(policy)
               : "memory");
}

#endif

// The same without a policy.
__device__ __forceinline__ void store_run(void* target, uint32_t source, int bytes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(target), "r"(source), "r"(bytes)
               : "memory");
#endif
}
__device__ __forceinline__ void commit_bulk() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
#endif
}
// Until what this thread stores has been read.
__device__ __forceinline__ void wait_for_bulk_reads() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
#endif
}

}  // namespace fastconvt::cuda
