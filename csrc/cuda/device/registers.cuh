// Registers of the threads of a warpgroup, from here on (compute capability 9.0a; empty elsewhere).
#pragma once

namespace fastconvt::cuda {

template <int kCount>
__device__ __forceinline__ void raise_registers() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
#endif
}
template <int kCount>
__device__ __forceinline__ void lower_registers() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
#endif
}

}  // namespace fastconvt::cuda
