// Brings weights, and contiguous inputs, into the layout that the phase GEMM's copies read.
#pragma once

#include "device/tf32.cuh"
#include "phase_pack.cuh"
#include "phase_tf32_store.cuh"

namespace fastconvt::cuda {

constexpr int kPhaseTf32PackThreads = 256;
constexpr int kPhaseTf32PackColumns = 64;

struct PhaseTf32PackParams {
  int64_t weight_blocks;    // of the grid; the others pack inputs
  int weight_columns;       // of blocks: 64 pairs of an output channel and a tap each
  int columns, blocks;      // output channels of a unit, and units of a group
  int64_t position_blocks;  // of a batch entry
  int channel_blocks;
  int image;            // positions of a batch entry
  int padded_channels;  // of a group
  int all_channels;     // of all groups
};

// Which column of a unit makes a channel. Channels-last: a lane, which has columns 2 * l and 2 * l + 1 of every tile of
// 8, so gets four neighbouring channels from two tiles.
__device__ __forceinline__ int unit_column(int channel, bool direct) {
  if (!direct) return channel;
  const int rest = channel % 16, own = rest % 4;
  return channel - rest + own / 2 * 8 + rest / 4 * 2 + own % 2;
}

// Where the first 16 bytes of a column of a chunk stand, in units of 16 bytes, if it were not swizzled.
__device__ __forceinline__ int64_t find_column(const PhaseTf32Params& p, const PhaseTf32PackParams& q, int group,
                                               int chunk, int channel, int tap, int& row) {
  const TapPlace of = find_tap(p, tap);
  const int block = channel / q.columns;
  row = unit_column(channel - block * q.columns, !p.contiguous);
  const int64_t unit =
      ((static_cast<int64_t>(group) * q.blocks + block) * p.taps + of.before) * p.chunks + chunk * of.taps + of.number;
  return (unit * q.columns + row) * (p.chunk / 4);
}

// A tile of 32 input channels by 64 positions, or columns of weights.
constexpr int kPhaseTf32Channels = 32;
using PhaseTf32PackTile = float[kPhaseTf32Channels][kPhaseTf32PackColumns + 1];

// A block moves a chunk of input channels, 32 at most, by 64 pairs of an output channel and a tap, rounded.
__device__ __forceinline__ void pack_weights(const PhaseTf32Params& p, const PhaseTf32PackParams& q, int64_t block,
                                             PhaseTf32PackTile& tile, uint4* packed) {
  __shared__ int64_t places[kPhaseTf32PackColumns];
  __shared__ int rows[kPhaseTf32PackColumns];
  const int first = static_cast<int>(block % q.weight_columns) * kPhaseTf32PackColumns;
  const int64_t rest = block / q.weight_columns;
  const int chunk = static_cast<int>(rest % p.chunks), group = static_cast<int>(rest / p.chunks);
  const int all = p.group_out * p.taps, channels = min(p.chunk, p.group_in - chunk * p.chunk);
  const int padded = q.columns * q.blocks;
  const int column = first + threadIdx.x % kPhaseTf32PackColumns;
  const bool last = p.weight_channel == 1;
  const int channel = last ? column % padded : column / p.taps;
  const int tap = last ? column / padded : column - channel * p.taps;
  const bool exists = channel < p.group_out && tap < p.taps;
  const float* const from = static_cast<const float*>(p.weight) +
                            (static_cast<int64_t>(group) * p.group_in + chunk * p.chunk) * all +
                            channel * p.weight_channel + tap * p.weight_tap;
  constexpr int kRows = kPhaseTf32PackThreads / kPhaseTf32PackColumns;
  const int row = threadIdx.x / kPhaseTf32PackColumns;
  float x[kPhaseTf32Channels / kRows];
#pragma unroll
  for (int i = 0; i < kPhaseTf32Channels / kRows; ++i) {
    const int c = row + i * kRows;
    x[i] = exists && c < channels ? __ldg(from + static_cast<int64_t>(c) * all) : 0.f;
  }
  if (row == 0) {
    int to = -1;
    if (channel < padded && tap < p.taps) places[threadIdx.x] = find_column(p, q, group, chunk, channel, tap, to);
    rows[threadIdx.x] = to;
  }
#pragma unroll
  for (int i = 0; i < kPhaseTf32Channels / kRows; ++i) {
    tile[row + i * kRows][threadIdx.x % kPhaseTf32PackColumns] = __uint_as_float(rounded_tf32(__float_as_uint(x[i])));
  }
  __syncthreads();
  const int granules = p.chunk / 4;
  for (int i = threadIdx.x; i < kPhaseTf32PackColumns * granules; i += kPhaseTf32PackThreads) {
    const int granule = i & (granules - 1), of = i / granules, to = rows[of];
    if (to < 0) continue;
    uint32_t v[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) v[k] = __float_as_uint(tile[granule * 4 + k][of]);
    packed[places[of] + (granule ^ (to * granules / 8 & (granules - 1)))] = {v[0], v[1], v[2], v[3]};
  }
}

// A block moves 32 channels of 64 positions of a batch entry.
__device__ __forceinline__ void pack_input(const PhaseTf32Params& p, const PhaseTf32PackParams& q, int64_t block,
                                           PhaseTf32PackTile& tile, uint4* packed) {
  const int64_t first = block % q.position_blocks * kPhaseTf32PackColumns;
  const int64_t rest = block / q.position_blocks;
  const int first_channel = static_cast<int>(rest % q.channel_blocks) * kPhaseTf32Channels;
  const int64_t n = rest / q.channel_blocks;
  const float* const from = static_cast<const float*>(p.input) + n * p.in.batch;
  constexpr int kLoads = kPhaseTf32Channels * kPhaseTf32PackColumns / kPhaseTf32PackThreads;
  float x[kLoads];
  int at[kLoads];
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const int job = threadIdx.x + i * kPhaseTf32PackThreads;
    const int c = p.contiguous ? job / kPhaseTf32PackColumns : job % kPhaseTf32Channels;
    const int of = p.contiguous ? job % kPhaseTf32PackColumns : job / kPhaseTf32Channels;
    const int channel = first_channel + c, group = channel / q.padded_channels,
              own = channel - group * q.padded_channels;
    const bool exists = channel < q.all_channels && own < p.group_in && first + of < q.image;
    at[i] = c * (kPhaseTf32PackColumns + 1) + of;
    x[i] = exists ? __ldg(from + (static_cast<int64_t>(group) * p.group_in + own) * p.in.channel +
                          (first + of) * p.in.axis[2])
                  : 0.f;
  }
#pragma unroll
  for (int i = 0; i < kLoads; ++i) (&tile[0][0])[at[i]] = x[i];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kLoads / 4; ++i) {
    const int job = threadIdx.x + i * kPhaseTf32PackThreads;
    const int granule = job % (kPhaseTf32Channels / 4), of = job / (kPhaseTf32Channels / 4);
    if (first_channel + granule * 4 >= q.all_channels || first + of >= q.image) continue;
    uint32_t v[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) v[k] = __float_as_uint(tile[granule * 4 + k][of]);
    packed[((n * q.image + first + of) * q.all_channels + first_channel) / 4 + granule] = {v[0], v[1], v[2], v[3]};
  }
}

__global__ void __launch_bounds__(kPhaseTf32PackThreads)
    phase_tf32_pack_kernel(const __grid_constant__ PhaseTf32Params p, const __grid_constant__ PhaseTf32PackParams q,
                           uint4* weights, uint4* inputs) {
  __shared__ PhaseTf32PackTile tile;
  let_next_grid_begin();
  const int64_t block = blockIdx.x;
  if (block < q.weight_blocks) {
    pack_weights(p, q, block, tile, weights);
  } else {
    pack_input(p, q, block - q.weight_blocks, tile, inputs);
  }
}

}  // namespace fastconvt::cuda
