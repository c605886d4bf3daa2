// The warpgroup of a heads GEMM's block that copies inputs to stages, and splits weights on their way to them.
#pragma once

#include "device/barrier.cuh"
#include "device/copy_groups.cuh"
#include "device/shared_address.cuh"
#include "heads_gemm_params.cuh"

namespace fastconvt::cuda {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// All weights on their way to the L2 cache, a block's share each.
__device__ __forceinline__ void heads_gemm_prefetch(const HeadsGemmParams& p) {
  const uint64_t begin = (reinterpret_cast<uint64_t>(p.weight) + 15) / 16 * 16;
  const uint64_t end = reinterpret_cast<uint64_t>(p.weight + p.weights) / 16 * 16;
  const uint32_t share = (static_cast<uint32_t>(p.weights) / gridDim.x + 4) / 4 * 16;
  const uint64_t start = begin + static_cast<uint64_t>(blockIdx.x) * share;
  if (start >= end) return;
  const uint32_t bytes = static_cast<uint32_t>(min(uint64_t{share}, end - start));
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(start), "r"(bytes) : "memory");
}

// For every input that the block holds, its position in the tensor; -1: nowhere.
template <class Traits>
__device__ __forceinline__ void heads_gemm_places(const HeadsGemmParams& p, int* places) {
  const HeadsGemmBlock block(p);
  for (int i = threadIdx.x; i < Traits::kHeld; i += Traits::kThreads) {
    const int line = i / Traits::kLine,
              at[3] = {line / (Traits::kHeight + 1), line % (Traits::kHeight + 1), i % Traits::kLine};
    bool exists = true;
    int position = 0;
#pragma unroll
    for (int a = 0; a < 3; ++a) {
      const int x = p.axis[a].first + block.cell[a] + at[a];
      exists = exists && static_cast<unsigned>(x) < static_cast<unsigned>(p.axis[a].in);
      position = position * p.axis[a].in + x;
    }
    places[i] = exists ? position : -1;
  }
}

template <class Traits>
struct HeadsGemmFeeder {
  static constexpr bool kStrict = Traits::kStrict, kChannelsLast = Traits::kChannelsLast;
  static constexpr int kVector = Traits::kVector, kPitch = Traits::kPitch;

  const HeadsGemmParams& p;
  unsigned char* shared;
  int thread;

  // A thread has a column, for all output channels, and one of two granules: four channels.
  struct Column {
    int target;  // in a stage
    int offset;  // of its tap in the weights; -1: there is none
  };
  __device__ __forceinline__ Column column() const {
    const int depth = thread >> 2 & 1, height = thread >> 1 & 1, width = thread & 1;  // phases
    const int by_depth = thread >> 5 & 1, by_height = thread >> 4 & 1, by_width = thread >> 3 & 1;
    const int tap[3] = {depth + 2 - 2 * by_depth, height + 2 - 2 * by_height, width + 2 - 2 * by_width};
    int offset = 0;
    bool exists = true;
#pragma unroll
    for (int a = 0; a < 3; ++a) {
      exists = exists && tap[a] < p.axis[a].kernel;
      offset = offset * p.axis[a].kernel + tap[a];
    }
    const int index = by_width * (Traits::kColumns / 2) + depth * 4 + height * 2 + width;
    return {
        Traits::kInputBytes + (by_depth * 2 + by_height) * Traits::kTap + thread / 64 * Traits::kGranule + index * 16,
        exists ? offset * p.weight_tap : -1};
  }
  // Channel e of the thread's granule: in channels_last a lane that multiplies reads two neighbours.
  __device__ __forceinline__ int channel(int e) const {
    return kChannelsLast ? 2 * e + thread / 64 : 4 * (thread / 64) + e;
  }

  __device__ __forceinline__ void load_weights(const float* weight, int offset, int left,
                                               float (&raw)[kHeadsGemmOut][4]) const {
    // Of which the compiler knows nothing: addresses are made again rather than kept in registers.
    int pitch = p.weight_channel, next = p.weight_out;
    asm volatile("" : "+r"(pitch), "+r"(next));
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const bool exists = offset >= 0 && channel(e) < left;
      const float* const source = weight + channel(e) * pitch + offset;
#pragma unroll
      for (int m = 0; m < kHeadsGemmOut; ++m) {
        raw[m][e] = exists && m < p.group_out ? __ldg(source + m * next) : 0.f;
      }
    }
  }
  __device__ __forceinline__ void store_weights(unsigned char* target, const float (&raw)[kHeadsGemmOut][4]) const {
#pragma unroll
    for (int m = 0; m < kHeadsGemmOut; ++m) {
      float4 lead, rest;
      lead.x = heads_gemm_lead(raw[m][0]), rest.x = heads_gemm_rest(raw[m][0], lead.x);
      lead.y = heads_gemm_lead(raw[m][1]), rest.y = heads_gemm_rest(raw[m][1], lead.y);
      lead.z = heads_gemm_lead(raw[m][2]), rest.z = heads_gemm_rest(raw[m][2], lead.z);
      lead.w = heads_gemm_lead(raw[m][3]), rest.w = heads_gemm_rest(raw[m][3], lead.w);
      *reinterpret_cast<float4*>(target + m * 128) = lead;
      if constexpr (kStrict) *reinterpret_cast<float4*>(target + m * 128 + Traits::kRests) = rest;
    }
  }

  __device__ __forceinline__ void copy_inputs(const float* input, int left, uint32_t target) const {
    const int* const places = reinterpret_cast<const int*>(shared + Traits::kPlaces);
    if constexpr (kChannelsLast) {
      constexpr int kParts = kHeadsGemmChannels / kVector;
      const int part = thread % kParts * kVector;
#pragma unroll 1
      for (int i = thread / kParts; i < Traits::kHeld; i += Traits::kFeeders / kParts) {
        const int place = places[i];
        const bool exists = place >= 0 && part < left;
        copy_or_zero<kVector * 4>(target + (i * kPitch + part) * 4,
                                  exists ? input + place * p.in.axis[2] + part : p.input, exists);
      }
    } else {
#pragma unroll 1
      for (int i = thread * kVector; i < Traits::kHeld; i += Traits::kFeeders * kVector) {
        const int place = places[i];
        const float* source = input + max(place, 0);
#pragma unroll
        for (int c = 0; c < kHeadsGemmChannels; ++c) {
          const bool exists = place >= 0 && c < left;
          copy_or_zero<kVector * 4>(target + (c * kPitch + i) * 4, exists ? source : p.input, exists);
          source += p.in.channel;
        }
      }
    }
  }

  __device__ __forceinline__ void run(HeadsGemmBarriers barriers) const {
    const HeadsGemmBlock block(p);
    const float* input = block.input(p);
    const float* weight = block.weight(p);
    const Column to = column();
    int stage = 0, parity = 1;
#pragma unroll 1
    for (int left = p.group_in; left > 0; left -= kHeadsGemmChannels) {
      float raw[kHeadsGemmOut][4];
      load_weights(weight, to.offset, left, raw);
      mbarrier_wait(barriers.empty(stage), parity);
      unsigned char* const target = shared + Traits::kStage0 + stage * Traits::kStage;
      copy_inputs(input, left, shared_address(target));
      mbarrier_arrive_after_copies(barriers.full(stage));
      store_weights(target + to.target, raw);
      fence_shared_writes();
      mbarrier_arrive(barriers.full(stage));
      input += kHeadsGemmChannels * p.in.channel;
      weight += kHeadsGemmChannels * p.weight_channel;
      if (++stage == Traits::kStages) stage = 0, parity ^= 1;
    }
  }
};

#endif

}  // namespace fastconvt::cuda
