// Tensor copies into shared memory, and asynchronous products of two operands there (compute capability 9.0a).
#pragma once

#include <cuda.h>

#include "device/barrier.cuh"
#include "device/dependent_launch.cuh"
#include "device/numeric.cuh"
#include "device/prefetch_map.cuh"
#include "device/shared_address.cuh"
#include "device/store_matrices.cuh"
#include "device/tensor_copy.cuh"
#include "device/wgmma.cuh"
#include "phase_pixels_params.h"

namespace fastconvt::cuda {

#if defined(__CUDA_ARCH__) && defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define FASTCONVT_PHASE_PIXELS 1
#endif

// Bulk stores from shared memory: addresses and size are multiples of 16 bytes.
__device__ __forceinline__ void bulk_store(void* target, uint32_t source, int bytes) {
#ifdef FASTCONVT_PHASE_PIXELS
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(target), "r"(source), "r"(bytes)
               : "memory");
#endif
}
__device__ __forceinline__ void commit_stores() {
#ifdef FASTCONVT_PHASE_PIXELS
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
#endif
}
// Until this thread's bulk stores have read their sources.
__device__ __forceinline__ void wait_for_stores() {
#ifdef FASTCONVT_PHASE_PIXELS
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
#endif
}

// Threads of a block: those that multiply, and four warps that copy and tell what to do.
template <int kWarpgroups>
constexpr int kPhasePixelsThreads = (kWarpgroups + 1) * 128;

// Registers of threads: first all have the same number, then those that multiply take what the others leave.
template <int kWarpgroups>
struct PhasePixelsRegisters {
  static constexpr int kThreads = kPhasePixelsThreads<kWarpgroups>;
  static constexpr int kFirst = 65536 / (kThreads * 2 / kWarpgroups) / 8 * 8;
  static constexpr int kCopier = 88;
  static constexpr int kMultiplier = (kThreads / 128 * kFirst - kCopier) / kWarpgroups / 8 * 8;
  static_assert(kMultiplier >= kFirst && kCopier <= kFirst);
};

// What all descriptors of an operand have in common: the swizzle (1: of 128 bytes, 2: 64, 3: 32), how far groups of
// eight rows (of K, for weights) are apart, and how far, for weights, groups of 64 columns.
__device__ __forceinline__ uint64_t operand_form(int swizzle, int group_bytes, int block_bytes) {
  return static_cast<uint64_t>(swizzle) << 62 | static_cast<uint64_t>(group_bytes >> 4) << 32 |
         static_cast<uint64_t>(block_bytes >> 4) << 16;
}
// The operand that starts at a shared address, which is given in units of 16 bytes.
__device__ __forceinline__ uint64_t operand(uint64_t form, uint32_t start) { return form | (start & 0x3fff); }

#define PHASE_PIXELS_SUM1(i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define PHASE_PIXELS_SUM4 PHASE_PIXELS_SUM1(0), PHASE_PIXELS_SUM1(1), PHASE_PIXELS_SUM1(2), PHASE_PIXELS_SUM1(3)
#define PHASE_PIXELS_SUM8 \
  PHASE_PIXELS_SUM4, PHASE_PIXELS_SUM1(4), PHASE_PIXELS_SUM1(5), PHASE_PIXELS_SUM1(6), PHASE_PIXELS_SUM1(7)
#define PHASE_PIXELS_SUM16                                                                                     \
  PHASE_PIXELS_SUM8, PHASE_PIXELS_SUM1(8), PHASE_PIXELS_SUM1(9), PHASE_PIXELS_SUM1(10), PHASE_PIXELS_SUM1(11), \
      PHASE_PIXELS_SUM1(12), PHASE_PIXELS_SUM1(13), PHASE_PIXELS_SUM1(14), PHASE_PIXELS_SUM1(15)
#define PHASE_PIXELS_REGS16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define PHASE_PIXELS_REGS32 PHASE_PIXELS_REGS16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define PHASE_PIXELS_REGS64                                                                                           \
  PHASE_PIXELS_REGS32                                                                                                 \
  ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59," \
  "%60,%61,%62,%63"
#define PHASE_PIXELS_PRODUCT(shape, types, regs, sums, a, b, more)                                                    \
  asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, " more ", 0;\nwgmma.mma_async.sync.aligned." shape ".f32." types \
               " {" regs "}, " a ", " b ", add, 1, 1, 0, 1;\n}"                                                       \
               : sums                                                                                                 \
               : "l"(rows), "l"(columns), "r"(add))
#define PHASE_PIXELS_PRODUCTS(types)                                                                         \
  if constexpr (kColumnTiles == 4) {                                                                         \
    PHASE_PIXELS_PRODUCT("m64n32k16", types, PHASE_PIXELS_REGS16, PHASE_PIXELS_SUM4, "%16", "%17", "%18");   \
  } else if constexpr (kColumnTiles == 8) {                                                                  \
    PHASE_PIXELS_PRODUCT("m64n64k16", types, PHASE_PIXELS_REGS32, PHASE_PIXELS_SUM8, "%32", "%33", "%34");   \
  } else {                                                                                                   \
    static_assert(kColumnTiles == 16);                                                                       \
    PHASE_PIXELS_PRODUCT("m64n128k16", types, PHASE_PIXELS_REGS64, PHASE_PIXELS_SUM16, "%64", "%65", "%66"); \
  }

// d = rows * columns (rows lie along K, columns across it), plus d if `add` is not 0; in flight until wgmma_wait().
template <typename T, int kColumnTiles>
__device__ __forceinline__ void start_shared_product(float (&d)[kColumnTiles][4], uint64_t rows, uint64_t columns,
                                                     int add) {
#ifdef FASTCONVT_PHASE_PIXELS
  if constexpr (std::is_same_v<T, __half>) {
    PHASE_PIXELS_PRODUCTS("f16.f16")
  } else {
    PHASE_PIXELS_PRODUCTS("bf16.bf16")
  }
#endif
}

}  // namespace fastconvt::cuda
