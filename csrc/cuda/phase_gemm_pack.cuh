// Brings weights, and inputs that need it, into the layout that the phase GEMM's blocks copy from.
#pragma once

#include "device/numeric.cuh"
#include "phase_gemm_barrier.cuh"
#include "phase_gemm_product.cuh"

namespace fastconvt::cuda {

constexpr int kPackThreads = 256;
constexpr int kPackPositions = 64;  // of a block that packs inputs: two a lane
constexpr int kPackGranules = kPackThreads / 32;

struct PhaseGemmPackParams {
  int64_t weight_blocks;    // of the grid; the others pack inputs
  int64_t weight_granules;  // in all
  int64_t positions;        // of the batch
  int64_t position_blocks;
  int image;           // positions of a batch entry
  int columns;         // output channels of a channel block
  int pixel_granules;  // of the packed input
  int per_group;       // granules of a group in it, and in the weights
  bool pairs;          // neighbouring positions are aligned as one
  bool round;          // to TF32
};

template <typename T>
__device__ __forceinline__ T rounded(const PhaseGemmPackParams& q, T x) {
  if constexpr (sizeof(T) == 4) {
    if (q.round) x = __uint_as_float(rounded_tf32(__float_as_uint(x)));
  }
  return x;
}

// Which column of a channel block makes a channel. Where outputs are stored from registers, a lane, which has columns
// 2 * l and 2 * l + 1 of every tile of 8, so gets neighbouring channels: 16 bytes from 8 / element_size tiles.
__device__ __forceinline__ int column_of(int channel, int element_size, bool direct) {
  if (!direct) return channel;
  const int tiles = 8 / element_size, of_lane = 2 * tiles, rest = channel % (8 * tiles), own = rest % of_lane;
  return channel - rest + own / 2 * 8 + rest / of_lane * 2 + own % 2;
}

// Granule number `index`: lanes run along output channels and taps, which are neighbours in the weight.
template <typename T>
__device__ __forceinline__ void pack_weight(const PhaseGemmParams& p, const PhaseGemmPackParams& q, int64_t index,
                                            uint4* packed) {
  constexpr int kElements = 16 / sizeof(T);
  const int row_length = p.channel_blocks.divisor * q.columns * p.taps;
  const int64_t row = index / row_length;
  const int column = static_cast<int>(index - row * row_length);
  const int group = static_cast<int>(row / q.per_group), granule = static_cast<int>(row % q.per_group);
  const int channel = column / p.taps, tap = column - channel * p.taps;
  int rest = tap, before = 0, taps = 1, number = 0, t[3];
#pragma unroll
  for (int a = 2; a >= 0; --a) {
    t[a] = rest % p.axis[a].kernel;
    rest /= p.axis[a].kernel;
  }
  // (before, number) among the phases and the taps of one, both last axis fastest.
  int kernels = p.taps;
#pragma unroll
  for (int a = 0; a < 3; ++a) {
    const PhaseGemmAxisParams& axis = p.axis[a];
    int64_t f = (static_cast<int64_t>(t[a]) * axis.dilation - axis.padding) % axis.stride;
    if (f < 0) f += axis.stride;
    const PhaseGemmPhaseParams& phase = axis.phase[f];
    kernels /= axis.kernel;
    before += taps * phase.before * kernels;
    number = number * phase.taps + (t[a] - phase.first_tap) / axis.tap_step;
    taps *= phase.taps;
  }
  Pack<T, kElements> value;
#pragma unroll
  for (int i = 0; i < kElements; ++i) {
    const int c = granule * kElements + i;
    T element{};
    if (c < p.group_in && channel < p.group_out) {
      element = static_cast<const T*>(
          p.weight)[((static_cast<int64_t>(group) * p.group_in + c) * p.group_out + channel) * p.taps + tap];
    }
    value.value[i] = rounded(q, element);
  }
  const int block = channel / q.columns, log2 = p.granules_log2, chunk = granule >> log2;
  const int64_t unit = (static_cast<int64_t>(group) * p.channel_blocks.divisor + block) * p.chunks * p.taps +
                       static_cast<int64_t>(before) * p.chunks + chunk * taps + number;
  const int64_t place = ((unit << log2) + granule - (chunk << log2)) * q.columns +
                        column_of(channel - block * q.columns, sizeof(T), p.direct);
  packed[place] = *reinterpret_cast<const uint4*>(&value);
}

// A block moves 64 positions by 8 granules.
template <typename T>
__device__ __forceinline__ void pack_input(const PhaseGemmParams& p, const PhaseGemmPackParams& q, int64_t block,
                                           uint4* packed) {
  constexpr int kElements = 16 / sizeof(T);
  __shared__ uint4 tile[kPackPositions][kPackGranules];
  const int64_t first = block % q.position_blocks * kPackPositions;
  const int first_granule = static_cast<int>(block / q.position_blocks) * kPackGranules;
  {
    const int lane = threadIdx.x % 32, g = threadIdx.x / 32, granule = first_granule + g;
    const int group = granule / q.per_group, c = (granule - group * q.per_group) * kElements;
    Pack<T, kElements> value[2] = {};
    const auto source = [&](int64_t position) {
      const int64_t n = position / q.image;
      return static_cast<const T*>(p.input) + n * p.in.batch + (position - n * q.image) * p.in.axis[2] +
             (static_cast<int64_t>(group) * p.group_in + c) * p.in.channel;
    };
    const int64_t position = first + 2 * lane;
    const int channels = granule < q.pixel_granules ? min(kElements, p.group_in - c) : 0;
    if (q.pairs && position < q.positions) {
      const T* const from = source(position);
#pragma unroll
      for (int i = 0; i < kElements; ++i) {
        if (i >= channels) continue;
        const auto both = *reinterpret_cast<const Pack<T, 2>*>(from + i * p.in.channel);
        value[0].value[i] = rounded(q, both.value[0]);
        value[1].value[i] = rounded(q, both.value[1]);
      }
    } else {
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        if (position + k >= q.positions) continue;
        const T* const from = source(position + k);
#pragma unroll
        for (int i = 0; i < kElements; ++i) {
          if (i < channels) value[k].value[i] = rounded(q, from[i * p.in.channel]);
        }
      }
    }
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      tile[2 * lane + k][g ^ (lane % kPackGranules)] = *reinterpret_cast<const uint4*>(&value[k]);
    }
  }
  __syncthreads();
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    const int row = threadIdx.x / kPackGranules + k * 32, g = threadIdx.x % kPackGranules, granule = first_granule + g;
    const int64_t position = first + row;
    if (position < q.positions && granule < q.pixel_granules) {
      packed[position * q.pixel_granules + granule] = tile[row][g ^ (row / 2 % kPackGranules)];
    }
  }
}

template <typename T>
__global__ void __launch_bounds__(kPackThreads)
    phase_gemm_pack_kernel(const __grid_constant__ PhaseGemmParams p, const __grid_constant__ PhaseGemmPackParams q,
                           uint4* weights, uint4* inputs) {
  let_next_grid_begin();
  const int64_t block = blockIdx.x;
  if (block < q.weight_blocks) {
    const int64_t index = block * kPackThreads + threadIdx.x;
    if (index < q.weight_granules) pack_weight<T>(p, q, index, weights);
  } else {
    pack_input<T>(p, q, block - q.weight_blocks, inputs);
  }
}

}  // namespace fastconvt::cuda
