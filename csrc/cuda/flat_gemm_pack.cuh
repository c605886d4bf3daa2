// Brings weights into the order and the swizzled lines in which the flat GEMM's blocks copy them.
#pragma once

#include "device/tf32.cuh"
#include "flat_gemm_load.cuh"

namespace fastconvt::cuda {

constexpr int kFlatGemmPackThreads = 256;
constexpr int kFlatGemmPackChannels = 16;  // output channels of a block, at most
constexpr int kFlatGemmPackBatch = 8;      // loads in flight

struct FlatGemmPackParams {
  FastDivide chunks, columns;  // columns: blocks along the output channels of a group
  FastDivide lines, taps;      // elements of an input channel, and of a pair of channels
  int channels;                // output channels of a block: a divisor of 16
  int stages;
};

// A row of the matrix unit's 16 makes which of 16 channels: a thread that holds rows g and g + 8 gets neighbours.
__device__ __forceinline__ int row_of_channel(int channel) { return channel / 2 % 8 + channel % 2 * 8; }

// A block turns 16 input channels by some output channels by all taps.
template <bool kThree>
__global__ void __launch_bounds__(kFlatGemmPackThreads)
    flat_gemm_pack_kernel(const __grid_constant__ FlatGemmParams p, const __grid_constant__ FlatGemmPackParams q) {
  extern __shared__ float staged[];
  __shared__ short2 order[kFlatGemmMaxTaps];
  let_next_grid_begin();
  if (p.split && blockIdx.x == 0) {
    for (int i = threadIdx.x; i < 2 * kFlatGemmMaxBlocks; i += kFlatGemmPackThreads) p.flags[i] = 0;
  }
  constexpr int kTapBytes = kFlatGemmTapBytes * (kThree ? 2 : 1);
  int column = blockIdx.x;
  int chunk = q.columns(column);
  const int group = q.chunks(chunk);
  const int first = column * q.channels, channels = min(q.channels, p.group_out - first);
  const int line = p.taps | 1, pitch = q.channels * line + 4;  // banks apart
  const int run = channels > 0 ? channels * p.taps : 0, all = kFlatGemmChannels * q.channels * p.taps;
  const float* const from =
      p.weight +
      ((static_cast<int64_t>(group) * p.group_in + chunk * kFlatGemmChannels) * p.group_out + first) * p.taps;
  for (int begin = threadIdx.x; begin < all; begin += kFlatGemmPackBatch * kFlatGemmPackThreads) {
    float x[kFlatGemmPackBatch];
    int place[kFlatGemmPackBatch];
#pragma unroll
    for (int b = 0; b < kFlatGemmPackBatch; ++b) {
      const int i = begin + b * kFlatGemmPackThreads;
      int at = i;
      const int c = q.lines(at);
      int tap = at;
      const int channel = q.taps(tap);
      const bool exists = i < all && at < run && chunk * kFlatGemmChannels + c < p.group_in;
      x[b] = exists ? __ldg(from + static_cast<int64_t>(c) * p.group_out * p.taps + at) : 0.f;
      place[b] = i < all ? c * pitch + channel * line + tap : -1;
    }
#pragma unroll
    for (int b = 0; b < kFlatGemmPackBatch; ++b) {
      if (place[b] >= 0) staged[place[b]] = x[b];
    }
  }
  // For every tap in order: the first tap of its stage, and how many there are.
  for (int entry = threadIdx.x; entry < p.taps; entry += kFlatGemmPackThreads) {
    int low = 0, high = q.stages;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (p.stage[middle].first_tap <= entry ? low : high) = middle;
    }
    order[entry] = {p.stage[low].first_tap, static_cast<short>(p.stage[low].taps[0] + p.stage[low].taps[1])};
  }
  __syncthreads();
  unsigned char* const to = p.packed + static_cast<int64_t>(group * p.channel_blocks.divisor + first / kFlatGemmRows) *
                                           p.chunks * p.taps * kTapBytes;
  for (int i = threadIdx.x; i < 4 * q.channels * p.taps; i += kFlatGemmPackThreads) {
    const int granule = i % 4, channel = i / 4 % q.channels, entry = i / 4 / q.channels;
    const int before = order[entry].x, taps = order[entry].y;
    float x[4];
#pragma unroll
    for (int c = 0; c < 4; ++c) x[c] = staged[(granule * 4 + c) * pitch + channel * line + p.tap[entry].tap];
    const int of_block = first % kFlatGemmRows + channel;
    const int row = of_block / 16 * 16 + row_of_channel(of_block % 16);
    unsigned char* const place = to +
                                 (static_cast<int64_t>(before) * p.chunks + chunk * taps + entry - before) * kTapBytes +
                                 granule_address(row, granule);
    uint32_t high[4], low[4];
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      high[c] = rounded_tf32(__float_as_uint(x[c]));
      low[c] = rounded_tf32(__float_as_uint(x[c] - __uint_as_float(high[c])));
    }
    *reinterpret_cast<uint4*>(place) = {high[0], high[1], high[2], high[3]};
    if constexpr (kThree) {
      *reinterpret_cast<uint4*>(place + kFlatGemmTapBytes) = {low[0], low[1], low[2], low[3]};
    }
  }
}

}  // namespace fastconvt::cuda
