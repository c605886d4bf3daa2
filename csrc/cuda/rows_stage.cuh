// Which part of the problem a block of the row kernels makes, and its way into shared memory.
#pragma once

#include "device/bulk.cuh"
#include "device/copy.cuh"
#include "rows_params.h"

namespace fastconvt::cuda {

template <int index, bool kWhole_>
struct RowsTraits {
  // Taps and channels are staged at once, nothing is beyond the columns: the common case, in less code.
  static constexpr bool kWhole = kWhole_;
  static constexpr int kKernel = kRowShapes[index].kernel;
  static constexpr int kStride = kRowShapes[index].stride;
  static constexpr int kDilation = kRowShapes[index].dilation;
  // Tap t is of phase t * d mod s and reads the input at base - entry(t).
  FASTCONVT_HOST_DEVICE static constexpr int phase(int t) { return t * kDilation % kStride; }
  FASTCONVT_HOST_DEVICE static constexpr int entry(int t) { return t * kDilation / kStride; }
  FASTCONVT_HOST_DEVICE static constexpr bool has_taps(int r) {
    for (int t = 0; t < kKernel; ++t) {
      if (phase(t) == r) return true;
    }
    return false;
  }
  static constexpr int kMaxEntry = (kKernel - 1) * kDilation / kStride;
  // The taps of one phase are kTapStep apart and read inputs kEntryStep apart.
  static constexpr int kGcd = std::gcd(kStride, kDilation);
  static constexpr int kTapStep = kStride / kGcd;
  static constexpr int kEntryStep = kDilation / kGcd;
  static constexpr int kMaxTaps = (kKernel + kTapStep - 1) / kTapStep;

  // A thread owns 4 channels of kChunks columns. Four lanes are the channel quads of a pixel, so that a warp stores
  // whole sectors; its pixels are neighbours.
  static constexpr int kChunks = 8;
  static constexpr int kColumns = kRowColumns;
  static constexpr int kColumnStep = 8;
  static constexpr int kTail = row_tail_columns(kStride);

  // Staged inputs: rows of kInputPitch pixels of kPixelPitch floats, which keeps the pixels of a warp in different
  // banks.
  static constexpr int kInputPitch = round_up(kColumns + kMaxEntry + 3 + kTail, 4);
  static constexpr int kPixelChannels = 8;
  static constexpr int kPixelPitch = 12;
  static constexpr int kInputSlot = kInputPitch * kPixelPitch;
  // Staged weights of a (tap, input channel, quad): kernel x 4 channels. Quads stand in different banks.
  static constexpr int kQuadPitch = 4 * kKernel + (kKernel % 4 == 0 ? 4 : 0);

  static constexpr int kConstants = kStride * kColumns;  // floats from which constant outputs are stored
};

// What all threads of a block agree on.
struct RowsBlock {
  int batch, group, quad;  // first group of the block, first quad of that group
  int segment, channel_block;
  int row;                  // data row
  int channels;             // of all groups of the block
  int base, columns, tail;  // base of column 0, bases, bases beyond kColumns

  template <class Traits>
  __device__ static RowsBlock make(const RowsParams& p, int index) {
    RowsBlock b;
    int rest = p.by_segment(index);
    b.segment = index;
    b.row = p.by_channel_block(rest);
    b.channel_block = rest;
    b.batch = p.by_row(b.row);
    b.quad = b.channel_block;
    b.group = p.by_quad_block(b.quad) * p.block_groups;
    b.quad *= p.block_quads;
    b.channels = min(p.block_groups, p.groups - b.group) * p.in_channels;
    b.base = p.first_base + b.segment * Traits::kColumns;
    const int left = p.bases - b.segment * Traits::kColumns;
    b.columns = min(left, Traits::kColumns);
    b.tail = b.segment == p.segments - 1 ? left - b.columns : 0;
    return b;
  }

  // Channel quads of the block in use: `slot` 0 .. kRowsQuads - 1.
  __device__ static void place(const RowsParams& p, int slot, int& group, int& quad) {
    group = p.block_quads == 1 ? slot : p.block_quads == 2 ? slot / 2 : 0;
    quad = slot - group * p.block_quads;
  }
  __device__ bool channel_exists(const RowsParams& p, int group, int quad, int c) const {
    return group < min(p.block_groups, p.groups - this->group) && quad < p.block_quads &&
           4 * (this->quad + quad) + c < p.out_channels;
  }
  __device__ int64_t first_channel(const RowsParams& p, int group, int quad) const {
    return static_cast<int64_t>(this->group + group) * p.out_channels + 4 * (this->quad + quad);
  }
  __device__ float bias(const RowsParams& p, int group, int quad, int c) const {
    const bool exists = p.bias != nullptr && channel_exists(p, group, quad, c);
    return exists ? __ldg(p.bias + first_channel(p, group, quad) + c) : 0.0f;
  }
  // Where the data row of a channel starts.
  __device__ float* row_of(const RowsParams& p, int64_t channel) const {
    const int output_row = p.first_row + row * p.row_step;
    return p.output + batch * p.output_stride.batch + output_row * p.output_stride.axis[1] + channel;
  }
};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

// Input columns `first` .. end - 1 are staged; those in low .. high - 1 exist.
struct RowsColumns {
  int first, end, low, high;

  template <class Traits>
  __device__ static RowsColumns make(const RowsParams& p, const RowsBlock& b) {
    RowsColumns c;
    c.first = b.base - Traits::kMaxEntry;
    c.end = b.base + b.columns + b.tail;
    c.low = min(max(c.first, 0), c.end);
    c.high = max(min(c.end, p.in_width), c.low);
    return c;
  }
};

// One input row of `channels` channels; `input` is that of the first one. The channels of a pixel stay neighbours.
template <class Traits>
__device__ inline void stage_pixels(const RowsParams& p, const RowsColumns& columns, int channels, const float* input,
                                    float* slot, uint64_t policy) {
  const bool vector = p.vector_input && channels % 4 == 0;
  const int lanes = vector ? channels / 4 : 8;  // of a pixel: 1 or 2 with vectors
  const int shift = vector ? lanes - 1 : 3;
  const int thread = threadIdx.x, step = kRowsThreads >> shift;
  const int c = (thread & (lanes - 1)) * (vector ? 4 : 1);
  if (c >= channels) return;
  int i = columns.first + (thread >> shift);
  float* pixel = slot + c + (i - columns.first) * Traits::kPixelPitch;
  const float* source = input + c + i * p.input_stride.axis[2];
#pragma unroll 2
  for (; i < columns.end; i += step, pixel += step * Traits::kPixelPitch, source += step * p.input_stride.axis[2]) {
    const bool exists = i >= columns.low && i < columns.high;
    if (vector && exists) {
      copy_16_async(pixel, source, policy);
    } else if (vector) {
      *reinterpret_cast<float4*>(pixel) = float4{0, 0, 0, 0};
    } else if (exists) {
      copy_4_async(pixel, source);
    } else {
      *pixel = 0;
    }
  }
}

// Stages weights, transposed to [channel][quad][tap of the last axis][4 channels]. A thread keeps to one output
// channel.
template <class Traits>
struct RowsWeightStager {
  static constexpr int kStep = kRowsThreads / 16;  // channels

  const float* source;  // of the thread's first input channel
  int target, first;    // its place in a slot, the channel
  bool stages, exists;

  __device__ RowsWeightStager(const RowsParams& p, const RowsBlock& b) {
    const int place = threadIdx.x % 16, quad = place / 4, output_channel = 4 * b.quad + place;
    first = threadIdx.x / 16;
    stages = quad < p.block_quads;
    exists = output_channel < p.out_channels;
    source = p.weight + (static_cast<int64_t>(b.group) * p.in_channels + first) * p.weight_channel +
             static_cast<int64_t>(output_channel) * p.weight_filter;
    target = (first * p.block_quads + quad) * Traits::kQuadPitch + place % 4;
  }

  // Tap `tap` of the height, `channels` input channels, the block's `channel` on.
  __device__ void stage(const RowsParams& p, int tap, int channel, int channels, float* slot) const {
    if (!stages) return;
    const float* from = source + channel * p.weight_channel + tap * Traits::kKernel;
    float* to = slot + target;
#pragma unroll 1
    for (int c = first; c < channels; c += kStep) {
      if (exists) {
#pragma unroll
        for (int k = 0; k < Traits::kKernel; ++k) copy_4_async(to + 4 * k, from + k);
      } else {
#pragma unroll
        for (int k = 0; k < Traits::kKernel; ++k) to[4 * k] = 0;
      }
      from += kStep * p.weight_channel;
      to += kStep * p.block_quads * Traits::kQuadPitch;
    }
  }
};

#endif

}  // namespace fastconvt::cuda
