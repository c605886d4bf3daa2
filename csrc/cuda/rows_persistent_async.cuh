// What the roles of the persistent row family wait for besides bulk stores: copies of inputs, barriers (compute
// capability 9.0).
#pragma once

#include "device/barrier.cuh"
#include "device/bulk.cuh"
#include "device/copy_groups.cuh"

namespace fastconvt::cuda {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

// `bytes` of a row, or zeros.
template <int bytes>
__device__ inline void copy_or_clear_async(void* target, const void* source, bool exists) {
  copy_or_zero<bytes>(shared_address(target), source, exists);
}

// The barriers of device/barrier.cuh, by pointers.
__device__ inline void init_barrier(uint64_t* barrier, int count) { mbarrier_init(shared_address(barrier), count); }
__device__ inline void arrive_at(uint64_t* barrier) { mbarrier_arrive(shared_address(barrier)); }
__device__ inline void arrive_after_copies(uint64_t* barrier) { mbarrier_arrive_after_copies(shared_address(barrier)); }
__device__ inline void wait_at(uint64_t* barrier, int parity) { mbarrier_wait(shared_address(barrier), parity); }

// Barrier `id` (0 is __syncthreads) of `threads` threads.
__device__ inline void sync_named(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

#endif

}  // namespace fastconvt::cuda
