// Asynchronous products of compute capability 9.0: the left operand, 64 cells of a warpgroup, in registers, the right
// one in shared memory.
#pragma once

#include "device/wgmma.cuh"
#include "phase_gemm_barrier.cuh"
#include "phase_gemm_product.cuh"

namespace fastconvt::cuda {

// The right operand: columns 16 bytes apart, granules of channels `pitch` bytes apart.
__device__ __forceinline__ uint64_t column_operand(uint32_t address, int pitch) {
  return static_cast<uint64_t>((address & 0x3ffff) >> 4) | static_cast<uint64_t>(pitch >> 4) << 16 | uint64_t{8} << 32;
}

#define FASTCONVT_SUM1(i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define FASTCONVT_SUM2 FASTCONVT_SUM1(0), FASTCONVT_SUM1(1)
#define FASTCONVT_SUM4 FASTCONVT_SUM2, FASTCONVT_SUM1(2), FASTCONVT_SUM1(3)
#define FASTCONVT_SUM8 FASTCONVT_SUM4, FASTCONVT_SUM1(4), FASTCONVT_SUM1(5), FASTCONVT_SUM1(6), FASTCONVT_SUM1(7)
#define FASTCONVT_SUM16                                                                                             \
  FASTCONVT_SUM8, FASTCONVT_SUM1(8), FASTCONVT_SUM1(9), FASTCONVT_SUM1(10), FASTCONVT_SUM1(11), FASTCONVT_SUM1(12), \
      FASTCONVT_SUM1(13), FASTCONVT_SUM1(14), FASTCONVT_SUM1(15)
#define FASTCONVT_REGS8 "%0,%1,%2,%3,%4,%5,%6,%7"
#define FASTCONVT_REGS16 FASTCONVT_REGS8 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define FASTCONVT_REGS32 FASTCONVT_REGS16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define FASTCONVT_REGS64                                                                                              \
  FASTCONVT_REGS32                                                                                                    \
  ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59," \
  "%60,%61,%62,%63"
#define FASTCONVT_PRODUCT(shape, types, regs, sums, a0, a1, a2, a3, b, tail)                                        \
  asm volatile("wgmma.mma_async.sync.aligned." shape ".f32." types " {" regs "}, {" a0 "," a1 "," a2 "," a3 "}, " b \
               ", 1, 1, 1" tail ";"                                                                                 \
               : sums                                                                                               \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(columns))
#define FASTCONVT_PRODUCTS(k, types, tail)                                                                             \
  if constexpr (kColumnTiles == 2) {                                                                                   \
    FASTCONVT_PRODUCT("m64n16" k, types, FASTCONVT_REGS8, FASTCONVT_SUM2, "%8", "%9", "%10", "%11", "%12", tail);      \
  } else if constexpr (kColumnTiles == 4) {                                                                            \
    FASTCONVT_PRODUCT("m64n32" k, types, FASTCONVT_REGS16, FASTCONVT_SUM4, "%16", "%17", "%18", "%19", "%20", tail);   \
  } else if constexpr (kColumnTiles == 8) {                                                                            \
    FASTCONVT_PRODUCT("m64n64" k, types, FASTCONVT_REGS32, FASTCONVT_SUM8, "%32", "%33", "%34", "%35", "%36", tail);   \
  } else {                                                                                                             \
    FASTCONVT_PRODUCT("m64n128" k, types, FASTCONVT_REGS64, FASTCONVT_SUM16, "%64", "%65", "%66", "%67", "%68", tail); \
  }

// d += a * columns, in flight until wgmma_wait().
template <typename T, int kColumnTiles>
__device__ __forceinline__ void start_product(float (&d)[kColumnTiles][4], const uint32_t (&a)[4], uint64_t columns) {
#ifdef FASTCONVT_PHASE_GEMM
  if constexpr (std::is_same_v<T, float>) {
    FASTCONVT_PRODUCTS("k8", "tf32.tf32", "")
  } else if constexpr (std::is_same_v<T, __half>) {
    FASTCONVT_PRODUCTS("k16", "f16.f16", ", 0")
  } else {
    FASTCONVT_PRODUCTS("k16", "bf16.bf16", ", 0")
  }
#endif
}

}  // namespace fastconvt::cuda
