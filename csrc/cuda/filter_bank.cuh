// 1D transposed convolution with long kernels and large strides (csrc/core/filter_bank.h) on the matrix units of
// compute capability 9.0. Feeders stage inputs once for all taps and rows of a block; makers read weights as they lie
// in memory.
#pragma once

#include "device/cluster.cuh"
#include "filter_bank_stage.cuh"
#include "filter_bank_store.cuh"
#include "filter_bank_weights.cuh"

namespace fastconvt::cuda {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

template <class Traits>
class FilterBankMaker {
  using T = typename Traits::Element;
  static constexpr bool kThree = Traits::kThree;
  static constexpr int kColumns = Traits::kColumns, kSums = kColumns / 2;
  static constexpr int kPart = kFilterBankSums / 4 / Traits::kMakers;  // sums of a lane that are added at a time
  static constexpr int kAhead = FilterBankWeights<Traits>::kWords == 8 ? 2 : 4;  // steps
  static constexpr int kHeld = kThree ? 4 : 2;  // operands of steps: two in flight, or also the next ones
  static constexpr int kRun = 8;                // steps after which float32 adds

  const FilterBankParams& p;
  const FilterBankBlock& block;
  const int lane, group, first_row;
  // The products' sums; in float32 of a run, of all small products, and of all runs.
  float sum[kSums], small[kThree ? kSums : 1], total[kThree ? kSums : 1];

 public:
  __device__ FilterBankMaker(const FilterBankParams& p, const FilterBankBlock& block, int tile)
      : p(p),
        block(block),
        lane(threadIdx.x % 32),
        group(__shfl_sync(0xffffffffu, threadIdx.x / 128, 0)),
        first_row(block.row + tile * Traits::kRows + (kThree ? threadIdx.x / 32 : threadIdx.x / 32 % 4) * 16) {}

  __device__ __forceinline__ void run(FilterBankBarriers barriers, uint32_t stages) {
    FilterBankWeights<Traits> weights(p, block.group, first_row, block.first_stage + (kThree ? 0 : group), lane);
    typename FilterBankWeights<Traits>::Words raw[kAhead];
    uint32_t whole[kHeld][4], rest[kThree ? kHeld : 1][4];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) weights.load(raw[i]);
#pragma unroll
    for (int i = 0; i < kSums; ++i) sum[i] = 0;
    if constexpr (kThree) {
#pragma unroll
      for (int i = 0; i < kSums; ++i) small[i] = 0, total[i] = 0;
    }
    // The groups add their runs at different times, so that one multiplies meanwhile.
    const int adds[2] = {group, 1 - group};  // whether steps 0 and kRun / 2 go on with a run
    int slot = kThree ? 0 : group, parity = 0;
    uint32_t ended = 0;  // the barrier of the stage before
#pragma unroll 1
    for (int stage = block.first_stage + slot; stage < block.end_stage; stage += Traits::kStageStep) {
      const int chunks = min(kFilterBankChunks, p.chunks - stage * kFilterBankChunks);
      uint64_t columns = filter_bank_columns(stages + slot * p.stage_bytes + (p.taps - 1 + p.lead) * 16, p.pitch);
      int tap = 0;
      mbarrier_wait(barriers.full(slot), parity);
#pragma unroll 1
      for (int left = chunks * p.taps; left > 0; left -= kRun) {
#pragma unroll
        for (int i = 0; i < kRun; ++i) {
          if (kHeld == 2) wgmma_wait<1>();
          weights.arrange(raw[i % kAhead], whole[i % kHeld], rest[kThree ? i % kHeld : 0]);
          weights.load(raw[i % kAhead]);
          if (kHeld > 2) wgmma_wait<1>();
          if (i == 2 && ended != 0) {
            if (lane == 0) mbarrier_arrive(ended);
            ended = 0;
          }
          multiply(whole[i % kHeld], rest[kThree ? i % kHeld : 0], columns, i % (kRun / 2) == 0 ? adds[i != 0] : 1);
          --columns;
          if (++tap == p.taps) tap = 0, columns += p.pitch / 8 + p.taps;
          if constexpr (kThree) {
            if (i % (kRun / 2) == kRun / 2 - 1 && adds[i == kRun / 2 - 1] == 0) add_run();
          }
        }
      }
      ended = barriers.empty(slot);
      slot += Traits::kStageStep;
      if (slot >= p.slots) slot -= p.slots, parity ^= 1;
    }
    wgmma_wait<0>();
    if constexpr (kThree) {
      if (group == 1) add_run();
    }
    finish(stages + p.sums);
  }

 private:
  __device__ __forceinline__ void multiply(const uint32_t (&whole)[4], const uint32_t (&rest)[4], uint64_t columns,
                                           int add) {
    wgmma_fence();
    if constexpr (kThree) {
      filter_bank_multiply<T, kColumns>(small, rest, columns, 1);
      filter_bank_multiply<T, kColumns>(small, whole, columns + kFilterBankChunks * 2 * (p.pitch / 16), 1);
      filter_bank_multiply<T, kColumns>(sum, whole, columns, add);
    } else {
      filter_bank_multiply<T, kColumns>(sum, whole, columns, 1);
    }
    wgmma_commit();
  }

  // The unit truncates where it adds, and float32 sums of many runs would round alike: what a total leaves goes to the
  // small ones.
  __device__ __forceinline__ void add_run() {
    wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      const float next = total[i] + sum[i];
      small[i] += sum[i] - (next - total[i]);
      total[i] = next;
    }
  }

  // Adds the sums of groups and blocks that shared the tile's stages, in their order, and stores them.
  __device__ __forceinline__ void finish(uint32_t sums) {
    const FilterBankOutputs<Traits> outputs(p, block, first_row, lane);
    if constexpr (kThree) {
#pragma unroll
      for (int i = 0; i < kSums; ++i) sum[i] = total[i] + small[i];
      join<0>(sums, outputs);
    } else {
      join<0>(sums, outputs);
      join<kPart>(sums, outputs);
    }
  }
  // Some of a lane's sums by way of shared memory, where nothing else is read any more.
  template <int kFirst>
  __device__ __forceinline__ void join(uint32_t sums, const FilterBankOutputs<Traits>& outputs) {
    meet(kFirst > 0);
    const uint32_t place = sums + (group * kPart * 128 + threadIdx.x % 128) * 4;
#pragma unroll
    for (int i = 0; i < kPart; ++i) {
      asm volatile("st.shared.f32 [%0], %1;" ::"r"(place + i * 512), "f"(sum[kFirst + i]) : "memory");
    }
    meet(true);
    // Float32: a group's own rows. Else half of the columns, from both groups.
    constexpr int kShare = kPart / Traits::kStageStep / 4;
    const int first = kThree ? 0 : group * kShare;
    const uint32_t from = sums + (kThree ? group * kPart * 512 : 0) + threadIdx.x % 128 * 4;
    if (block.splits == 1) {
#pragma unroll 1
      for (int j = first; j < first + kShare; ++j) {
        float four[4] = {};
        add<false>(four, from + j * 2048);
        outputs.store(four, kFirst * 2 + j * 8 + lane % 4 * 2);
      }
    } else {
#pragma unroll 1
      for (int j = first + block.rank; j < first + kShare; j += block.splits) {
        float four[4] = {};
#pragma unroll 1
        for (int rank = 0; rank < block.splits; ++rank) add<true>(four, cluster_address(from + j * 2048, rank));
        outputs.store(four, kFirst * 2 + j * 8 + lane % 4 * 2);
      }
    }
  }
  // One block's, of both groups if they shared the stages.
  template <bool kCluster>
  __device__ __forceinline__ static void add(float (&four)[4], uint32_t from) {
#pragma unroll
    for (int part = 0; part < Traits::kStageStep; ++part) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t place = from + part * kPart * 512 + i * 512;
        float value;
        if constexpr (kCluster) {
          value = load_cluster(place);
        } else {
          asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(place) : "memory");
        }
        four[i] += value;
      }
    }
  }
  // All makers, of all blocks that share the tile if `all`.
  __device__ __forceinline__ void meet(bool all) const {
    if (all && block.splits > 1) {
      meet_cluster();
    } else {
      asm volatile("bar.sync 1, %0;" ::"n"(Traits::kMakers) : "memory");
    }
  }
};

// A block's share of the weight on its way to the L2 cache.
__device__ __forceinline__ void filter_bank_prefetch(const FilterBankParams& p) {
  if (blockIdx.x >= p.prefetchers) return;
  const uint64_t from = reinterpret_cast<uint64_t>(p.weight), end = (from + p.weight_bytes) / 16 * 16;
  const uint64_t share = (p.weight_bytes / p.prefetchers + 16) / 16 * 16,
                 start = (from + 15) / 16 * 16 + blockIdx.x * share;
  if (start >= end) return;
  const uint32_t bytes = static_cast<uint32_t>(min(min(share, end - start), uint64_t{65536}));
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(start), "r"(bytes) : "memory");
}

#endif

template <class Traits>
__global__ void __launch_bounds__(Traits::kMakers + Traits::kFeeders, 1)
    filter_bank_kernel(const __grid_constant__ FilterBankParams p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(128) unsigned char filter_bank_shared[];
  const FilterBankBarriers barriers{shared_address(filter_bank_shared)};
  const uint32_t stages = barriers.address + kFilterBankBarriers;
  if (threadIdx.x == 0) {
    for (int i = 0; i < p.slots; ++i) {
      mbarrier_init(barriers.full(i), Traits::kFeeders);
      mbarrier_init(barriers.empty(i), Traits::kThree ? Traits::kMakers / 32 : 4);
    }
    fence_shared_writes();
    filter_bank_prefetch(p);
  }
  const FilterBankBlock block(p, Traits::kRows, Traits::kColumns);
  __syncthreads();
  if (threadIdx.x < Traits::kMakers) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Traits::kMakerRegisters));
#pragma unroll 1
    for (int tile = 0; tile < p.loops && block.row + tile * Traits::kRows < p.rows; ++tile) {
      FilterBankMaker<Traits>(p, block, tile).run(barriers, stages);
    }
    if (block.splits > 1) meet_cluster();  // the others may still read
  } else {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Traits::kFeederRegisters));
    FilterBankFeeder<Traits>(p, block, threadIdx.x - Traits::kMakers, stages + p.slots * p.stage_bytes)
        .run(barriers, stages);
  }
#endif
}

}  // namespace fastconvt::cuda
