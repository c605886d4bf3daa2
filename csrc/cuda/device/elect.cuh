// One thread of a warp (compute capability 9.0).
#pragma once

#include <cstdint>

namespace fastconvt::cuda {

// True in one thread of a warp, always the same one, and the compiler knows that it is one.
__device__ __forceinline__ bool elect_one() {
  uint32_t elected = 0;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("{\n.reg .pred one;\nelect.sync _|one, 0xffffffff;\nselp.u32 %0, 1, 0, one;\n}" : "=r"(elected));
#endif
  return elected != 0;
}

}  // namespace fastconvt::cuda
