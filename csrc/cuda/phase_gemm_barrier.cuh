// Barriers between the halves of a phase GEMM's block (compute capability 9.0).
#pragma once

#include "device/barrier.cuh"
#include "device/dependent_launch.cuh"
#include "phase_gemm_stage.cuh"

namespace fastconvt::cuda {

#if defined(__CUDA_ARCH__) && defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define FASTCONVT_PHASE_GEMM 1
#endif

// In shared memory: of every stage, that it is full and that it is empty; of every buffer of inputs, that it is free.
struct PhaseGemmBarriers {
  uint32_t address;
  int stages;
  __device__ __forceinline__ uint32_t full(int stage) const { return address + stage * 8; }
  __device__ __forceinline__ uint32_t empty(int stage) const { return address + (stages + stage) * 8; }
  __device__ __forceinline__ uint32_t free(int buffer) const { return address + (2 * stages + buffer) * 8; }
};

// Half a block, number 1 or 2, waits for all of it.
template <int kHalf>
__device__ __forceinline__ void meet() {
  asm volatile("bar.sync %0, %1;" ::"n"(kHalf), "n"(kPhaseGemmThreads) : "memory");
}

}  // namespace fastconvt::cuda
