// Asynchronous products of a warpgroup, their order and how their sums are named (compute capability 9.0a; empty
// elsewhere).
#pragma once

namespace fastconvt::cuda {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define FASTCONVT_WGMMA 1
#endif

// Before products of registers that were written since the ones before.
__device__ __forceinline__ void wgmma_fence() {
#ifdef FASTCONVT_WGMMA
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}
// The products since the last commitment become a group.
__device__ __forceinline__ void wgmma_commit() {
#ifdef FASTCONVT_WGMMA
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}
// Until all groups but the last kPending have ended.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
#ifdef FASTCONVT_WGMMA
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
#endif
}

// Sums d[...][4] as operands of a product of 64 rows: tiles of 8 columns, and the names of their registers.
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

}  // namespace fastconvt::cuda
