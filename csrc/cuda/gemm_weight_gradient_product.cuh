// Asynchronous products whose right operand lies in shared memory position by position (compute capability 9.0a).
#pragma once

#include <cuda.h>

#include "device/barrier.cuh"
#include "device/bulk.cuh"
#include "device/numeric.cuh"
#include "device/store_matrices.cuh"
#include "device/tensor_copy.cuh"
#include "device/wgmma.cuh"
#include "gemm_weight_gradient_params.h"

namespace fastconvt::cuda {

#if defined(__CUDA_ARCH__) && defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define FASTCONVT_GEMM_WEIGHT 1
#endif

// Of the planes of both tensors, and of the weight's gradient.
template <int kPlanes>
struct GemmWeightMaps {
  CUtensorMap input[kPlanes], grad[kPlanes], output;
};

// The upper half of a descriptor: the swizzle, and how far groups of eight positions are apart, in 16 bytes.
__device__ __forceinline__ uint32_t positions_form(int swizzle, int group_pitch) {
  return static_cast<uint32_t>(swizzle) << 30 | static_cast<uint32_t>(group_pitch);
}
// The operand that starts at a shared address, which is given in units of 16 bytes.
__device__ __forceinline__ uint64_t positions_operand(uint32_t form, uint32_t start) {
  return static_cast<uint64_t>(form) << 32 | (start & 0x3fff) | 1u << 16;
}

#define FASTCONVT_PRODUCT(shape, types, regs, sums, a0, a1, a2, a3, b)                                              \
  asm volatile("wgmma.mma_async.sync.aligned." shape ".f32." types " {" regs "}, {" a0 "," a1 "," a2 "," a3 "}, " b \
               ", 1, 1, 1, 1;"                                                                                      \
               : sums                                                                                               \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(columns))
#define FASTCONVT_PRODUCTS(types)                                                                               \
  if constexpr (kColumnTiles == 2) {                                                                            \
    FASTCONVT_PRODUCT("m64n16k16", types, FASTCONVT_REGS8, FASTCONVT_SUM2, "%8", "%9", "%10", "%11", "%12");    \
  } else if constexpr (kColumnTiles == 4) {                                                                     \
    FASTCONVT_PRODUCT("m64n32k16", types, FASTCONVT_REGS16, FASTCONVT_SUM4, "%16", "%17", "%18", "%19", "%20"); \
  } else {                                                                                                      \
    static_assert(kColumnTiles == 8);                                                                           \
    FASTCONVT_PRODUCT("m64n64k16", types, FASTCONVT_REGS32, FASTCONVT_SUM8, "%32", "%33", "%34", "%35", "%36"); \
  }

// d += a * columns, in flight until wgmma_wait(): 16 positions.
template <typename T, int kColumnTiles>
__device__ __forceinline__ void start_positions(float (&d)[kColumnTiles][4], const uint32_t (&a)[4], uint64_t columns) {
#ifdef FASTCONVT_GEMM_WEIGHT
  if constexpr (std::is_same_v<T, __half>) {
    FASTCONVT_PRODUCTS("f16.f16")
  } else {
    FASTCONVT_PRODUCTS("bf16.bf16")
  }
#endif
}

#undef FASTCONVT_PRODUCT
#undef FASTCONVT_PRODUCTS

// Four 8 x 8 matrices: a lane gives the address of a row of one.
__device__ __forceinline__ void load_four(uint32_t (&a)[4], uint32_t address) {
#ifdef FASTCONVT_GEMM_WEIGHT
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
               : "r"(address)
               : "memory");
#endif
}
// The same, transposed.
__device__ __forceinline__ void load_four_transposed(uint32_t (&a)[4], uint32_t address) {
#ifdef FASTCONVT_GEMM_WEIGHT
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
               : "r"(address)
               : "memory");
#endif
}

// Adds sixteen positions of sixteen channels, which load_four_transposed() gives: a product with ones. A lane has two
// channels, eight apart; all columns are the same.
template <typename T>
__device__ __forceinline__ void add_positions(float (&d)[4], const uint32_t (&a)[4]) {
#ifdef FASTCONVT_GEMM_WEIGHT
#define FASTCONVT_ADD(type)                                                           \
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." type "." type                 \
               ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %8}, {%0, %1, %2, %3};" \
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                       \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]),                          \
                 "r"(std::is_same_v<T, __half> ? 0x3c003c00u : 0x3f803f80u))
  if constexpr (std::is_same_v<T, __half>) {
    FASTCONVT_ADD("f16");
  } else {
    FASTCONVT_ADD("bf16");
  }
#undef FASTCONVT_ADD
#endif
}

// Becomes NaN for good where either of two numbers of 16 bits is not finite.
template <typename T>
__device__ __forceinline__ void probe_pair(uint32_t& probe, uint32_t pair) {
#ifdef FASTCONVT_GEMM_WEIGHT
  if constexpr (std::is_same_v<T, __half>) {
    asm volatile("fma.rn.f16x2 %0, %1, %2, %0;" : "+r"(probe) : "r"(pair), "r"(0));
  } else {
    asm volatile("fma.rn.bf16x2 %0, %1, %2, %0;" : "+r"(probe) : "r"(pair), "r"(0));
  }
#endif
}
__device__ __forceinline__ void store_four(uint32_t address, const float (&x)[4]) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3])
               : "memory");
}
// From another block's shared memory.
__device__ __forceinline__ void load_cluster_four(uint32_t address, float (&x)[4]) {
#ifdef FASTCONVT_GEMM_WEIGHT
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
               : "r"(address)
               : "memory");
#endif
}

}  // namespace fastconvt::cuda
