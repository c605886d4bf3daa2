// The filter bank's left operands: weights straight from memory to registers, some steps ahead.
#pragma once

#include "filter_bank_product.cuh"

namespace fastconvt::cuda {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// A lane's two rows, which stand side by side, eight apart in the product. Steps go through the taps, then the
// channels.
template <class Traits>
class FilterBankWeights {
  using T = typename Traits::Element;
  using Raw = std::conditional_t<sizeof(T) == 4, uint32_t, uint16_t>;
  static constexpr int kStage = kFilterBankChunks * Traits::kStepChannels;  // channels

  const FilterBankParams& p;
  const Raw* at;  // of the lane's first row and channel in the next step
  int second;     // from the first row to the second one
  int taps[2];    // of the rows
  int channel, tap = 0, chunk = 0;
  int64_t next_channels;  // from the last tap to the next step's first one

 public:
  // Registers of a step: 16 bits that are no pairs stand alone.
  static constexpr int kWords = Traits::kPairs || sizeof(T) == 4 ? 4 : 8;
  using Words = uint32_t[kWords];

  // first_row: of the warp, in the group.
  __device__ FilterBankWeights(const FilterBankParams& p, int group, int first_row, int first_stage, int lane) : p(p) {
    int offset[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = first_row + lane / 4 * 2 + i;
      int phase = row;
      const int out_channel = p.by_stride(phase);
      offset[i] = out_channel * p.kernel + phase;
      taps[i] = row < p.rows && phase < p.kernel ? (p.kernel - phase - 1) / p.stride + 1 : 0;
    }
    second = offset[1] - offset[0];
    channel = first_stage * kStage + lane % 4 * (sizeof(T) == 4 ? 1 : 2);
    at = static_cast<const Raw*>(p.weight) + (static_cast<int64_t>(group) * p.group_in + channel) * p.weight_channel +
         offset[0];
    next_channels = Traits::kStepChannels * p.weight_channel - static_cast<int64_t>(p.taps - 1) * p.stride;
  }

  // The next step's.
  __device__ __forceinline__ void load(Words& raw) {
    constexpr int kChannels[4] = {0, sizeof(T) == 4 ? 4 : 1, 8, 9};
#pragma unroll
    for (int j = 0; j < (sizeof(T) == 4 ? 2 : 4); ++j) {
      const Raw* const from = at + kChannels[j] * p.weight_channel;
      const bool channel_exists = channel + kChannels[j] < p.group_in;
      const bool exists[2] = {channel_exists && tap < taps[0], channel_exists && tap < taps[1]};
      if constexpr (!Traits::kPairs) {
        raw[2 * j] = exists[0] ? __ldg(from) : 0u;
        raw[2 * j + 1] = exists[1] ? __ldg(from + second) : 0u;
      } else if constexpr (sizeof(T) == 4) {
        uint2 both{};
        if (exists[0]) both = __ldg(reinterpret_cast<const uint2*>(from));
        raw[2 * j] = both.x, raw[2 * j + 1] = both.y;
      } else {
        raw[j] = exists[0] ? __ldg(reinterpret_cast<const uint32_t*>(from)) : 0u;
      }
    }
    advance();
  }

  // As the product takes them.
  __device__ __forceinline__ static void arrange(const Words& raw, uint32_t (&whole)[4], uint32_t (&rest)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (Traits::kThree) {
        whole[i] = filter_bank_split(raw[i], rest[i]);
      } else if constexpr (sizeof(T) == 4) {
        whole[i] = filter_bank_round(raw[i]);
      } else if constexpr (Traits::kPairs) {
        whole[i] = __byte_perm(raw[i / 2 * 2], raw[i / 2 * 2 + 1], i % 2 == 0 ? 0x5410 : 0x7632);
      } else {
        whole[i] = __byte_perm(raw[i / 2 * 4 + i % 2], raw[i / 2 * 4 + i % 2 + 2], 0x5410);
      }
    }
  }

 private:
  __device__ __forceinline__ void advance() {
    ++tap;
    const bool last = tap == p.taps;
    int64_t step = last ? next_channels : p.stride;
    if (last) tap = 0, channel += Traits::kStepChannels;
    if constexpr (Traits::kStageStep > 1) {
      chunk += last;
      if (chunk == kFilterBankChunks) chunk = 0, step += kStage * p.weight_channel, channel += kStage;
    }
    at += step;
  }
};

#endif

}  // namespace fastconvt::cuda
