// The warpgroups of a heads GEMM's block that multiply: 64 rows from registers, where they are split, by all columns in
// shared memory.
#pragma once

#include "device/barrier.cuh"
#include "device/shared_address.cuh"
#include "device/wgmma.cuh"
#include "heads_gemm_store.cuh"

namespace fastconvt::cuda {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

#define FASTCONVT_SUM(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
// d = a * b + (kAdd ? d : 0), 64 x 8 by 8 x 48 TF32 numbers.
template <bool kAdd>
__device__ __forceinline__ void heads_gemm_multiply(float (&d)[24], const float (&a)[4], uint64_t b) {
  asm volatile(
      "{ .reg .pred add; setp.ne.b32 add, %29, 0; wgmma.mma_async.sync.aligned.m64n48k8.f32.tf32.tf32 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23}, "
      "{%24, %25, %26, %27}, %28, add, 1, 1; }"
      : FASTCONVT_SUM(0), FASTCONVT_SUM(4), FASTCONVT_SUM(8), FASTCONVT_SUM(12), FASTCONVT_SUM(16), FASTCONVT_SUM(20)
      : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])), "r"(__float_as_uint(a[3])),
        "l"(b), "n"(kAdd ? 1 : 0));
}
#undef FASTCONVT_SUM

template <class Traits>
struct HeadsGemmMaker {
  static constexpr bool kStrict = Traits::kStrict, kChannelsLast = Traits::kChannelsLast;
  static constexpr int kPitch = Traits::kPitch, kSumPitch = Traits::kSumPitch;

  const HeadsGemmParams& p;
  unsigned char* shared;
  int warp, lane;

  // Rows g and g + 8 of a warp's product are neighbouring inputs.
  __device__ __forceinline__ int row() const { return warp * 16 + lane / 4 * 2; }

  // Where the lane's inputs of the first tap are in a stage.
  __device__ __forceinline__ int first_input() const {
    const int row = min(this->row(), Traits::kRows - 2), line = row / Traits::kLine;
    const int place =
        (line / Traits::kHeight * (Traits::kHeight + 1) + line % Traits::kHeight) * Traits::kLine + row % Traits::kLine;
    return kChannelsLast ? place * kPitch + lane % 4 * 2 : lane % 4 * kPitch + place;
  }

  // The left operand: two rows, channels c and c + 4 of a lane, for each tap of depth and height.
  __device__ __forceinline__ void load(const float* from, float (&x)[4][4]) const {
#pragma unroll
    for (int tap = 0; tap < 4; ++tap) {
      const int offset = (tap / 2 * (Traits::kHeight + 1) + tap % 2) * Traits::kLine;
      const float* const at = from + offset * (kChannelsLast ? kPitch : 1);
      const float2 v = *reinterpret_cast<const float2*>(at);
      const float2 w = *reinterpret_cast<const float2*>(at + (kChannelsLast ? kPitch : 4 * kPitch));
      x[tap][0] = v.x, x[tap][1] = kChannelsLast ? w.x : v.y;
      x[tap][2] = kChannelsLast ? v.y : w.x, x[tap][3] = w.y;
    }
  }

  // Small products first.
  __device__ __forceinline__ static void multiply(float (&x)[4][4], uint64_t columns, float (&sum)[24]) {
    constexpr int kTap = Traits::kTap / 16, kRests = Traits::kRests / 16;
    float lead[4][4];
#pragma unroll
    for (int tap = 0; tap < 4; ++tap) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        lead[tap][e] = heads_gemm_lead(x[tap][e]);
        if constexpr (kStrict) x[tap][e] = heads_gemm_rest(x[tap][e], lead[tap][e]);
      }
    }
    wgmma_fence();
    if constexpr (kStrict) {
      heads_gemm_multiply<false>(sum, x[0], columns);
      heads_gemm_multiply<true>(sum, lead[0], columns + kRests);
#pragma unroll
      for (int tap = 1; tap < 4; ++tap) {
        heads_gemm_multiply<true>(sum, x[tap], columns + tap * kTap);
        heads_gemm_multiply<true>(sum, lead[tap], columns + tap * kTap + kRests);
      }
      heads_gemm_multiply<true>(sum, lead[0], columns);
    } else {
      heads_gemm_multiply<false>(sum, lead[0], columns);
    }
#pragma unroll
    for (int tap = 1; tap < 4; ++tap) heads_gemm_multiply<true>(sum, lead[tap], columns + tap * kTap);
    wgmma_commit();
    wgmma_wait<0>();
  }

  // Totals to shared memory, begun: to what is there; zeros remain.
  __device__ __forceinline__ void give(float (&total)[24], bool begun) const {
    float* const to = reinterpret_cast<float*>(shared + Traits::kSums) + row() * kSumPitch + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < 24; i += 2) {
      float2* const at = reinterpret_cast<float2*>(to + i / 4 * 8 + i / 2 % 2 * kSumPitch);
      float2 value = make_float2(total[i], total[i + 1]);
      total[i] = total[i + 1] = 0;
      if (row() >= Traits::kRows) continue;
      if (begun) value.x += at->x, value.y += at->y;
      *at = value;
    }
  }

  // The right operand: columns 16 bytes apart, granules of channels kGranule.
  __device__ __forceinline__ static uint64_t columns_at(uint32_t address) {
    return static_cast<uint64_t>((address & 0x3ffff) >> 4) | static_cast<uint64_t>(Traits::kGranule >> 4) << 16 |
           uint64_t{8} << 32;
  }

  __device__ __forceinline__ void run(HeadsGemmBarriers barriers) const {
    float total[24], sum[24];
#pragma unroll
    for (int i = 0; i < 24; ++i) total[i] = 0;
    const unsigned char* const stages = shared + Traits::kStage0;
    const int first = first_input();
    int stage = 0, parity = 0, until = Traits::kFold;
    bool begun = false;
#pragma unroll 1
    for (int left = p.group_in; left > 0; left -= kHeadsGemmChannels) {
      const unsigned char* const at = stages + stage * Traits::kStage;
      mbarrier_wait(barriers.full(stage), parity);
      float x[4][4];
      load(reinterpret_cast<const float*>(at) + first, x);
      multiply(x, columns_at(shared_address(at + Traits::kInputBytes)), sum);
      if (lane == 0) mbarrier_arrive(barriers.empty(stage));
#pragma unroll
      for (int i = 0; i < 24; ++i) total[i] += sum[i];
      if (--until == 0) give(total, begun), begun = true, until = Traits::kFold;
      if (++stage == Traits::kStages) stage = 0, parity ^= 1;
    }
    give(total, begun);
    asm volatile("bar.sync 1, %0;" ::"n"(Traits::kMakers) : "memory");
    heads_gemm_store<Traits>(p, reinterpret_cast<const float*>(shared + Traits::kSums), warp, lane);
  }
};

#endif

}  // namespace fastconvt::cuda
