// The gradient of the input for layers with few channels a group:
//
//   grad_input[ci, position] = sum over pairs (co, tap) of weight[ci, pair] * grad_output[co, position's place in tap].
//
// A thread has some channels of one or two positions. The weights stay in shared memory, by pair; a chain of 32 pairs
// is added before the next one begins.
#pragma once

#include "device/dependent_launch.cuh"
#include "direct_gradient.cuh"

namespace fastconvt::cuda {

constexpr int kDirectStep = 8;  // pairs whose gradients are loaded together

template <typename T, int kChannels, int kPositions>
class DirectInputGradient {
  using Sums = float[kPositions][kChannels];

  const DirectGradientParams& p;
  const DirectKind kind;
  const int padded;  // pairs, to whole steps
  DirectPair* const pairs;
  float* const weights;  // by pair, channel

 public:
  __device__ DirectInputGradient(const DirectGradientParams& p, unsigned char* shared)
      : p(p),
        kind(p),
        padded((p.pairs + kDirectStep - 1) / kDirectStep * kDirectStep),
        pairs(reinterpret_cast<DirectPair*>(shared)),
        weights(reinterpret_cast<float*>(shared + padded * sizeof(DirectPair))) {}

  __device__ __forceinline__ void run() {
    for (int i = threadIdx.x; i < padded; i += kDirectGradientThreads) {
      pairs[i] = i < p.pairs ? DirectPair::make(p, i, sizeof(T)) : DirectPair::absent();
    }
    wait_for_previous_grid();
    stage_weights();
    __syncthreads();
    // The warp that has a unit's first positions, which often lack taps, is another one each time.
    int thread = threadIdx.x;
#pragma unroll 1
    for (int unit = blockIdx.x; unit < p.units; unit += gridDim.x) {
      make(unit, thread);
      thread = (thread + 32) % kDirectGradientThreads;
    }
    let_next_grid_begin();
  }

 private:
  __device__ __forceinline__ int channels() const { return min(kChannels, p.group_in - kind.channel); }

  __device__ __forceinline__ void stage_weights() const {
    const T* weight = static_cast<const T*>(p.weight) + (kind.group * p.group_in + kind.channel) * int64_t{p.pairs};
    for (int i = threadIdx.x; i < padded; i += kDirectGradientThreads) {
#pragma unroll
      for (int c = 0; c < kChannels; ++c) {
        const bool exists = i < p.pairs && c < channels();
        weights[i * kChannels + c] = exists ? to_accumulator(__ldg(weight + c * p.pairs + i)) : 0;
      }
    }
  }

  __device__ __forceinline__ void make(int unit, int thread) const {
    int rest = unit;
    const int batch = p.by_units(rest);
    const int first = rest * (kDirectGradientThreads * kPositions) + thread;
    DirectPlace place[kPositions];
    uint32_t taps = 0xffffffffu;
#pragma unroll
    for (int i = 0; i < kPositions; ++i) {
      place[i].make(p, first + i * kDirectGradientThreads);
      taps &= place[i].taps;
    }
    const T* from = static_cast<const T*>(p.grad) + batch * p.grad_batch + kind.group * p.group_out * p.grad_channel;
    const unsigned char* base[kPositions];
#pragma unroll
    for (int i = 0; i < kPositions; ++i) base[i] = reinterpret_cast<const unsigned char*>(from + place[i].offset);
    Sums sums = {};
    // Code that runs once is fetched from memory: only groups of few channels have a second loop, without checks.
    if (kChannels == 4 && __all_sync(0xffffffffu, taps == 0xffffffffu)) {
      add<true>(place, base, sums);
    } else {
      add<false>(place, base, sums);
    }
    store(batch, first, sums);
  }

  template <bool kInside>
  __device__ __forceinline__ void add(const DirectPlace (&place)[kPositions],
                                      const unsigned char* const (&base)[kPositions], Sums& sums) const {
#pragma unroll 1
    for (int begin = 0; begin < padded; begin += kDirectGradientChain) {
      Sums part = {};
      const int end = min(padded, begin + static_cast<int>(kDirectGradientChain));
#pragma unroll 1
      for (int n = begin; n < end; n += kDirectStep) {
        float g[kDirectStep][kPositions];
#pragma unroll
        for (int j = 0; j < kDirectStep; ++j) {
          const DirectPair pair = pairs[n + j];
#pragma unroll
          for (int i = 0; i < kPositions; ++i) {
            g[j][i] = kInside || place[i].has(pair.taps) ? direct_load<T>(base[i] + pair.offset) : 0;
          }
        }
#pragma unroll
        for (int j = 0; j < kDirectStep; ++j) {
          const float4* w = reinterpret_cast<const float4*>(weights + (n + j) * kChannels);
#pragma unroll
          for (int c = 0; c < kChannels; c += 4) {
            const float4 four = w[c / 4];
#pragma unroll
            for (int i = 0; i < kPositions; ++i) {
              part[i][c] = fmaf(g[j][i], four.x, part[i][c]);
              part[i][c + 1] = fmaf(g[j][i], four.y, part[i][c + 1]);
              part[i][c + 2] = fmaf(g[j][i], four.z, part[i][c + 2]);
              part[i][c + 3] = fmaf(g[j][i], four.w, part[i][c + 3]);
            }
          }
        }
      }
#pragma unroll
      for (int i = 0; i < kPositions * kChannels; ++i)
        sums[i / kChannels][i % kChannels] += part[i / kChannels][i % kChannels];
    }
  }

  __device__ __forceinline__ void store(int batch, int first, const Sums& sums) const {
    T* to =
        static_cast<T*>(p.output) + batch * p.input_batch + (kind.group * p.group_in + kind.channel) * p.input_channel;
#pragma unroll
    for (int i = 0; i < kPositions; ++i) {
      const int position = first + i * kDirectGradientThreads;
      if (position >= p.positions) continue;
      bool finite = true;
      T* target = to + position;
#pragma unroll
      for (int c = 0; c < kChannels; ++c, target += p.input_channel) {
        if (c >= channels()) break;
        *target = from_accumulator<T>(sums[i][c]);
        finite &= is_finite(sums[i][c]);
      }
      if (!finite) repair(p, batch, position);
    }
  }

  // Makes what is not finite again, by the definition, where infinity and NaN meet only what they should.
  static __device__ __noinline__ void repair(const DirectGradientParams& p, int batch, int position) {
    const DirectKind kind(p);
    DirectPlace place;
    place.make(p, position);
    const T* from =
        static_cast<const T*>(p.grad) + batch * p.grad_batch + kind.group * p.group_out * p.grad_channel + place.offset;
    for (int c = kind.channel; c < min(kind.channel + kChannels, p.group_in); ++c) {
      T* to = static_cast<T*>(p.output) + batch * p.input_batch + (kind.group * p.group_in + c) * p.input_channel +
              position;
      if (is_finite(to_accumulator(*to))) continue;
      const T* weight = static_cast<const T*>(p.weight) + (kind.group * p.group_in + c) * int64_t{p.pairs};
      double sum = 0;
      for (int n = 0; n < p.pairs; ++n) {
        const DirectPair pair = DirectPair::make(p, n, sizeof(T));
        if (!place.has(pair.taps)) continue;
        const float g = direct_load<T>(reinterpret_cast<const unsigned char*>(from) + pair.offset);
        sum += static_cast<double>(g) * to_accumulator(weight[n]);
      }
      *to = from_accumulator<T>(static_cast<float>(sum));
    }
  }
};

template <typename T, int kChannels, int kPositions>
__global__ void __launch_bounds__(kDirectGradientThreads)
    direct_input_gradient_kernel(const __grid_constant__ DirectGradientParams p) {
  extern __shared__ __align__(16) unsigned char shared[];
  DirectInputGradient<T, kChannels, kPositions>(p, shared).run();
}

}  // namespace fastconvt::cuda
