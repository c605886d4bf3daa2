// Brings the output's gradient and weights into the layouts that the gradient GEMM's copies read: channels innermost,
// rows of whole vectors of 16 bytes. TF32 is rounded on the way.
#pragma once

#include "device/dependent_launch.cuh"
#include "device/fast_divide.h"
#include "device/numeric.cuh"
#include "device/shared_address.cuh"

namespace fastconvt::cuda {

constexpr int kGradientPackThreads = 256;
constexpr int kGradientPackPositions = 128;
constexpr int kGradientPackBytes = 8 << 10;  // of weights that a block turns

struct GradientPackParams {
  // Weights: rows of `channels` times `taps` elements become rows of `taps` times `weight_pitch`.
  const void* weight;
  void* packed_weight;
  int weight_blocks;    // of the grid, the first ones
  bool weight_turned;   // taps stand before channels already
  bool weight_vectors;  // what a block reads is aligned
  int weight_rows, channels, taps, weight_pitch;
  int block_rows, block_channels, channel_blocks;
  FastDivide row_vectors, row_taps;
  // The output's gradient: (batch, groups, group, image) becomes (batch, image, groups, group_pitch).
  const void* source;
  void* target;
  bool turned;  // channels are innermost already
  bool vectors;
  int groups, group, image, group_pitch, pitch;
  int tile_positions;
  // Padded planes of the output's gradient, as windows have them; blocks of the grid, the last ones.
  void* planes;
  int64_t plane_vectors;  // of all of them
  FastDivide plane, plane_layer, plane_row;
  int plane_out[3], plane_padding[3];
  FastDivide tile_columns, tile_groups, tile_rows;  // of channels, and of positions of a batch entry
  int64_t positions;                                // of all batch entries
};

template <typename T>
__device__ __forceinline__ T round_operand(T x) {
  if constexpr (sizeof(T) == 4) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    uint32_t y;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
    return __uint_as_float(y);
#endif
  }
  return x;
}

template <typename T>
__device__ __forceinline__ void pack_weights(const GradientPackParams& p, int block, T* staged) {
  constexpr int kWide = 16 / sizeof(T);
  using Vector = Pack<T, kWide>;
  const int row_block = block / p.channel_blocks;
  const int first_row = row_block * p.block_rows, first = (block - row_block * p.channel_blocks) * p.block_channels;
  const int rows = min(p.block_rows, p.weight_rows - first_row), channels = min(p.block_channels, p.channels - first);
  const int count = rows * channels * p.taps;
  const int64_t place = static_cast<int64_t>(first_row) * p.channels * p.taps;
  const T* const source = static_cast<const T*>(p.weight) + place + static_cast<int64_t>(first) * p.taps;
  if (p.weight_vectors && !p.weight_turned) {
#pragma unroll 4
    for (int i = threadIdx.x; i < count / kWide; i += kGradientPackThreads) {
      Vector value = reinterpret_cast<const Vector*>(source)[i];
#pragma unroll
      for (int k = 0; k < kWide; ++k) value.value[k] = round_operand(value.value[k]);
      reinterpret_cast<Vector*>(staged)[i] = value;
    }
  } else if (!p.weight_turned) {
#pragma unroll 8
    for (int i = threadIdx.x; i < count; i += kGradientPackThreads) staged[i] = round_operand(__ldg(source + i));
  }
  __syncthreads();
  const int vectors = (channels + kWide - 1) / kWide, row_vectors = vectors * p.taps;
  const bool whole = row_vectors == p.row_vectors.divisor;
  for (int i = threadIdx.x; i < rows * row_vectors; i += kGradientPackThreads) {
    int rest = i, tap;
    const int row = whole ? p.row_vectors(rest) : 0;  // others have one row
    tap = rest;
    const int vector = p.row_taps(tap);
    Vector value;
#pragma unroll
    for (int k = 0; k < kWide; ++k) {
      const int channel = vector * kWide + k;
      value.value[k] = T{};
      if (channel >= channels) continue;
      value.value[k] = p.weight_turned
                           ? round_operand(static_cast<const T*>(
                                 p.weight)[place + (int64_t{row} * p.taps + tap) * p.channels + first + channel])
                           : staged[(row * channels + channel) * p.taps + tap];
    }
    const int64_t to = (static_cast<int64_t>(first_row + row) * p.taps + tap) * p.weight_pitch + first;
    *reinterpret_cast<Vector*>(static_cast<T*>(p.packed_weight) + to + vector * kWide) = value;
  }
}

// Eight neighbours of sixteen elements of 16 bits, from element `shift` on.
__device__ __forceinline__ uint4 shift_elements(const uint4& low, const uint4& high, int shift) {
  uint32_t w[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
  for (int i = 0; i < 7; ++i) w[i] = shift & 2 ? w[i + 1] : w[i];
#pragma unroll
  for (int i = 0; i < 5; ++i) w[i] = shift & 4 ? w[i + 2] : w[i];
#pragma unroll
  for (int i = 0; i < 4; ++i) w[i] = shift & 1 ? __funnelshift_r(w[i], w[i + 1], 16) : w[i];
  return make_uint4(w[0], w[1], w[2], w[3]);
}

// Turns 64 channels of 128 positions, of 16 bits: four matrices of 8 x 8 give a lane eight neighbouring channels.
template <typename T>
__device__ __forceinline__ void turn_16_bits(const GradientPackParams& p, const T* source, T* target, int channels,
                                             int positions, int room, char* staged) {
  constexpr int kRow = kGradientPackPositions * 2;
  const uint32_t base = shared_address(staged);
  if (p.vectors) {
    uint4 value[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int v = threadIdx.x + i * kGradientPackThreads, c = v / 16, at = v % 16 * 8;
      value[i] = make_uint4(0, 0, 0, 0);
      if (c < channels && at < positions) {
        value[i] = __ldg(reinterpret_cast<const uint4*>(source + static_cast<int64_t>(c) * p.image + at));
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int v = threadIdx.x + i * kGradientPackThreads, c = v / 16, key = (c & 1) | (c >> 3 & 3) << 1;
      *reinterpret_cast<uint4*>(staged + c * kRow + ((v % 16) ^ key) * 16) = value[i];
    }
  } else {
    // Rows begin anywhere: vectors around them are shifted. Nothing beyond the tensor is read.
    const T* const begin = static_cast<const T*>(p.source);
    const T* const end = begin + p.positions * p.groups * p.group;
    uint4 low[4], high[4];
    int shift[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int v = threadIdx.x + i * kGradientPackThreads, c = v / 16, at = v % 16 * 8;
      low[i] = high[i] = make_uint4(0, 0, 0, 0);
      shift[i] = 0;
      if (c >= channels || at >= positions) continue;
      const T* const from = source + static_cast<int64_t>(c) * p.image + at;
      const int before = static_cast<int>(reinterpret_cast<uintptr_t>(from) / 2 % 8);
      const T* const aligned = from - before;
      if (aligned >= begin && aligned + 16 <= end) {
        shift[i] = before;
        low[i] = __ldg(reinterpret_cast<const uint4*>(aligned));
        if (before > 0) high[i] = __ldg(reinterpret_cast<const uint4*>(aligned + 8));
      } else {
        Pack<T, 8> value{};
        for (int k = 0; k < 8; ++k) {
          if (at + k < positions) value.value[k] = from[k];
        }
        low[i] = *reinterpret_cast<const uint4*>(&value);
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int v = threadIdx.x + i * kGradientPackThreads, c = v / 16, key = (c & 1) | (c >> 3 & 3) << 1;
      *reinterpret_cast<uint4*>(staged + c * kRow + ((v % 16) ^ key) * 16) = shift_elements(low[i], high[i], shift[i]);
    }
  }
  __syncthreads();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = lane % 8;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int number = warp * 4 + i, half = number % 2, group = number / 2;
    const int c = half * 32 + row / 2 * 8 + lane / 8 * 2 + row % 2;
    uint32_t r[4] = {0, 0, 0, 0};
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 750
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(base + c * kRow + (group ^ row) * 16)
                 : "memory");
#endif
    const int at = group * 8 + lane / 4, channel = half * 32 + lane % 4 * 8;
    if (at < positions && channel < room) {
      *reinterpret_cast<uint4*>(target + static_cast<int64_t>(at) * p.pitch + channel) =
          make_uint4(r[0], r[1], r[2], r[3]);
    }
  }
}

// The same for 32 channels of 32 bits.
__device__ __forceinline__ void turn_32_bits(const GradientPackParams& p, const float* source, float* target,
                                             int channels, int positions, int room, float* staged) {
  float value[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const int v = threadIdx.x + i * kGradientPackThreads, c = v / kGradientPackPositions;
    const int at = v % kGradientPackPositions;
    value[i] = 0;
    if (c < channels && at < positions) value[i] = __ldg(source + static_cast<int64_t>(c) * p.image + at);
  }
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const int v = threadIdx.x + i * kGradientPackThreads, c = v / kGradientPackPositions;
    const int at = v % kGradientPackPositions;
    staged[at * 33 + c] = round_operand(value[i]);
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int v = threadIdx.x + i * kGradientPackThreads, at = v / 8, c = v % 8 * 4;
    if (at >= positions || c >= room) continue;
    const float* const from = staged + at * 33 + c;
    *reinterpret_cast<float4*>(target + static_cast<int64_t>(at) * p.pitch + c) =
        make_float4(from[0], from[1], from[2], from[3]);
  }
}

template <typename T>
__device__ __forceinline__ void turn_positions(const GradientPackParams& p, int block, char* staged) {
  constexpr int kChannels = 128 / sizeof(T);
  int column = block, group, tile;
  group = p.tile_columns(column);
  tile = p.tile_groups(group);
  const int n = p.tile_rows(tile), first = column * kChannels, from = tile * p.tile_positions;
  const int positions = min(p.tile_positions, p.image - from), channels = min(kChannels, p.group - first);
  const T* const source = static_cast<const T*>(p.source) +
                          ((static_cast<int64_t>(n) * p.groups + group) * p.group + first) * p.image + from;
  T* const target =
      static_cast<T*>(p.target) + (static_cast<int64_t>(n) * p.image + from) * p.pitch + group * p.group_pitch + first;
  if constexpr (sizeof(T) == 2) {
    turn_16_bits(p, source, target, channels, positions, p.group_pitch - first, staged);
  } else {
    turn_32_bits(p, source, target, channels, positions, p.group_pitch - first, reinterpret_cast<float*>(staged));
  }
}

// Channels that are innermost already: the same elements, further apart.
template <typename T>
__device__ __forceinline__ void pad_positions(const GradientPackParams& p, int block) {
  constexpr int kWide = 16 / sizeof(T);
  const int64_t first = static_cast<int64_t>(block) * kGradientPackPositions;
  const int vectors = p.pitch / kWide, group_vectors = p.group_pitch / kWide;
  for (int i = threadIdx.x; i < kGradientPackPositions * vectors; i += kGradientPackThreads) {
    const int at = i / vectors, v = i - at * vectors, group = v / group_vectors;
    if (first + at >= p.positions) break;
    const int c = (v - group * group_vectors) * kWide;
    const T* const source = static_cast<const T*>(p.source) + ((first + at) * p.groups + group) * p.group + c;
    Pack<T, kWide> value;
#pragma unroll
    for (int k = 0; k < kWide; ++k) value.value[k] = c + k < p.group ? round_operand(__ldg(source + k)) : T{};
    *reinterpret_cast<Pack<T, kWide>*>(static_cast<T*>(p.target) + (first + at) * p.pitch + v * kWide) = value;
  }
}

// Eight neighbouring elements of padded planes.
template <typename T>
__device__ __forceinline__ void pad_planes(const GradientPackParams& p, int block) {
  const int64_t vector = static_cast<int64_t>(block) * kGradientPackThreads + threadIdx.x;
  if (vector >= p.plane_vectors) return;
  int at = static_cast<int>(vector) * 8;
  int plane = p.plane(at), at0 = p.plane_layer(at), at1 = p.plane_row(at);
  const int size1 = p.plane_layer.divisor / p.plane_row.divisor, size0 = p.plane.divisor / p.plane_layer.divisor;
  Pack<T, 8> value;
  const T* const source = static_cast<const T*>(p.source);
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    const int o0 = at0 - p.plane_padding[0], o1 = at1 - p.plane_padding[1], o2 = at - p.plane_padding[2];
    const bool exists =
        o0 >= 0 && o0 < p.plane_out[0] && o1 >= 0 && o1 < p.plane_out[1] && o2 >= 0 && o2 < p.plane_out[2];
    value.value[k] = T{};
    if (exists) {
      value.value[k] =
          __ldg(source + static_cast<int64_t>(plane) * p.image + (o0 * p.plane_out[1] + o1) * p.plane_out[2] + o2);
    }
    if (++at < p.plane_row.divisor) continue;
    at = 0;
    if (++at1 < size1) continue;
    at1 = 0;
    if (++at0 < size0) continue;
    at0 = 0, ++plane;
  }
  *reinterpret_cast<Pack<T, 8>*>(static_cast<T*>(p.planes) + vector * 8) = value;
}

// The weight by the first blocks, then `blocks` for the output's gradient, `input_blocks` for the input (16 bits, which
// the weight's gradient reads), the others for padded planes.
template <typename T>
__global__ void __launch_bounds__(kGradientPackThreads)
    gradient_pack_kernel(const __grid_constant__ GradientPackParams p, const __grid_constant__ GradientPackParams input,
                         int blocks, int input_blocks) {
  __shared__ __align__(1024) char staged[kGradientPackPositions * 33 * 4];
  let_next_grid_begin();
  const int block = static_cast<int>(blockIdx.x) - p.weight_blocks;
  if (block < 0) {
    pack_weights<T>(p, static_cast<int>(blockIdx.x), reinterpret_cast<T*>(staged));
  } else if (block >= blocks + input_blocks) {
    if constexpr (sizeof(T) == 2) pad_planes<T>(p, block - blocks - input_blocks);
  } else if (block >= blocks) {
    if constexpr (sizeof(T) == 2) {
      if (input.turned) {
        pad_positions<T>(input, block - blocks);
      } else {
        turn_positions<T>(input, block - blocks, staged);
      }
    }
  } else if (p.turned) {
    pad_positions<T>(p, block);
  } else {
    turn_positions<T>(p, block, staged);
  }
}

}  // namespace fastconvt::cuda
