// The heads GEMM's kernel (csrc/core/heads_gemm.h): warpgroups that multiply, and one that copies ahead of them.
#pragma once

#include "heads_gemm_load.cuh"
#include "heads_gemm_product.cuh"

namespace fastconvt::cuda {

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1) heads_gemm_kernel(const __grid_constant__ HeadsGemmParams p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(128) unsigned char heads_gemm_shared[];
  const HeadsGemmBarriers barriers{shared_address(heads_gemm_shared)};
  if (threadIdx.x == 0) {
    for (int i = 0; i < Traits::kStages; ++i) {
      mbarrier_init(barriers.full(i), 2 * Traits::kFeeders);  // copies and weights
      mbarrier_init(barriers.empty(i), Traits::kMakers / 32);
    }
    fence_shared_writes();
    heads_gemm_prefetch(p);
  }
  heads_gemm_places<Traits>(p, reinterpret_cast<int*>(heads_gemm_shared + Traits::kPlaces));
  __syncthreads();
  const int thread = static_cast<int>(threadIdx.x);
  if (thread < Traits::kMakers) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Traits::kMakerRegisters));
    HeadsGemmMaker<Traits>{p, heads_gemm_shared, thread / 32, thread % 32}.run(barriers);
  } else {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Traits::kFeederRegisters));
    HeadsGemmFeeder<Traits>{p, heads_gemm_shared, thread - Traits::kMakers}.run(barriers);
  }
#endif
}

}  // namespace fastconvt::cuda
