// Copies of a gradient GEMM into shared memory, and asynchronous products of two operands there (compute capability
// 9.0a; empty elsewhere).
#pragma once

#include <cuda.h>

#include "device/barrier.cuh"
#include "device/numeric.cuh"
#include "device/tensor_copy.cuh"
#include "device/wgmma.cuh"

namespace fastconvt::cuda {

#if defined(__CUDA_ARCH__) && defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define FASTCONVT_GRADIENT_GEMM 1
#endif

// Neighbouring input positions, channels innermost, as one tap of `offset` sees them; `at` are channel, width, height,
// depth and batch entry of the first position's first tap.
__device__ __forceinline__ void load_positions(uint32_t target, const CUtensorMap* map, int rank, const int (&at)[5],
                                               const int (&offset)[3], uint32_t barrier) {
#ifdef FASTCONVT_GRADIENT_GEMM
#define FASTCONVT_IM2COL(dims) \
  "cp.async.bulk.tensor." dims ".shared::cluster.global.im2col.mbarrier::complete_tx::bytes [%0], [%1, "
  const short w = static_cast<short>(offset[2]), h = static_cast<short>(offset[1]), d = static_cast<short>(offset[0]);
  if (rank == 3) {
    asm volatile(FASTCONVT_IM2COL("5d") "{%2, %3, %4, %5, %6}], [%7], {%8, %9, %10};" ::"r"(target), "l"(map),
                 "r"(at[0]), "r"(at[1]), "r"(at[2]), "r"(at[3]), "r"(at[4]), "r"(barrier), "h"(w), "h"(h), "h"(d)
                 : "memory");
  } else if (rank == 2) {
    asm volatile(FASTCONVT_IM2COL("4d") "{%2, %3, %4, %5}], [%6], {%7, %8};" ::"r"(target), "l"(map), "r"(at[0]),
                 "r"(at[1]), "r"(at[2]), "r"(at[4]), "r"(barrier), "h"(w), "h"(h)
                 : "memory");
  } else {
    asm volatile(FASTCONVT_IM2COL("3d") "{%2, %3, %4}], [%5], {%6};" ::"r"(target), "l"(map), "r"(at[0]), "r"(at[1]),
                 "r"(at[4]), "r"(barrier), "h"(w)
                 : "memory");
  }
#undef FASTCONVT_IM2COL
#endif
}
// Weights of a tap: channels of the output by channels of the input.
__device__ __forceinline__ void load_weights(uint32_t target, const CUtensorMap* map, int out_channel, int tap,
                                             int in_channel, uint32_t barrier) {
  load_box(target, map, out_channel, tap, in_channel, barrier);
}

// The operand that starts at a shared address, in units of 16 bytes: groups of eight rows are `form`'s distance apart.
__device__ __forceinline__ uint32_t gradient_operand_form(int swizzle, int group_bytes) {
  return static_cast<uint32_t>(swizzle) << 30 | static_cast<uint32_t>(group_bytes >> 4);
}
__device__ __forceinline__ uint64_t gradient_operand(uint32_t form, uint32_t start) {
  return static_cast<uint64_t>(form) << 32 | (start & 0x3fff) | 1u << 16;
}

#define FASTCONVT_D1(i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define FASTCONVT_D4(i) FASTCONVT_D1(i), FASTCONVT_D1(i + 1), FASTCONVT_D1(i + 2), FASTCONVT_D1(i + 3)
#define FASTCONVT_D8(i) FASTCONVT_D4(i), FASTCONVT_D4(i + 4)
#define FASTCONVT_D16(i) FASTCONVT_D8(i), FASTCONVT_D8(i + 8)
#define FASTCONVT_D32(i) FASTCONVT_D16(i), FASTCONVT_D16(i + 16)
#define FASTCONVT_R16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define FASTCONVT_R32 FASTCONVT_R16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define FASTCONVT_R64                                                                                         \
  FASTCONVT_R32                                                                                               \
  ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57," \
  "%58,%59,%60,%61,%62,%63"
#define FASTCONVT_R128                                                                                        \
  FASTCONVT_R64                                                                                               \
  ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89," \
  "%90,%91,%92,%93,%94,%95,%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112," \
  "%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define FASTCONVT_GRADIENT_PRODUCT(shape, types, regs, sums, a, b, more, tail)                                        \
  asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, " more ", 0;\nwgmma.mma_async.sync.aligned." shape ".f32." types \
               " {" regs "}, " a ", " b ", add, 1, 1" tail ";\n}"                                                     \
               : sums                                                                                                 \
               : "l"(rows), "l"(columns), "r"(add))
#define FASTCONVT_GRADIENT_PRODUCTS(k, types, tail)                                                                 \
  if constexpr (kTiles == 4) {                                                                                      \
    FASTCONVT_GRADIENT_PRODUCT("m64n32" k, types, FASTCONVT_R16, FASTCONVT_D4(0), "%16", "%17", "%18", tail);       \
  } else if constexpr (kTiles == 8) {                                                                               \
    FASTCONVT_GRADIENT_PRODUCT("m64n64" k, types, FASTCONVT_R32, FASTCONVT_D8(0), "%32", "%33", "%34", tail);       \
  } else if constexpr (kTiles == 16) {                                                                              \
    FASTCONVT_GRADIENT_PRODUCT("m64n128" k, types, FASTCONVT_R64, FASTCONVT_D16(0), "%64", "%65", "%66", tail);     \
  } else {                                                                                                          \
    static_assert(kTiles == 32);                                                                                    \
    FASTCONVT_GRADIENT_PRODUCT("m64n256" k, types, FASTCONVT_R128, FASTCONVT_D32(0), "%128", "%129", "%130", tail); \
  }

// d = rows * columns of 32 bytes of the inner dimension, plus d if `add` is not 0; in flight until wgmma_wait().
template <typename T, int kTiles>
__device__ __forceinline__ void start_gradient_product(float (&d)[kTiles][4], uint64_t rows, uint64_t columns,
                                                       int add) {
#ifdef FASTCONVT_GRADIENT_GEMM
  if constexpr (std::is_same_v<T, float>) {
    FASTCONVT_GRADIENT_PRODUCTS("k8", "tf32.tf32", "")
  } else if constexpr (std::is_same_v<T, __half>) {
    FASTCONVT_GRADIENT_PRODUCTS("k16", "f16.f16", ", 0, 0")
  } else {
    FASTCONVT_GRADIENT_PRODUCTS("k16", "bf16.bf16", ", 0, 0")
  }
#endif
}

#define FASTCONVT_WINDOW_PRODUCT(shape, types, regs, sums, a0, a1, a2, a3, b, more)                                   \
  asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, " more ", 0;\nwgmma.mma_async.sync.aligned." shape ".f32." types \
               " {" regs "}, {" a0 ", " a1 ", " a2 ", " a3 "}, " b ", add, 1, 1, 0;\n}"                               \
               : sums                                                                                                 \
               : "r"(rows[0]), "r"(rows[1]), "r"(rows[2]), "r"(rows[3]), "l"(columns), "r"(add))
#define FASTCONVT_WINDOW_PRODUCTS(types)                                                                              \
  if constexpr (kTiles == 16) {                                                                                       \
    FASTCONVT_WINDOW_PRODUCT("m64n128k16", types, FASTCONVT_R64, FASTCONVT_D16(0), "%64", "%65", "%66", "%67", "%68", \
                             "%69");                                                                                  \
  } else {                                                                                                            \
    static_assert(kTiles == 32);                                                                                      \
    FASTCONVT_WINDOW_PRODUCT("m64n256k16", types, FASTCONVT_R128, FASTCONVT_D32(0), "%128", "%129", "%130", "%131",   \
                             "%132", "%133");                                                                         \
  }

// The same with rows in registers; 16 elements of the inner dimension.
template <typename T, int kTiles>
__device__ __forceinline__ void start_window_product(float (&d)[kTiles][4], const uint32_t (&rows)[4], uint64_t columns,
                                                     int add) {
#ifdef FASTCONVT_GRADIENT_GEMM
  if constexpr (std::is_same_v<T, __half>) {
    FASTCONVT_WINDOW_PRODUCTS("f16.f16")
  } else {
    FASTCONVT_WINDOW_PRODUCTS("bf16.bf16")
  }
#endif
}

// Four 8 x 8 matrices of 16-bit elements: a lane gives the address of a row, or of a column.
template <bool kTransposed>
__device__ __forceinline__ void store_matrices(uint32_t address, const uint32_t (&r)[4]) {
#ifdef FASTCONVT_GRADIENT_GEMM
  if constexpr (kTransposed) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r[0]),
                 "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
  } else {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r[0]),
                 "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
  }
#endif
}

}  // namespace fastconvt::cuda
