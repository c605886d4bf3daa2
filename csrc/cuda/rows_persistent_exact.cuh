// The persistent row family: outputs by the definition.
#pragma once

#include "rows_persistent_params.cuh"

namespace fastconvt::cuda {

// One output from global memory, without the bias: only taps and inputs that exist are multiplied. In float64, since
// large finite products must not overflow on the way.
template <class Traits>
__device__ double sum_by_definition(const RowsPersistentParams& p,
                                    const RowsPersistentItem<typename Traits::Element>& item, int base, int phase,
                                    int channel, int o) {
  using T = typename Traits::Element;
  const int64_t taps = static_cast<int64_t>(p.height_kernel) * Traits::kKernel;
  int block = item.block;
  const int group = p.by_channel_blocks(block);
  channel += block * kRowsMmaChannels;
  const int of = channel / p.group_out, first = of * p.group_in;  // of the merged groups, and its first channel
  const T* const weight =
      static_cast<const T*>(p.weight) +
      taps * (static_cast<int64_t>(group) * p.in_channels * p.group_out + channel - of * p.group_out);
  double sum = 0;
  int y = base - p.phase[phase].back;
  for (int tap = p.phase[phase].first_tap; tap < p.height_kernel; tap += p.tap_step, y -= p.back_step) {
    if (!has_input_row(p, y)) continue;
    for (int t = 0; t < Traits::kKernel; ++t) {
      const int x = o + p.padding - t * Traits::kDilation;
      if (x < 0 || x % Traits::kStride != 0 || x / Traits::kStride >= p.in_width) continue;
#pragma unroll 1
      for (int c = first; c < first + p.group_in; ++c) {
        const T value = item.input[c * p.in.channel + y * p.in.axis[1] + x / Traits::kStride];
        const T w = weight[c * p.group_out * taps + tap * Traits::kKernel + t];
        sum = fma(static_cast<double>(to_accumulator(value)), static_cast<double>(to_accumulator(w)), sum);
      }
    }
  }
  return sum;
}

// A warp's strip of an output row. `y` is the row's, `strip` the first position; a channel is staged where `staged`
// says: its position 0, without its misalignment.
template <class Traits>
__device__ __noinline__ void stage_by_definition(const RowsPersistentParams& p,
                                                 const RowsPersistentItem<typename Traits::Element> item, int base,
                                                 int phase, int strip, const float* terms,
                                                 typename Traits::Element* staged) {
  using T = typename Traits::Element;
  constexpr int kPositions = 8 * Traits::kTiles * Traits::kStride;
#pragma unroll 1
  for (int i = threadIdx.x % 32; i < item.channels * kPositions; i += 32) {
    const int channel = i / kPositions, position = i % kPositions + strip;
    const int o = item.column * Traits::kStride - p.padding + position;
    if (o < 0 || o >= p.out_width) continue;
    const double sum = sum_by_definition<Traits>(p, item, base, phase, channel, o) + terms[channel];
    const int y = base * p.height_stride + phase - p.height_padding;
    const T* const origin = item.output + channel * p.out.channel + y * p.out.axis[1] + o - position;
    staged[channel * p.tile.output_pitch + misalignment(origin, Traits::kSector) + position] =
        from_accumulator<T>(p.rectify(static_cast<float>(sum)));
  }
}

}  // namespace fastconvt::cuda
