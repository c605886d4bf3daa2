// Copies of the gradients by pairs into shared memory, and asynchronous products of rows in registers by columns in
// shared memory (compute capability 9.0a; empty elsewhere).
#pragma once

#include "device/barrier.cuh"
#include "device/numeric.cuh"
#include "device/tensor_copy.cuh"
#include "device/wgmma.cuh"

namespace fastconvt::cuda {

__device__ __forceinline__ uint32_t load_pair(uint32_t address) {
  uint32_t x;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(address) : "memory");
  return x;
}
__device__ __forceinline__ void load_pairs(uint32_t address, uint32_t& x, uint32_t& y) {
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(x), "=r"(y) : "r"(address) : "memory");
}
__device__ __forceinline__ void load_four_pairs(uint32_t address, uint32_t (&x)[4]) {
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(address)
               : "memory");
}
// Three neighbours: two that are aligned at `two`, and `one` before or after them.
__device__ __forceinline__ void load_three_pairs(uint32_t two, uint32_t one, bool before, uint32_t (&x)[3]) {
  uint32_t a, b;
  load_pairs(two, a, b);
  const uint32_t c = load_pair(one);
  x[0] = before ? c : a, x[1] = before ? a : b, x[2] = before ? b : c;
}

// The operand that starts at a shared address, in units of 16 bytes, as groups of eight rows. Swizzle: 1: of 128, 2: of
// 64, 3: of 32 bytes.
__device__ __forceinline__ uint32_t pairs_operand_form(int swizzle, int group_bytes) {
  return static_cast<uint32_t>(swizzle) << 30 | static_cast<uint32_t>(group_bytes >> 4);
}
__device__ __forceinline__ uint64_t pairs_operand(uint32_t form, uint32_t start) {
  return static_cast<uint64_t>(form) << 32 | (start & 0x3fff) | 1u << 16;
}

#define FASTCONVT_PAIRS_PRODUCT(shape, types, regs, sums, a0, a1, a2, a3, b)                                        \
  asm volatile("wgmma.mma_async.sync.aligned." shape ".f32." types " {" regs "}, {" a0 "," a1 "," a2 "," a3 "}, " b \
               ", 1, 1, 1, 0;"                                                                                      \
               : sums                                                                                               \
               : "r"(rows[0]), "r"(rows[1]), "r"(rows[2]), "r"(rows[3]), "l"(columns))
#define FASTCONVT_PAIRS_PRODUCTS(types)                                                                               \
  if constexpr (kTiles == 1) {                                                                                        \
    FASTCONVT_PAIRS_PRODUCT("m64n8k16", types, "%0,%1,%2,%3", FASTCONVT_SUM1(0), "%4", "%5", "%6", "%7", "%8");       \
  } else if constexpr (kTiles == 8) {                                                                                 \
    FASTCONVT_PAIRS_PRODUCT("m64n64k16", types, FASTCONVT_REGS32, FASTCONVT_SUM8, "%32", "%33", "%34", "%35", "%36"); \
  } else {                                                                                                            \
    static_assert(kTiles == 16);                                                                                      \
    FASTCONVT_PAIRS_PRODUCT("m64n128k16", types, FASTCONVT_REGS64, FASTCONVT_SUM16, "%64", "%65", "%66", "%67",       \
                            "%68");                                                                                   \
  }

// d += rows * columns of 32 bytes of the inner dimension, which is innermost; in flight until wgmma_wait().
template <typename T, int kTiles>
__device__ __forceinline__ void start_pairs_product(float (&d)[kTiles][4], const uint32_t (&rows)[4],
                                                    uint64_t columns) {
#ifdef FASTCONVT_WGMMA
  if constexpr (std::is_same_v<T, __half>) {
    FASTCONVT_PAIRS_PRODUCTS("f16.f16")
  } else {
    FASTCONVT_PAIRS_PRODUCTS("bf16.bf16")
  }
#endif
}

}  // namespace fastconvt::cuda
