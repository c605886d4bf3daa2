// The flat GEMM, device side. See core/flat_gemm.h. Blocks are persistent: two warpgroups multiply and store, one or
// two load what all items need.
#pragma once

#include "device/registers.cuh"
#include "flat_gemm_load.cuh"
#include "flat_gemm_store.cuh"

namespace fastconvt::cuda {

// Parts of items that later blocks end: their sums go to the workspace, a slot a block.
__device__ __forceinline__ float4* partial_slot(const FlatGemmParams& p, int block) {
  return reinterpret_cast<float4*>(p.partial) + (block * 64 + threadIdx.x / kFlatGemmGroup * 32) * kFlatGemmGroup +
         threadIdx.x % kFlatGemmGroup;
}
__device__ __forceinline__ void give_partial(const FlatGemmParams& p, const FlatGemmSums (&sum)[2]) {
  const int group = threadIdx.x / kFlatGemmGroup;
  float4* const slot = partial_slot(p, blockIdx.x);
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    const float (&s)[4] = sum[i / 16][i % 16];
    slot[i * kFlatGemmGroup] = {s[0], s[1], s[2], s[3]};
  }
  __threadfence();
  meet_group<kFlatGemmGroup>(1 + group);
  if (threadIdx.x % kFlatGemmGroup == 0) {
    asm volatile("st.release.gpu.global.s32 [%0], 1;" ::"l"(p.flags + blockIdx.x * 2 + group) : "memory");
  }
}
// Adds what the blocks before this one have made of the item: `missing` stages and chunks.
__device__ __forceinline__ void take_partials(const FlatGemmParams& p, int missing, FlatGemmSums (&sum)[2]) {
  const int group = threadIdx.x / kFlatGemmGroup;
  for (int block = blockIdx.x - 1; missing > 0; --block) {
    missing -= FlatGemmSchedule<true>::first_unit(p, block + 1) - FlatGemmSchedule<true>::first_unit(p, block);
    const int* const flag = p.flags + block * 2 + group;
    int ready = 0;
    while (!ready) asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(ready) : "l"(flag) : "memory");
    const float4* const slot = partial_slot(p, block);
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const float4 v = __ldcg(slot + i * kFlatGemmGroup);
      float (&s)[4] = sum[i / 16][i % 16];
      s[0] += v.x, s[1] += v.y, s[2] += v.z, s[3] += v.w;
    }
  }
}

// Makes and stores all items of the block: one of two warpgroups.
template <bool kThree, bool kChannelsLast, bool kSplit, bool kRectify>
__device__ __forceinline__ void multiply_flat_items(const FlatGemmParams& p, unsigned char* shared) {
  const FlatGemmBarriers barriers{shared_address(shared) + p.barriers_at, p.stages};
  const int group = threadIdx.x / kFlatGemmGroup, thread = threadIdx.x % kFlatGemmGroup;
  int64_t* const places = reinterpret_cast<int64_t*>(shared + p.places_at) + group * p.half;
  int place = 0, parity = 0;
  FlatGemmSchedule<kSplit> schedule;
  schedule.begin(p);
  while (schedule.next(p)) {
    meet_group<kFlatGemmGroup>(1 + group);  // everyone has stored the item before
    {
      const FlatGemmItem item = schedule.item(p);
      for (int i = thread; i < p.half; i += kFlatGemmGroup) places[i] = output_place(p, item, group * p.half + i);
    }
    meet_group<kFlatGemmGroup>(1 + group);
    if (!kSplit && schedule.count == 0) {
      store_constants<kChannelsLast>(p, schedule.item(p), places);
      continue;
    }
    FlatGemmSums sum[2] = {};
    uint32_t before = 0;
    const auto release = [&] {
      if (before != 0 && threadIdx.x % 32 == 0) mbarrier_arrive(before);
    };
    int stage = 0, chunk = 0;
    const auto multiply = [&] {
      const FlatGemmTap* const tap = p.tap + p.stage[stage].first_tap;
      const int first_taps = p.stage[stage].taps[0], second_taps = p.pairs ? p.stage[stage].taps[1] : first_taps;
      const FlatGemmTap* const second = p.pairs ? tap + first_taps : tap;
      const uint32_t at = shared_address(shared) + place * p.stage_bytes;
      const uint64_t weights = line_operand(at + p.input_bytes * (kThree ? 2 : 1));
      const uint64_t cells = line_operand(at + group * p.half * 64);
      mbarrier_wait(barriers.full(place), parity);
      if constexpr (kThree) {
        const int rest = p.input_bytes >> 4, skip = p.pairs ? first_taps * (kFlatGemmTapBytes >> 3) : 0;
        if (p.chains) {
          add_unit_chains(sum[0], tap, first_taps, weights, cells, rest);
          add_unit_chains(sum[1], second, second_taps, weights + skip, cells + p.unit * 4, rest);
        } else {
          add_unit_three(sum[0], tap, first_taps, weights, cells, rest);
          add_unit_three(sum[1], second, second_taps, weights + skip, cells + p.unit * 4, rest);
        }
        if (threadIdx.x % 32 == 0) mbarrier_arrive(barriers.empty(place));
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
    };
    if constexpr (kSplit) {
      stage = schedule.from / p.chunks, chunk = schedule.from - stage * p.chunks;
      stage += schedule.item(p).of(p).first_stage;
#pragma unroll 1
      for (int left = schedule.count; left > 0; --left) {
        multiply();
        if (++chunk == p.chunks) chunk = 0, ++stage;
      }
    } else {
      const FlatGemmClass& k = schedule.item(p).of(p);
#pragma unroll 1
      for (stage = k.first_stage; stage < k.first_stage + k.stages; ++stage) {
#pragma unroll 1
        for (chunk = 0; chunk < p.chunks; ++chunk) multiply();
      }
    }
    if constexpr (!kThree) {
      wgmma_wait<0>();
      release();
    }
    if constexpr (kSplit) {
      if (schedule.from + schedule.count < p.units.divisor) {
        give_partial(p, sum);
        continue;
      }
      take_partials(p, schedule.from, sum);
    }
    store_sums<kChannelsLast, !kSplit>(p, schedule.item(p), sum, make_epilogue<float, kRectify>(p.bias, p.rectify),
                                       places, group * p.half, reinterpret_cast<float*>(shared + p.runs_at));
  }
}

template <bool kThree, bool kChannelsLast, bool kSplit, bool kRectify>
__global__ void __launch_bounds__(kFlatGemmThreads<kThree>, 1)
    flat_gemm_kernel(const __grid_constant__ FlatGemmParams p) {
#ifdef FASTCONVT_WGMMA
  extern __shared__ unsigned char unaligned[];
  unsigned char* const shared = unaligned + (-shared_address(unaligned) & 1023);
  if (threadIdx.x == 0) {
    const FlatGemmBarriers barriers{shared_address(shared) + p.barriers_at, p.stages};
    for (int i = 0; i < p.stages; ++i) {
      mbarrier_init(barriers.full(i), kFlatGemmLoaders<kThree> / 32 + 1);
      mbarrier_init(barriers.empty(i), 2 * kFlatGemmGroup / 32);
    }
    fence_shared_writes();
  }
  __syncthreads();
  if (threadIdx.x < 2 * kFlatGemmGroup) {
    raise_registers<kThree ? 216 : kSplit && !kChannelsLast ? 176 : 168>();
    multiply_flat_items<kThree, kChannelsLast, kSplit, kRectify>(p, shared);
  } else {
    lower_registers<kThree ? 72 : kSplit && !kChannelsLast ? 80 : 88>();
    load_items<kThree, kChannelsLast, kSplit>(p, threadIdx.x - 2 * kFlatGemmGroup, shared);
  }
#endif
}

}  // namespace fastconvt::cuda
