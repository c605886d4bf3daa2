// The bias's gradient beside the weight's: the sum of the output's gradient by channel. Where each output is one
// position's in exactly one of a few taps (heads_bias_by_pairs), it is a sum of operands that the products have anyway;
// elsewhere it is summed from the staged boxes.
#pragma once

#include "heads_gradient.cuh"

namespace fastconvt::cuda {

// Of two elements of 16 bits side by side.
template <typename T>
__device__ __forceinline__ float sum_of_halves(uint32_t word) {
  if constexpr (std::is_same_v<T, __half>) {
    const __half2 pair = *reinterpret_cast<const __half2*>(&word);
    return __low2float(pair) + __high2float(pair);
  } else {
    return __uint_as_float(word << 16) + __uint_as_float(word & 0xffff0000u);
  }
}

// A lane's four positions of a chunk that are positions of the box; 16 bits: as masks of two operands of two.
template <typename T>
struct HeadsMask {
  bool exists[4];
  uint32_t word[2];

  // The box ends `left` positions after the chunk's begin.
  __device__ void make(int left, int column) {
#pragma unroll
    for (int i = 0; i < 4; ++i) exists[i] = (sizeof(T) == 4 ? 4 * i + column : i / 2 * 8 + 2 * column + i % 2) < left;
#pragma unroll
    for (int i = 0; i < 2; ++i) word[i] = (exists[2 * i] ? 0xffffu : 0) | (exists[2 * i + 1] ? 0xffff0000u : 0);
  }
};

template <typename T>
class HeadsBias {
  const HeadsGradientParams& p;
  double* const sums;  // by item and lane
  const HeadsKind& kind;
  const bool by_boxes;

 public:
  __device__ HeadsBias(const HeadsGradientParams& p, unsigned char* shared, const HeadsKind& kind)
      : p(p),
        sums(reinterpret_cast<double*>(shared + p.bias_sums)),
        kind(kind),
        by_boxes(p.bias_partial != nullptr && !p.bias_by_pairs && kind.channel == 0 && kind.pair == 0) {}

  __device__ void clear() const {
    for (int i = threadIdx.x; i < p.bias_items * 32; i += kHeadsGradientThreads) sums[i] = 0;
  }

  // Adds the outputs that belong to the box, those before that of the next one.
  __device__ __forceinline__ void add(const HeadsBox& box, const T* grads) const {
    if (!by_boxes) return;
    int begin[3], end[3];
#pragma unroll
    for (int a = 0; a < 3; ++a) {
      const HeadsGradientAxis& axis = p.axis[a];
      const int origin = box.first[a] * axis.stride - axis.padding;
      const bool last = box.first[a] + axis.box >= axis.in;
      begin[a] = max(0, -origin);
      end[a] = last ? axis.out - origin : min(axis.box * axis.stride, axis.out - origin);
    }
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll 1
    for (int item = warp; item < p.bias_items; item += kHeadsGradientWarps) {
      const Lane own(p, item, lane);
      double sum = 0;  // by rows: equal terms of float32 round alike
      for (int d = begin[0]; d < end[0]; ++d) {
#pragma unroll 1
        for (int h = begin[1] + own.part; h < end[1]; h += p.bias_parts) {
          float row = 0;
          const T* from =
              grads + ((own.plane * p.axis[0].grads + d) * p.axis[1].grads + h) * p.row_pitch + p.lead + own.channel;
#pragma unroll 4
          for (int w = begin[2] + own.first; w < end[2]; w += own.step) row += to_accumulator(from[w * p.column]);
          sum += row;
        }
      }
      if (own.exists) sums[item * 32 + lane] += sum;
    }
  }

  // After everyone has met.
  __device__ __forceinline__ void store() const {
    for (int channel = threadIdx.x; channel < p.group_out; channel += kHeadsGradientThreads) {
      double sum = 0;
      const int chunks = p.by_bias_chunks.divisor, chunk = p.channels_last ? channel / 32 : channel;
      const int channels = p.channels_last ? min(32, p.group_out - chunk * 32) : 1;
      for (int part = 0; part < p.bias_parts; ++part) {
        for (int i = p.channels_last ? channel % 32 : 0; i < 32 / channels * channels; i += channels) {
          sum += sums[(part * chunks + chunk) * 32 + i];
        }
      }
      put(channel, static_cast<float>(sum));
    }
  }

  // From the sums of this block's pairs by `warps` warps, `pitch` apart, each with that of a pair at place(pair).
  template <typename Place>
  __device__ __forceinline__ void store_pairs(const float* pair_sums, int pitch, int warps, int pairs,
                                              Place place) const {
    const int taps = p.pairs / p.group_out;
    for (int channel = threadIdx.x; channel < p.group_out; channel += kHeadsGradientThreads) {
      float sum = 0;
      const int begin = max(0, channel * taps - kind.pair), end = min(pairs, (channel + 1) * taps - kind.pair);
      for (int pair = begin; pair < end; ++pair) {
        int rest = kind.pair + pair - channel * taps;
        bool counts = true;
#pragma unroll
        for (int a = 2; a >= 0; --a) {
          int tap = rest;
          rest = p.axis[a].by_kernel(tap);
          counts = counts && static_cast<unsigned>(tap - p.axis[a].padding) < p.axis[a].stride;
        }
        if (!counts) continue;
        for (int w = 0; w < warps; ++w) sum += pair_sums[w * pitch + place(pair)];
      }
      put(channel, sum);
    }
  }

 private:
  __device__ void put(int channel, float sum) const {
    int pair_chunk = blockIdx.y;
    p.by_pair_chunks(pair_chunk);
    const int64_t line = static_cast<int64_t>(blockIdx.x) * (p.bias_by_pairs ? p.by_pair_chunks.divisor : 1);
    p.bias_partial[(line + (p.bias_by_pairs ? pair_chunk : 0)) * p.out_channels + kind.group * p.group_out + channel] =
        sum;
  }

  // What a lane sums of an item: contiguous, each 32nd place of an output channel; channels_last, of up to 32 channels.
  struct Lane {
    int part, plane, channel, first, step;
    bool exists;

    __device__ Lane(const HeadsGradientParams& p, int item, int lane) {
      int chunk = item;
      part = p.by_bias_chunks(chunk);
      plane = p.channels_last ? 0 : chunk;
      channel = p.channels_last ? chunk * 32 : 0;
      first = lane, step = 32;
      exists = true;
      if (!p.channels_last) return;
      const int channels = min(32, p.group_out - channel);
      channel += lane % channels;
      first = lane / channels;
      step = 32 / channels;
      exists = first < step;
      if (!exists) first = 1 << 30;
    }
  };
};

}  // namespace fastconvt::cuda
