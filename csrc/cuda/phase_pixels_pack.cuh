// Brings weights, and inputs that are not aligned, into the layout that the phase GEMM's copies read.
#pragma once

#include "phase_pack.cuh"
#include "phase_pixels_item.cuh"

namespace fastconvt::cuda {

constexpr int kPhasePixelsPackThreads = 256;

struct PhasePixelsPackParams {
  int64_t weight_blocks;  // of the grid; the others pack inputs
  int64_t weight_jobs;    // of threads: input channels by granules of 8 output channels by taps, or pairs of them
  int tap_jobs, granules;
  int columns, blocks;      // output channels of a unit, and units of a group
  int64_t position_blocks;  // of a batch entry
  int channel_blocks;
  int image;            // positions of a batch entry
  int padded_channels;  // of a group
  int all_channels;     // of all groups
  bool weight_pairs;    // neighbouring taps are aligned as one word
};

// Two neighbouring columns of which the first `count` exist.
template <typename T>
__device__ __forceinline__ uint32_t load_pair(const T* from, int64_t step, int64_t count) {
  Pack<T, 2> pair{};
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    if (k < count) pair.value[k] = from[k * step];
  }
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// Where, in units of 16 bytes, 8 output channels of a tap of an input channel stand in the units that stages have: a
// line of 64 channels (or 32) for every input channel, swizzled, then the next 64.
__device__ __forceinline__ int64_t find_granule(const PhasePixelsParams& p, const PhasePixelsPackParams& q, int group,
                                                int channel, int tap, int granule) {
  const TapPlace of = find_tap(p, tap);
  const int of_unit = q.columns / 8, of_line = min(of_unit, 8), block = granule / of_unit;
  const int chunk = channel / p.chunk, c = channel - chunk * p.chunk, line = (granule - block * of_unit) / of_line;
  const int place = granule % of_line ^ (of_line == 8 ? c & 7 : c / 2 & 3);
  const int64_t unit =
      ((static_cast<int64_t>(group) * q.blocks + block) * p.taps + of.before) * p.chunks + chunk * of.taps + of.number;
  return ((unit * (of_unit / of_line) + line) * p.chunk + c) * of_line + place;
}

// A thread makes 8 output channels of a tap of an input channel, or of two taps; neighbouring threads make a line of a
// stage, a block all taps of some channels. Channels beyond a group's are zeros.
template <typename T>
__device__ __forceinline__ void pack_weights(const PhasePixelsParams& p, const PhasePixelsPackParams& q, int64_t block,
                                             uint4* packed) {
  const int64_t job = block * kPhasePixelsPackThreads + threadIdx.x;
  if (job >= q.weight_jobs) return;
  // The granules of a line, taps, lines, channels of all groups, padded.
  const int of_line = min(q.columns / 8, 8), lines = q.granules / of_line;
  const int64_t column = job / of_line, line = column / q.tap_jobs, channel = line / lines;
  const int tap = static_cast<int>(column - line * q.tap_jobs) * (q.weight_pairs ? 2 : 1);
  const int granule = static_cast<int>(line - channel * lines) * of_line + static_cast<int>(job - column * of_line);
  const int padded = p.chunk * p.chunks, group = static_cast<int>(channel / padded);
  const int c = static_cast<int>(channel - static_cast<int64_t>(group) * padded);
  const T* const row = static_cast<const T*>(p.weight) +
                       (static_cast<int64_t>(group) * p.group_in + c) * p.group_out * p.taps + tap * p.weight_tap;
  const int out = c < p.group_in ? p.group_out : 0;
  // A lane has columns 2 * l and 2 * l + 1 of every tile of 8: permuted, 8 neighbouring channels from 4 tiles.
  const auto channel_of = [&](int k) {
    return p.permuted ? granule / 4 * 32 + k / 2 * 8 + granule % 4 * 2 + k % 2 : granule * 8 + k;
  };
  if (q.weight_pairs) {
    uint32_t word[8];
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const int o = channel_of(k);
      word[k] = o < out ? *reinterpret_cast<const uint32_t*>(row + o * p.weight_column) : 0;
    }
    uint32_t low[4], high[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      low[k] = __byte_perm(word[2 * k], word[2 * k + 1], 0x5410);
      high[k] = __byte_perm(word[2 * k], word[2 * k + 1], 0x7632);
    }
    packed[find_granule(p, q, group, c, tap, granule)] = {low[0], low[1], low[2], low[3]};
    packed[find_granule(p, q, group, c, tap + 1, granule)] = {high[0], high[1], high[2], high[3]};
  } else {
    Pack<T, 8> value{};
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const int o = channel_of(k);
      if (o < out) value.value[k] = row[o * p.weight_column];
    }
    packed[find_granule(p, q, group, c, tap, granule)] = *reinterpret_cast<const uint4*>(&value);
  }
}

// A block moves 64 channels of 64 positions of a batch entry.
template <typename T>
__device__ __forceinline__ void pack_input(const PhasePixelsParams& p, const PhasePixelsPackParams& q, int64_t block,
                                           PhasePackTile& tile, uint4* packed) {
  const int64_t first = block % q.position_blocks * kPhasePackTile;
  const int64_t rest = block / q.position_blocks;
  const int first_channel = static_cast<int>(rest % q.channel_blocks) * kPhasePackTile;
  const int64_t n = rest / q.channel_blocks;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t position = first + 2 * lane;
  const T* const from = static_cast<const T*>(p.input) + n * p.in.batch + position * p.in.axis[2];
  uint32_t word[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int channel = first_channel + warp + i * 8;
    const int group = channel / q.padded_channels, c = channel - group * q.padded_channels;
    const bool exists = channel < q.all_channels && c < p.group_in;
    word[i] = load_pair(from + (static_cast<int64_t>(group) * p.group_in + c) * p.in.channel, p.in.axis[2],
                        exists ? q.image - position : 0);
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) tile[warp + i * 8][lane] = word[i];
  __syncthreads();
  const int granule = threadIdx.x % 8, pair = threadIdx.x / 8;
  if (first_channel + granule * 8 >= q.all_channels) return;
  uint4 value[2];
  read_tile(tile, granule, pair, value[0], value[1]);
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    const int64_t to = first + 2 * pair + k;
    if (to < q.image) packed[((n * q.image + to) * q.all_channels + first_channel) / 8 + granule] = value[k];
  }
}

template <typename T>
__global__ void __launch_bounds__(kPhasePixelsPackThreads)
    phase_pixels_pack_kernel(const __grid_constant__ PhasePixelsParams p,
                             const __grid_constant__ PhasePixelsPackParams q, uint4* weights, uint4* inputs) {
  __shared__ PhasePackTile tile;
  let_next_grid_begin();
  const int64_t block = blockIdx.x;
  if (block < q.weight_blocks) {
    pack_weights<T>(p, q, block, weights);
  } else {
    pack_input<T>(p, q, block - q.weight_blocks, tile, inputs);
  }
}

}  // namespace fastconvt::cuda
