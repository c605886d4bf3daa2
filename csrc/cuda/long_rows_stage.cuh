// Long rows: what is in shared memory before the products, and outputs by the definition.
#pragma once

#include "long_rows_params.cuh"

namespace fastconvt::cuda {

// The weights of a block's channels as the lanes need them, [channel block][step][tap][TF32 term][lane], and the bias.
template <class Role>
__device__ void stage_long_rows_channels(const Role& role) {
  using Traits = typename Role::Of;
  using T = typename Traits::Element;
  constexpr int kKernel = Traits::kKernel, kTerms = Traits::kSplit ? 2 : 1;
  const LongRowsParams& p = role.p;
  LongRowsLeft<T>* const weights = role.weights();
  const int count = p.tile.blocks * p.tile.steps * kKernel * 32;
#pragma unroll 4
  for (int i = threadIdx.x; i < count; i += kLongRowsThreads) {
    const int lane = i % 32, tap = i / 32 % kKernel, of = i / 32 / kKernel;
    const int index = of / p.tile.steps, step = of - index * p.tile.steps;
    LongRowsBlock block = role.first_block();
    for (int j = 0; j < index; ++j) role.advance(block);
    const T* const weight =
        static_cast<const T*>(p.weight) + static_cast<int64_t>(block.group) * p.in_channels * p.group_out * kKernel;
    // Without a branch, which would wait for what it loads.
    const auto load = [&](int mma_row, int in) {
      in += step * Traits::kStep;
      int out = block.first + mma_row, in_of_group = in;
      bool exists = out < p.out_channels && in < p.in_channels;
      exists = p.by_group_out(out) == p.by_group_in(in_of_group) && exists;
      const int64_t offset = (static_cast<int64_t>(in) * p.group_out + out) * kKernel + tap;
      const T value = __ldg(weight + (exists ? offset : 0));
      return exists ? value : from_accumulator<T>(0.f);
    };
    LongRowsLeft<T>* const to = weights + (i / 32 * kTerms) * 32 + lane;
    if constexpr (Traits::kSplit) {
      make_split_left(lane / 4, lane % 4, load, to[0].part[0], to[32].part[0]);
    } else {
#pragma unroll
      for (int part = 0; part < 4 / static_cast<int>(sizeof(T)); ++part) {
        to->part[part] =
            make_left<T>(lane / 4, lane % 4, [&](int mma_row, int in) { return load(mma_row, in + 8 * part); });
      }
    }
  }
  const BiasEpilogue<T> epilogue{static_cast<const T*>(p.bias)};
  for (int i = threadIdx.x; i < p.tile.blocks * kLongRowsChannels; i += kLongRowsThreads) {
    LongRowsBlock block = role.first_block();
    for (int j = 0; j < i / kLongRowsChannels; ++j) role.advance(block);
    const int channel = i % kLongRowsChannels;
    role.terms()[i] =
        channel < block.channels ? epilogue.channel_term(block.group * p.out_channels + block.first + channel) : 0.f;
  }
}

// One output from global memory, without the bias: only taps and inputs that exist are multiplied. In float64, since
// large finite products must not overflow on the way.
template <class Traits>
__device__ double long_rows_sum_by_definition(const LongRowsParams& p, int batch, const LongRowsBlock& block,
                                              int channel, int o) {
  using T = typename Traits::Element;
  channel += block.first;
  const int of = channel / p.group_out, first = of * p.group_in;  // of the merged groups, and its first channel
  const T* const weight =
      static_cast<const T*>(p.weight) +
      Traits::kKernel * (static_cast<int64_t>(block.group) * p.in_channels * p.group_out + channel - of * p.group_out);
  const T* const input = static_cast<const T*>(p.input) + batch * p.in.batch +
                         static_cast<int64_t>(block.group) * p.in_channels * p.in.channel;
  double sum = 0;
  for (int t = 0; t < Traits::kKernel; ++t) {
    const int x = o + p.padding - t * Traits::kDilation;
    if (x < 0 || x % Traits::kStride != 0 || x / Traits::kStride >= p.in_width) continue;
#pragma unroll 1
    for (int c = first; c < first + p.group_in; ++c) {
      const T value = input[c * p.in.channel + x / Traits::kStride];
      const T w = weight[static_cast<int64_t>(c) * p.group_out * Traits::kKernel + t];
      sum = fma(static_cast<double>(to_accumulator(value)), static_cast<double>(to_accumulator(w)), sum);
    }
  }
  return sum;
}

// A strip of a channel block; output 0 of channel 0 stands at `origin`, counted in elements, position 0 is output
// `first`, and the strip begins at position `begin`.
template <class Traits>
__device__ __noinline__ void stage_long_rows_by_definition(const LongRowsParams& p, int batch, LongRowsBlock block,
                                                           uint32_t origin, int first, int begin, const float* terms,
                                                           typename Traits::Element* stage) {
  using T = typename Traits::Element;
  constexpr int kPositions = kLongRowsStrip * Traits::kStride;
#pragma unroll 1
  for (int i = threadIdx.x % 32; i < block.channels * kPositions; i += 32) {
    const int channel = i / kPositions, position = i % kPositions + begin, o = first + position;
    if (o < 0 || o >= p.out_width) continue;
    const double sum = long_rows_sum_by_definition<Traits>(p, batch, block, channel, o) + terms[channel];
    const uint32_t at = origin + channel * static_cast<uint32_t>(p.out.channel) + static_cast<uint32_t>(first);
    stage[channel * p.tile.output_pitch + long_rows_skew(at, Traits::kSector) + position] =
        from_accumulator<T>(p.rectify(static_cast<float>(sum)));
  }
}

}  // namespace fastconvt::cuda
