// What both gradients by pairs have of a block: one warp copies stages, two warpgroups multiply them.
#pragma once

#include "device/dependent_launch.cuh"
#include "device/shared_address.cuh"
#include "pairs_gradient_params.h"
#include "pairs_gradient_product.cuh"

namespace fastconvt::cuda {

constexpr int kPairsThreads = 384;

// Shared memory: of every stage, that it is full and that it is empty; ones; the stages.
struct PairsShared {
  uint32_t base;
  __device__ __forceinline__ uint32_t full(int stage) const { return base + stage * 8; }
  __device__ __forceinline__ uint32_t empty(int stage) const { return full(kPairsMaxStages + stage); }
  __device__ __forceinline__ uint32_t ones() const { return base + 512; }
  __device__ __forceinline__ uint32_t stage(const PairsGradientParams& p, int stage) const {
    return base + 1024 + stage * p.stage_bytes;
  }
};

__device__ __forceinline__ PairsShared start_pairs_block(const PairsGradientParams& p, char* dynamic) {
  const PairsShared shared{(shared_address(dynamic) + 1023) & ~1023u};
  if (threadIdx.x == 0) {
    for (int i = 0; i < p.stages; ++i) mbarrier_init(shared.full(i), 1), mbarrier_init(shared.empty(i), 8);
    fence_shared_writes();
  }
  return shared;
}

__device__ __forceinline__ void take_registers() {
#ifdef FASTCONVT_WGMMA
  asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
#endif
}
__device__ __forceinline__ void give_registers() {
#ifdef FASTCONVT_WGMMA
  asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
#endif
}

// Outputs of a unit's positions at channels from `channel` on.
__device__ __forceinline__ void load_pairs_unit(const PairsGradientParams& p, uint32_t target, const CUtensorMap* map,
                                                const PairsUnit& u, int channel, uint32_t barrier) {
  load_box(target, map, u.x * 2 - p.margin, u.y * p.step[0] - p.padding[0], u.z * p.step[1] - p.padding[1], channel,
           u.n, barrier);
}

// Operands in registers are ready before products begin: none is made between them.
__device__ __forceinline__ void settle_operands(uint32_t (&rows)[4][2][4]) {
#pragma unroll
  for (int s = 0; s < 4; ++s)
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int k = 0; k < 4; ++k) asm volatile("" : "+r"(rows[s][m][k])::"memory");
}

template <int kTiles>
__device__ __forceinline__ float probe_sums(const float (&sum)[kTiles][4]) {
  float probe = 0;
#pragma unroll
  for (int j = 0; j < kTiles; ++j)
#pragma unroll
    for (int k = 0; k < 4; ++k) probe = fmaf(sum[j][k], 0.f, probe);
  return probe;  // 0 if all are finite
}

}  // namespace fastconvt::cuda
