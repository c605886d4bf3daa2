// The gradients of a channel's weights and bias where its blocks are a cluster: each has summed a part, and they read
// each other's shared memory.
#pragma once

#include "depthwise_gradients_repair.cuh"
#include "device/cluster.cuh"
#include "device/shared_address.cuh"

namespace fastconvt::cuda {

// In shared memory are rows of kThreads: kSums times a block's sums of a tap of each class, then its sum of the bias.
// All threads of the cluster call it; `finite` tells whether their block's sums are, and tap_of(i) the tap of the i-th
// sum of a thread's class.
template <class Traits, typename TapOf>
__device__ __forceinline__ void add_sums_of_cluster(const DepthwiseGradientsParams& p,
                                                    const DepthwiseWeightParams& whole, const DepthwiseBlock& own,
                                                    float* sums, bool finite, const TapOf& tap_of) {
  using T = typename Traits::T;
  constexpr int kThreads = Traits::kThreads, kWarps = kThreads / 32, kSums = Traits::kSums;
  constexpr int kFlag = (kSums + 1) * kThreads - 1;  // at the end of the bias's row
  const int number = static_cast<int>(threadIdx.x), lane = number % 32, own_class = lane % Traits::kClasses;
  const int rank = own.split;
  const int64_t filter = own.channel * (p.weight_elements / p.channels);
  const uint32_t first = shared_address(sums);
  if (number == 0) sums[kFlag] = finite ? 0.f : 1.f;
  meet_cluster();
  // A row is a warp's, whose lanes share the blocks.
#pragma unroll 1
  for (int i = number / 32 * p.splits + rank; i <= kSums; i += kWarps * p.splits) {
    const int at = i * kThreads + (i < kSums ? own_class : 0);
    double sum = 0;
    for (int block = lane / Traits::kClasses; block < p.splits; block += 32 / Traits::kClasses) {
      sum += load_cluster(cluster_address(first + at * 4, block));
    }
#pragma unroll
    for (int apart = 16; apart >= Traits::kClasses; apart /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, apart);
    if (lane >= (i < kSums ? Traits::kClasses : 1)) continue;
    const T result = from_accumulator<T>(static_cast<float>(sum));
    if (i == kSums) {
      if (whole.grad_bias != nullptr) static_cast<T*>(whole.grad_bias)[own.channel] = result;
    } else if (const int tap = tap_of(i); tap >= 0 && whole.output != nullptr) {
      static_cast<T*>(whole.output)[filter + tap] = result;
    }
  }
  const bool repeats = rank == 0 && number < p.splits && load_cluster(cluster_address(first + kFlag * 4, number)) != 0;
  meet_cluster();  // all has been read, and written
  if (rank == 0 && __syncthreads_or(repeats))
    repair_sums<T, kThreads>(whole, own.channel, reinterpret_cast<double*>(sums));
}

}  // namespace fastconvt::cuda
