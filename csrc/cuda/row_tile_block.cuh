// Which part of the problem a block of the row-tile kernels makes, and its way into shared memory.
#pragma once

#include "device/bulk.cuh"
#include "row_tile.h"

namespace fastconvt::cuda {

template <int index>
struct RowTileTraits {
  static constexpr int kKernel = kRowShapes[index].kernel;
  static constexpr int kStride = kRowShapes[index].stride;
  static constexpr int kDilation = kRowShapes[index].dilation;
  // Tap t is of phase t * d mod s and reads the input at base - entry(t).
  FASTCONVT_HOST_DEVICE static constexpr int phase(int t) { return t * kDilation % kStride; }
  FASTCONVT_HOST_DEVICE static constexpr int entry(int t) { return t * kDilation / kStride; }
  static constexpr int kMaxEntry = (kKernel - 1) * kDilation / kStride;

  // A thread owns 4 channels of kChunks columns, 32 apart: lanes are neighbouring columns.
  static constexpr int kChunks = kRowColumns / 32;
  static constexpr int kTail = static_cast<int>(row_tail_columns(kStride));
  static constexpr int kBlocks = 3;  // of a multiprocessor

  static constexpr int kInputPitch = (kRowColumns + kMaxEntry + 3 + kTail + 3) / 4 * 4;
  // Staged outputs of a channel: up to 31 constants, the outputs, and constants up to the end of a 128-byte line.
  static constexpr int kOutputPitch = (31 + kStride * (kRowColumns + kTail) + 31) / 32 * 32;
  static constexpr int kOutputs = 4 * kRowTileWarps * kOutputPitch;
};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

constexpr int kLine = 32, kVector = 4;  // floats

// How far an address is behind the start of its line or vector, in floats.
__device__ inline int offset_in(const float* pointer, int floats) {
  return static_cast<int>(reinterpret_cast<uintptr_t>(pointer) / 4) & (floats - 1);
}
// How far before the end of the one that it is in, 0 at a start.
__device__ inline int missing_in(const float* pointer, int floats) {
  return -offset_in(pointer, floats) & (floats - 1);
}

// The taps of a data row, and a division by their number.
struct RowTileTaps : RowTaps {
  float inverse;  // of count

  __device__ static RowTileTaps make(const RowTileParams& p, int row) {
    const RowTaps taps = RowTaps::make(p, row);
    return {taps, __fdividef(1.0f, static_cast<float>(taps.count))};
  }

  // n / count, and n becomes the remainder. What n + 0.5 is off stays below 0.5 / count for n < 2^20.
  __device__ int divide(int& n) const {
    const int quotient = static_cast<int>((static_cast<float>(n) + 0.5f) * inverse);
    n -= quotient * count;
    return quotient;
  }
};

// What all threads of a block agree on.
struct RowTileBlock {
  int batch, group, quad;  // first group of the block, first quad of that group
  int groups;
  int segment, row;         // data row
  int base, columns, tail;  // base of column 0, bases, bases beyond kRowColumns

  __device__ static RowTileBlock make(const RowTileParams& p) {
    RowTileBlock b;
    b.row = blockIdx.x, b.segment = 0, b.batch = blockIdx.z;
    if (p.segments > 1) {
      b.segment = b.row;
      b.row = p.by_segment(b.segment);
    }
    b.group = blockIdx.y, b.quad = 0;
    if (p.quad_blocks > 1) {
      b.quad = b.group;
      b.group = p.by_quad_block(b.quad);
      b.quad *= p.block_quads;
    }
    b.group *= p.block_groups;
    b.groups = min(p.block_groups, p.groups - b.group);
    b.base = p.first_base + b.segment * kRowColumns;
    const int left = p.bases - b.segment * kRowColumns;
    b.columns = min(left, kRowColumns);
    b.tail = b.segment == p.segments - 1 ? left - b.columns : 0;
    return b;
  }

  // Staged columns start here, where a vector can.
  template <class Traits>
  __device__ int first_column() const {
    return (base - Traits::kMaxEntry) & ~3;
  }

  __device__ int output_begin(const RowTileParams& p, int stride) const { return max(0, base * stride - p.padding); }

  template <class Traits>
  __device__ bool reads_outside(const RowTileParams& p, int column) const {
    return base + column < Traits::kMaxEntry || base + column >= p.in_width;
  }

  // The block's share of `count` constants.
  __device__ void share(const RowTileParams& p, float*& to, int& count) const {
    if (p.segments == 1) return;
    const int share = (count / p.segments + kLine) & -kLine, begin = min(share * segment, count);
    to += begin;
    count = min(count - begin, share);
  }
};

// Keeps the compiler from taking an address apart again, and adding it up anew at each use.
__device__ inline const float* whole(const float* pointer) {
  asm volatile("" : "+l"(pointer));
  return pointer;
}

// Rows begin .. end - 1 of the pairs (input channel, tap) of the block.
template <class Traits>
__device__ inline void stage_inputs(const RowTileParams& p, const RowTileBlock& b, const RowTileTaps& taps, int begin,
                                    int end, float* tile, uint64_t policy) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int first = b.first_column<Traits>(), last = b.base + b.columns + b.tail;
  const int low = min(max(first, 0), last), high = max(min(last, p.in_width), low);  // columns that exist
  const int at = low + (p.vector_input ? 4 * lane : lane), left = high - at;
  // Fewer than 32 columns do not exist: a lane clears one.
  const int before = low - first;
  const bool clears = lane < before + last - high;
  float* cleared = tile + warp * Traits::kInputPitch + (lane < before ? lane : high - first + lane - before);
  float* target = tile + warp * Traits::kInputPitch + at - first;
  const float* const image =
      whole(p.input + b.batch * p.input_batch + static_cast<int64_t>(b.group * p.in_channels) * p.input_channel +
            static_cast<int64_t>(taps.input_row) * p.in_width + at);
  constexpr int kStep = kRowTileWarps * Traits::kInputPitch;
#pragma unroll 1
  for (int row = begin + warp; row < end; row += 32 * kRowTileWarps) {
    // Where a lane's row is; the lanes' rows then come in turn.
    int tap = row + kRowTileWarps * lane;
    const int channel = taps.divide(tap), offset = channel * p.input_channel - tap * p.tap_step;
    const int rows = min(32, (end - row + kRowTileWarps - 1) / kRowTileWarps);
    if (p.vector_input) {
#pragma unroll 1
      for (int i = 0; i < rows; ++i, target += kStep, cleared += kStep) {
        const float* const source = image + __shfl_sync(~0u, offset, i);
        if (left > 0) copy_16_async(target, source, policy);
        if (left > 128) copy_16_async(target + 128, source + 128, policy);
        if (left > 256) copy_16_async(target + 256, source + 256, policy);
        if (clears) *cleared = 0;
      }
    } else {
#pragma unroll 1
      for (int i = 0; i < rows; ++i, target += kStep, cleared += kStep) {
        const float* const source = image + __shfl_sync(~0u, offset, i);
#pragma unroll 1
        for (int j = 0; j < left; j += 32) copy_4_async(target + j, source + j);
        if (clears) *cleared = 0;
      }
    }
  }
}

// One warp's weights of rows begin .. end - 1, transposed to [row][tap of the last axis][4 channels]; the last of fewer
// than 4 channels is repeated.
template <class Traits>
__device__ inline void stage_weights(const RowTileParams& p, const RowTileTaps& taps, int begin, int end,
                                     const float* source, int channels, float* slab) {
  constexpr int kBatch = 4;  // vectors on their way
  const int lane = threadIdx.x % 32, last = (end - begin) * Traits::kKernel - 1;
  const int step = p.by_row_phase.divisor * Traits::kKernel;
  source += taps.first * Traits::kKernel;
  const float* const sources[4] = {whole(source), whole(source + min(channels - 1, 1) * p.weight_filter),
                                   whole(source + min(channels - 1, 2) * p.weight_filter),
                                   whole(source + min(channels - 1, 3) * p.weight_filter)};
#pragma unroll 1
  for (int at = lane; at <= last; at += 32 * kBatch) {
    float4 batch[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int item = min(at + 32 * i, last), row = item / Traits::kKernel, t = item - row * Traits::kKernel;
      int tap = begin + row;
      const int channel = taps.divide(tap), offset = channel * p.weight_channel + tap * step + t;
      batch[i] = float4{__ldg(sources[0] + offset), __ldg(sources[1] + offset), __ldg(sources[2] + offset),
                        __ldg(sources[3] + offset)};
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (at + 32 * i <= last) reinterpret_cast<float4*>(slab)[at + 32 * i] = batch[i];
    }
  }
}

// The first 64 blocks of a burst fetch what the next burst reads: blocks read the input in the order of memory.
__device__ inline void prefetch_inputs(const RowTileParams& p, int warp, int lane) {
  constexpr int kFetchers = 64;
  if (p.burst_blocks == 0 || warp != kRowTileWarps - 1) return;
  int index = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  const int burst = p.by_burst(index);
  if (index >= kFetchers) return;
  const uint64_t policy = evict_last_policy();
  const int share = (p.burst_bytes / (kFetchers * 32) + 15) & -16;
  const int64_t first = -reinterpret_cast<int64_t>(p.input) & 15;
  for (int next = burst == 0 ? 0 : burst + 1; next <= burst + 1; ++next) {
    const int64_t at = first + static_cast<int64_t>(next) * p.burst_bytes + (index * 32 + lane) * share;
    const int64_t bytes = min(static_cast<int64_t>(share), p.input_bytes - at) & -16;
    if (bytes > 0) prefetch_bulk(reinterpret_cast<const char*>(p.input) + at, static_cast<int>(bytes), policy);
  }
}

// Staged outputs of a channel of a group that read outside the input, again by the definition. By value: what a slow
// path could address would not stay in registers.
template <class Traits>
__device__ __noinline__ void edges_by_definition(const RowTileParams& p, RowTileBlock b, RowTileTaps taps, int group,
                                                 int channel, float* staged) {
  const int origin = b.base * Traits::kStride - p.padding, begin = b.output_begin(p, Traits::kStride);
  const int end = min(p.out_width, origin + b.columns * Traits::kStride);
  const int64_t input_channel = static_cast<int64_t>(group) * p.in_channels;
#pragma unroll 1
  for (int output = begin + threadIdx.x % 32; output < end; output += 32) {
    if (!b.reads_outside<Traits>(p, (output - origin) / Traits::kStride)) continue;
    float sum = p.bias == nullptr ? 0 : p.bias[static_cast<int64_t>(group) * p.out_channels + channel];
#pragma unroll 1
    for (int i = 0; i < p.in_channels * taps.count; ++i) {
      int tap = i;
      const int64_t c = input_channel + taps.divide(tap);
      const float* const x = p.input + b.batch * p.input_batch + c * p.input_channel +
                             static_cast<int64_t>(taps.input_row) * p.in_width - static_cast<int64_t>(tap) * p.tap_step;
      const float* const w = p.weight + c * p.weight_channel + static_cast<int64_t>(channel) * p.weight_filter +
                             (taps.first + tap * p.by_row_phase.divisor) * Traits::kKernel;
#pragma unroll 1
      for (int t = 0; t < Traits::kKernel; ++t) {
        const int at = output + p.padding - t * Traits::kDilation, column = at / Traits::kStride;
        if (at >= 0 && at % Traits::kStride == 0 && column < p.in_width) sum = fmaf(w[t], x[column], sum);
      }
    }
    staged[output - begin] = p.rectify(sum);
  }
}

#endif

}  // namespace fastconvt::cuda
