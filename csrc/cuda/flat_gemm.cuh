// The flat GEMM, device side. See core/flat_gemm.h. Blocks are persistent: two warpgroups load what all items need,
// two multiply and store.
#pragma once

#include "flat_gemm_load.cuh"
#include "flat_gemm_store.cuh"
#include "phase_gemm.cuh"

namespace fastconvt::cuda {

// Makes and stores all items of the block: one of two warpgroups.
template <bool kThree, bool kChannelsLast>
__device__ __forceinline__ void multiply_flat_items(const FlatGemmParams& p, unsigned char* shared) {
  const FlatGemmBarriers barriers{shared_address(shared) + p.barriers_at, p.stages};
  const int group = threadIdx.x / kFlatGemmGroup, thread = threadIdx.x % kFlatGemmGroup;
  int64_t* const places = reinterpret_cast<int64_t*>(shared + p.places_at) + group * p.half;
  int place = 0, parity = 0;
  for (int index = blockIdx.x; index < p.items; index += gridDim.x) {
    const FlatGemmItem item = find_item(p, index);
    const FlatGemmClass& k = item.of(p);
    meet_group<kFlatGemmGroup>(1 + group);  // everyone has stored the item before
    for (int i = thread; i < p.half; i += kFlatGemmGroup) places[i] = output_place(p, item, group * p.half + i);
    meet_group<kFlatGemmGroup>(1 + group);
    if (k.stages == 0) {
      store_constants<kChannelsLast>(p, item, places);
      continue;
    }
    FlatGemmSums sum[2] = {};
    uint32_t before = 0;
    const auto release = [&] {
      if (before != 0 && threadIdx.x % 32 == 0) barrier_arrive(before);
    };
#pragma unroll 1
    for (int s = k.first_stage; s < k.first_stage + k.stages; ++s) {
      const FlatGemmTap* const tap = p.tap + p.stage[s].first_tap;
      const int first_taps = p.stage[s].taps[0], second_taps = p.pairs ? p.stage[s].taps[1] : first_taps;
      const FlatGemmTap* const second = p.pairs ? tap + first_taps : tap;
#pragma unroll 1
      for (int chunk = 0; chunk < p.chunks; ++chunk) {
        const uint32_t at = shared_address(shared) + place * p.stage_bytes;
        const uint64_t weights = line_operand(at + p.input_bytes * (kThree ? 2 : 1));
        const uint64_t cells = line_operand(at + group * p.half * 64);
        barrier_wait(barriers.full(place), parity);
        if constexpr (kThree) {
          const int rest = p.input_bytes >> 4, skip = p.pairs ? first_taps * (kFlatGemmTapBytes >> 3) : 0;
          add_unit_three(sum[0], tap, first_taps, weights, cells, rest);
          add_unit_three(sum[1], second, second_taps, weights + skip, cells + p.unit * 4, rest);
          if (threadIdx.x % 32 == 0) barrier_arrive(barriers.empty(place));
        } else {
          const int skip = p.pairs ? first_taps * (kFlatGemmTapBytes >> 4) : 0;
          add_unit(sum[0], tap, first_taps, weights, cells);
          add_unit(sum[1], second, second_taps, weights + skip, cells + p.unit * 4);
          // All but the stage's last tap have ended, so the stage before is free.
          wgmma_wait<1>();
          release();
          before = barriers.empty(place);
        }
        if (++place == p.stages) place = 0, parity ^= 1;
      }
    }
    if constexpr (!kThree) {
      wgmma_wait<0>();
      release();
    }
    store_sums<kChannelsLast>(p, item, sum, places, group * p.half, reinterpret_cast<float*>(shared + p.runs_at));
  }
}

template <bool kThree, bool kChannelsLast>
__global__ void __launch_bounds__(kFlatGemmThreads<kThree>, 1)
    flat_gemm_kernel(const __grid_constant__ FlatGemmParams p) {
#ifdef FASTCONVT_PHASE_GEMM
  extern __shared__ unsigned char unaligned[];
  unsigned char* const shared = unaligned + (-shared_address(unaligned) & 1023);
  if (threadIdx.x == 0) {
    const FlatGemmBarriers barriers{shared_address(shared) + p.barriers_at, p.stages};
    for (int i = 0; i < p.stages; ++i) {
      barrier_init(barriers.full(i), kFlatGemmLoaders<kThree> / 32 + 1);
      barrier_init(barriers.empty(i), 2 * kFlatGemmGroup / 32);
    }
    fence_barriers();
  }
  __syncthreads();
  if (threadIdx.x < 2 * kFlatGemmGroup) {
    take_registers<kThree ? 216 : 168>();
    multiply_flat_items<kThree, kChannelsLast>(p, shared);
  } else {
    give_registers<kThree ? 72 : 88>();
    load_items<kThree, kChannelsLast>(p, threadIdx.x - 2 * kFlatGemmGroup, shared);
  }
#endif
}

}  // namespace fastconvt::cuda
