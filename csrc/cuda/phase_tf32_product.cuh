// Tensor copies into shared memory, and asynchronous TF32 products of two operands there (compute capability 9.0a).
#pragma once

#include <cuda.h>

#include "device/barrier.cuh"
#include "device/dependent_launch.cuh"
#include "device/numeric.cuh"
#include "device/shared_address.cuh"
#include "device/tensor_copy.cuh"
#include "device/wgmma.cuh"
#include "phase_tf32_params.h"

namespace fastconvt::cuda {

// Registers of a thread that multiplies, where one or two warpgroups of a block do, and of one that copies: together
// no more than the warpgroups of a block begin with, 168 each, or 128 where two blocks share a multiprocessor.
template <int kWarpgroups>
constexpr int kPhaseTf32Registers = kWarpgroups == 2 ? 208 : 160;
template <int kWarpgroups>
constexpr int kPhaseTf32CopierRegisters = kWarpgroups == 2 ? 88 : 96;

// What all descriptors of operands have in common: the swizzle, and how far groups of eight rows are apart.
__device__ __forceinline__ uint32_t line_form(int swizzle, int group_bytes) {
  return static_cast<uint32_t>(swizzle) << 30 | static_cast<uint32_t>(group_bytes >> 4);
}
// The operand that starts at a shared address, which is given in units of 16 bytes.
__device__ __forceinline__ uint64_t line_of(uint32_t form, uint32_t start) {
  return static_cast<uint64_t>(form) << 32 | (start & 0x3fff) | 1u << 16;
}

#define FASTCONVT_TF32_PRODUCT(shape, regs, sums, a, b, more)                                           \
  asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, " more ", 0;\nwgmma.mma_async.sync.aligned." shape \
               ".f32.tf32.tf32 {" regs "}, " a ", " b ", add, 1, 1;\n}"                                 \
               : sums                                                                                   \
               : "l"(rows), "l"(columns), "r"(add))

// d = rows * columns, plus d if `add` is not 0; in flight until wgmma_wait().
template <int kColumnTiles>
__device__ __forceinline__ void start_tf32_product(float (&d)[kColumnTiles][4], uint64_t rows, uint64_t columns,
                                                   int add) {
#ifdef FASTCONVT_WGMMA
  if constexpr (kColumnTiles == 4) {
    FASTCONVT_TF32_PRODUCT("m64n32k8", FASTCONVT_REGS16, FASTCONVT_SUM4, "%16", "%17", "%18");
  } else if constexpr (kColumnTiles == 8) {
    FASTCONVT_TF32_PRODUCT("m64n64k8", FASTCONVT_REGS32, FASTCONVT_SUM8, "%32", "%33", "%34");
  } else {
    static_assert(kColumnTiles == 16);
    FASTCONVT_TF32_PRODUCT("m64n128k8", FASTCONVT_REGS64, FASTCONVT_SUM16, "%64", "%65", "%66");
  }
#endif
}

}  // namespace fastconvt::cuda
