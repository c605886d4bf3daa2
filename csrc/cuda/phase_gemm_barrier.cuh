// Barriers between the halves of a phase GEMM's block, and copies that arrive at them (compute capability 9.0).
#pragma once

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

__device__ __forceinline__ void barrier_init(uint32_t barrier, int count) {
#ifdef FASTCONVT_PHASE_GEMM
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
#endif
}
// Makes what this thread has initialised visible to copies in bulk.
__device__ __forceinline__ void fence_barriers() {
#ifdef FASTCONVT_PHASE_GEMM
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}
__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
#ifdef FASTCONVT_PHASE_GEMM
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(barrier) : "memory");
#endif
}
// Arrives, and has the barrier wait for `bytes` more.
__device__ __forceinline__ void barrier_expect(uint32_t barrier, int bytes) {
#ifdef FASTCONVT_PHASE_GEMM
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
#endif
}
// Arrives once this thread's copies so far have ended.
__device__ __forceinline__ void barrier_arrive_after_copies(uint32_t barrier) {
#ifdef FASTCONVT_PHASE_GEMM
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
#endif
}
__device__ __forceinline__ void barrier_wait(uint32_t barrier, int parity) {
#ifdef FASTCONVT_PHASE_GEMM
  asm volatile(
      "{\n.reg .pred done;\nrepeat:\nmbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n@!done bra repeat;\n}"
      :
      : "r"(barrier), "r"(parity)
      : "memory");
#endif
}
// Multiples of 16 bytes.
__device__ __forceinline__ void bulk_load(uint32_t target, const void* source, int bytes, uint32_t barrier) {
#ifdef FASTCONVT_PHASE_GEMM
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               :
               : "r"(target), "l"(source), "r"(bytes), "r"(barrier)
               : "memory");
#endif
}

// Half a block, number 1 or 2, waits for all of it.
template <int kHalf>
__device__ __forceinline__ void meet() {
  asm volatile("bar.sync %0, %1;" ::"n"(kHalf), "n"(kPhaseGemmThreads) : "memory");
}

// Lets the launch after this one start, which waits for this one's results by wait_for_launch_before().
__device__ __forceinline__ void let_next_launch_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ __forceinline__ void wait_for_launch_before() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace fastconvt::cuda
