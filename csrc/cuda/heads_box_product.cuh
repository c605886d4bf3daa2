// Heads in one turn: asynchronous products of compute capability 9.0. The left operand, 64 positions of a warpgroup by
// 32 bytes of channels, is in registers; the right one, pairs of an output channel and a tap, in shared memory.
#pragma once

#include "device/wgmma.cuh"
#include "heads_product.cuh"

namespace fastconvt::cuda {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// Columns 16 bytes apart, the two granules of a step's channels `pitch` bytes apart.
__device__ __forceinline__ uint64_t heads_box_operand(uint32_t address, int pitch) {
  return static_cast<uint64_t>((address & 0x3ffff) >> 4) | static_cast<uint64_t>(pitch >> 4) << 16 | uint64_t{8} << 32;
}

#define HEADS_BOX_SUM(i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define HEADS_BOX_SUM4 HEADS_BOX_SUM(0), HEADS_BOX_SUM(1), HEADS_BOX_SUM(2), HEADS_BOX_SUM(3)
#define HEADS_BOX_SUM6 HEADS_BOX_SUM4, HEADS_BOX_SUM(4), HEADS_BOX_SUM(5)
#define HEADS_BOX_SUM8 HEADS_BOX_SUM6, HEADS_BOX_SUM(6), HEADS_BOX_SUM(7)
#define HEADS_BOX_SUM12 HEADS_BOX_SUM8, HEADS_BOX_SUM(8), HEADS_BOX_SUM(9), HEADS_BOX_SUM(10), HEADS_BOX_SUM(11)
#define HEADS_BOX_REGS16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define HEADS_BOX_REGS24 HEADS_BOX_REGS16 ",%16,%17,%18,%19,%20,%21,%22,%23"
#define HEADS_BOX_REGS32 HEADS_BOX_REGS24 ",%24,%25,%26,%27,%28,%29,%30,%31"
#define HEADS_BOX_REGS48 HEADS_BOX_REGS32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define HEADS_BOX_PRODUCT(shape, types, regs, sums, a0, a1, a2, a3, b, tail)                                        \
  asm volatile("wgmma.mma_async.sync.aligned." shape ".f32." types " {" regs "}, {" a0 "," a1 "," a2 "," a3 "}, " b \
               ", 1, 1, 1" tail ";"                                                                                 \
               : sums                                                                                               \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(columns))
#define HEADS_BOX_PRODUCTS(k, types, tail)                                                                            \
  if constexpr (kTiles == 4) {                                                                                        \
    HEADS_BOX_PRODUCT("m64n32" k, types, HEADS_BOX_REGS16, HEADS_BOX_SUM4, "%16", "%17", "%18", "%19", "%20", tail);  \
  } else if constexpr (kTiles == 6) {                                                                                 \
    HEADS_BOX_PRODUCT("m64n48" k, types, HEADS_BOX_REGS24, HEADS_BOX_SUM6, "%24", "%25", "%26", "%27", "%28", tail);  \
  } else if constexpr (kTiles == 8) {                                                                                 \
    HEADS_BOX_PRODUCT("m64n64" k, types, HEADS_BOX_REGS32, HEADS_BOX_SUM8, "%32", "%33", "%34", "%35", "%36", tail);  \
  } else {                                                                                                            \
    HEADS_BOX_PRODUCT("m64n96" k, types, HEADS_BOX_REGS48, HEADS_BOX_SUM12, "%48", "%49", "%50", "%51", "%52", tail); \
  }

// d[0] ... d[kTiles - 1] += a * columns, in flight until wgmma_wait().
template <typename T, int kTiles>
__device__ __forceinline__ void heads_box_start(float (*d)[4], const uint32_t (&a)[4], uint64_t columns) {
  if constexpr (std::is_same_v<T, float>) {
    HEADS_BOX_PRODUCTS("k8", "tf32.tf32", "")
  } else if constexpr (std::is_same_v<T, __half>) {
    HEADS_BOX_PRODUCTS("k16", "f16.f16", ", 0")
  } else {
    HEADS_BOX_PRODUCTS("k16", "bf16.bf16", ", 0")
  }
}

#endif

}  // namespace fastconvt::cuda
