// Tensor copies into shared memory, and asynchronous products of two operands there (compute capability 9.0a).
#pragma once

#include <cuda.h>

#include "device/barrier.cuh"
#include "device/dependent_launch.cuh"
#include "device/numeric.cuh"
#include "device/shared_address.cuh"
#include "device/tensor_copy.cuh"
#include "device/wgmma.cuh"
#include "phase_tma_params.h"

namespace fastconvt::cuda {

// Registers of a thread that multiplies, where one or two warpgroups of a block do, and of one that copies.
template <int kWarpgroups>
constexpr int kPhaseTmaRegisters = kWarpgroups == 2 ? 224 : 200;
template <int kWarpgroups>
constexpr int kPhaseTmaCopierRegisters = 56;

// What all descriptors of operands have in common: the swizzle, and how far groups of eight rows are apart.
__device__ __forceinline__ uint32_t operand_form(int swizzle, int group_bytes) {
  return static_cast<uint32_t>(swizzle) << 30 | static_cast<uint32_t>(group_bytes >> 4);
}
// The operand that starts at a shared address, which is given in units of 16 bytes.
__device__ __forceinline__ uint64_t operand(uint32_t form, uint32_t start) {
  return static_cast<uint64_t>(form) << 32 | (start & 0x3fff) | 1u << 16;
}

#define FASTCONVT_BOTH_SHARED(shape, types, regs, sums, a, b, more)                                                   \
  asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, " more ", 0;\nwgmma.mma_async.sync.aligned." shape ".f32." types \
               " {" regs "}, " a ", " b ", add, 1, 1, 0, 0;\n}"                                                       \
               : sums                                                                                                 \
               : "l"(rows), "l"(columns), "r"(add))
#define FASTCONVT_BOTH_SHAREDS(types)                                                                   \
  if constexpr (kColumnTiles == 4) {                                                                    \
    FASTCONVT_BOTH_SHARED("m64n32k16", types, FASTCONVT_REGS16, FASTCONVT_SUM4, "%16", "%17", "%18");   \
  } else if constexpr (kColumnTiles == 8) {                                                             \
    FASTCONVT_BOTH_SHARED("m64n64k16", types, FASTCONVT_REGS32, FASTCONVT_SUM8, "%32", "%33", "%34");   \
  } else {                                                                                              \
    static_assert(kColumnTiles == 16);                                                                  \
    FASTCONVT_BOTH_SHARED("m64n128k16", types, FASTCONVT_REGS64, FASTCONVT_SUM16, "%64", "%65", "%66"); \
  }

// d = rows * columns, plus d if `add` is not 0; in flight until wgmma_wait().
template <typename T, int kColumnTiles>
__device__ __forceinline__ void start_shared_product(float (&d)[kColumnTiles][4], uint64_t rows, uint64_t columns,
                                                     int add) {
#ifdef FASTCONVT_WGMMA
  if constexpr (std::is_same_v<T, __half>) {
    FASTCONVT_BOTH_SHAREDS("f16.f16")
  } else {
    FASTCONVT_BOTH_SHAREDS("bf16.bf16")
  }
#endif
}

// Four 8 x 8 matrices of 16-bit elements, transposed: a lane gives the address of a row.
__device__ __forceinline__ void store_four_transposed(uint32_t address, const uint32_t (&r)[4]) {
#ifdef FASTCONVT_WGMMA
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r[0]),
               "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
#endif
}

}  // namespace fastconvt::cuda
