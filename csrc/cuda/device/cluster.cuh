// Blocks of a cluster and each other's shared memory (compute capability 9.0; empty below).
#pragma once

#include <cstdint>

namespace fastconvt::cuda {

// All threads of all blocks; what they wrote to shared memory is visible to each other afterwards.
__device__ __forceinline__ void meet_cluster() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
#endif
}
// The place in another block's shared memory that has this address in the own one.
__device__ __forceinline__ uint32_t cluster_address(uint32_t address, int rank) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(address) : "r"(rank));
#endif
  return address;
}
__device__ __forceinline__ float load_cluster(uint32_t address) {
  float value = 0;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(address) : "memory");
#endif
  return value;
}

}  // namespace fastconvt::cuda
