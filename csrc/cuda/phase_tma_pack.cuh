// Brings weights, and contiguous inputs, into the layout that the phase GEMM's copies read.
#pragma once

#include "phase_pack.cuh"
#include "phase_tma_item.cuh"

namespace fastconvt::cuda {

constexpr int kPhaseTmaPackThreads = 256;
constexpr int kPhaseTmaPackTiles = 2;  // of a block, side by side: more loads at once, and longer runs of stores
constexpr int kPhaseTmaPackColumns = kPhaseTmaPackTiles * kPhasePackTile;

struct PhaseTmaPackParams {
  int64_t weight_blocks;    // of the grid; the others pack inputs
  int weight_columns;       // of blocks: 128 pairs of an output channel and a tap each
  int columns, blocks;      // output channels of a unit, and units of a group
  int64_t position_blocks;  // of a batch entry
  int channel_blocks;
  int image;                 // positions of a batch entry
  int padded_channels;       // of a group
  int all_channels;          // of all groups
  bool pairs, weight_pairs;  // neighbouring positions, and columns, are aligned as one
};

// Which column of a unit makes a channel. Channels-last: a lane, which has columns 2 * l and 2 * l + 1 of every tile of
// 8, so gets 8 neighbouring channels from 4 tiles.
__device__ __forceinline__ int unit_column(int channel, bool direct) {
  if (!direct) return channel;
  const int rest = channel % 32, own = rest % 8;
  return channel - rest + own / 2 * 8 + rest / 8 * 2 + own % 2;
}

// Where the first 16 bytes of a column of a chunk stand, in units of 16 bytes, if it were not swizzled.
__device__ __forceinline__ int64_t find_column(const PhaseTmaParams& p, const PhaseTmaPackParams& q, int group,
                                               int chunk, int channel, int tap, int& row) {
  const TapPlace of = find_tap(p, tap);
  const int block = channel / q.columns;
  row = unit_column(channel - block * q.columns, !p.contiguous);
  const int64_t unit =
      ((static_cast<int64_t>(group) * q.blocks + block) * p.taps + of.before) * p.chunks + chunk * of.taps + of.number;
  return (unit * q.columns + row) * (p.chunk / 8);
}

// Two neighbouring columns of which the first `count` exist; `pairs`: their address is that of a word.
template <typename T>
__device__ __forceinline__ uint32_t load_pair(const T* from, int64_t step, int64_t count, bool pairs) {
  uint32_t word = 0;
  if (pairs) {
    if (count > 0) word = *reinterpret_cast<const uint32_t*>(from);
  } else {
    Pack<T, 2> pair{};
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      if (k < count) pair.value[k] = from[k * step];
    }
    word = *reinterpret_cast<const uint32_t*>(&pair);
  }
  return word;
}

// A block's rows of two columns each, a warp's eight apart.
using PhaseTmaPackWords = uint32_t[kPhaseTmaPackTiles][8];

__device__ __forceinline__ void fill_tiles(PhasePackTile (&tile)[kPhaseTmaPackTiles], const PhaseTmaPackWords& word) {
#pragma unroll
  for (int j = 0; j < kPhaseTmaPackTiles; ++j) {
#pragma unroll
    for (int i = 0; i < 8; ++i) tile[j][threadIdx.x / 32 + i * 8][threadIdx.x % 32] = word[j][i];
  }
  __syncthreads();
}

// A block moves a chunk of input channels by 128 pairs of an output channel and a tap, which are neighbours in memory.
template <typename T>
__device__ __forceinline__ void pack_weights(const PhaseTmaParams& p, const PhaseTmaPackParams& q, int64_t block,
                                             PhasePackTile (&tile)[kPhaseTmaPackTiles], uint4* packed) {
  __shared__ int64_t places[kPhaseTmaPackColumns];
  __shared__ int rows[kPhaseTmaPackColumns];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int first = static_cast<int>(block % q.weight_columns) * kPhaseTmaPackColumns;
  const int64_t rest = block / q.weight_columns;
  const int chunk = static_cast<int>(rest % p.chunks), group = static_cast<int>(rest / p.chunks);
  const int all = p.group_out * p.taps, channels = min(p.chunk, p.group_in - chunk * p.chunk);
  const T* const from =
      static_cast<const T*>(p.weight) + (static_cast<int64_t>(group) * p.group_in + chunk * p.chunk) * all;
  PhaseTmaPackWords word;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int c = warp + i * 8;
#pragma unroll
    for (int j = 0; j < kPhaseTmaPackTiles; ++j) {
      const int column = first + j * kPhasePackTile + 2 * lane;
      word[j][i] =
          load_pair(from + static_cast<int64_t>(c) * all + column, 1, c < channels ? all - column : 0, q.weight_pairs);
    }
  }
  if (threadIdx.x < kPhaseTmaPackColumns) {
    const int column = first + threadIdx.x, channel = column / p.taps;
    int row = -1;
    if (channel < q.columns * q.blocks) {
      places[threadIdx.x] = find_column(p, q, group, chunk, channel, column - channel * p.taps, row);
    }
    rows[threadIdx.x] = row;
  }
  fill_tiles(tile, word);
  const int granule = threadIdx.x % 8, pair = threadIdx.x / 8, granules = p.chunk / 8;
  if (granule >= granules) return;
#pragma unroll
  for (int j = 0; j < kPhaseTmaPackTiles; ++j) {
    uint4 value[2];
    read_tile(tile[j], granule, pair, value[0], value[1]);
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const int column = j * kPhasePackTile + 2 * pair + k, row = rows[column];
      if (row >= 0) packed[places[column] + (granule ^ (row * granules / 8 & (granules - 1)))] = value[k];
    }
  }
}

// A block moves 64 channels of 128 positions of a batch entry.
template <typename T>
__device__ __forceinline__ void pack_input(const PhaseTmaParams& p, const PhaseTmaPackParams& q, int64_t block,
                                           PhasePackTile (&tile)[kPhaseTmaPackTiles], uint4* packed) {
  const int64_t first = block % q.position_blocks * kPhaseTmaPackColumns;
  const int64_t rest = block / q.position_blocks;
  const int first_channel = static_cast<int>(rest % q.channel_blocks) * kPhasePackTile;
  const int64_t n = rest / q.channel_blocks;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const T* const from = static_cast<const T*>(p.input) + n * p.in.batch;
  PhaseTmaPackWords word;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int channel = first_channel + warp + i * 8;
    const int group = channel / q.padded_channels, c = channel - group * q.padded_channels;
    const bool exists = channel < q.all_channels && c < p.group_in;
    const T* const row = from + (static_cast<int64_t>(group) * p.group_in + c) * p.in.channel;
#pragma unroll
    for (int j = 0; j < kPhaseTmaPackTiles; ++j) {
      const int64_t position = first + j * kPhasePackTile + 2 * lane;
      word[j][i] = load_pair(row + position * p.in.axis[2], p.in.axis[2], exists ? q.image - position : 0, q.pairs);
    }
  }
  fill_tiles(tile, word);
  const int granule = threadIdx.x % 8, pair = threadIdx.x / 8;
  if (first_channel + granule * 8 >= q.all_channels) return;
#pragma unroll
  for (int j = 0; j < kPhaseTmaPackTiles; ++j) {
    uint4 value[2];
    read_tile(tile[j], granule, pair, value[0], value[1]);
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const int64_t to = first + j * kPhasePackTile + 2 * pair + k;
      if (to < q.image) packed[((n * q.image + to) * q.all_channels + first_channel) / 8 + granule] = value[k];
    }
  }
}

template <typename T>
__global__ void __launch_bounds__(kPhaseTmaPackThreads, 6)
    phase_tma_pack_kernel(const __grid_constant__ PhaseTmaParams p, const __grid_constant__ PhaseTmaPackParams q,
                          uint4* weights, uint4* inputs) {
  __shared__ PhasePackTile tile[kPhaseTmaPackTiles];
  let_next_grid_begin();
  const int64_t block = blockIdx.x;
  if (block < q.weight_blocks) {
    pack_weights<T>(p, q, block, tile, weights);
  } else {
    pack_input<T>(p, q, block - q.weight_blocks, tile, inputs);
  }
}

}  // namespace fastconvt::cuda
