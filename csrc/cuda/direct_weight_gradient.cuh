// The gradients of weight and bias for small layers, on matrix units:
//
//   grad_weight[ci, pair] = sum over positions of input[ci, position] * grad_output[co, position's place in tap].
//
// A warp has up to 64 channels by 32 pairs, or 16 by 64, in registers. Lanes load their operands from memory as they
// lie: nothing is staged and nobody waits but for the loads of 16 positions. The warps of a block share positions;
// blocks own partial sums, which the second pass of the head family adds. Other blocks sum output channels.
#pragma once

#include "device/dependent_launch.cuh"
#include "direct_gradient.cuh"
#include "heads_gradient.cuh"

namespace fastconvt::cuda {

constexpr int kDirectChunk = 16;  // positions

template <typename T, bool kSplit, int kRows, int kColumns>
class DirectWeightGradient {
  static constexpr int kWarps = kDirectGradientThreads / 32, kSums = kRows * kColumns * 128;
  static constexpr int kWords = sizeof(T) == 4 ? 4 : 2;  // of the 4 positions of a lane, in an operand's row

  const DirectGradientParams& p;
  float* const saved;  // kWarps * kSums
  const int split;     // the block's among those of its kind
  const int lane = threadIdx.x % 32, column = lane % 4, row = lane / 4;
  int group, channel, pair, pairs, channels;
  int input_offset[2 * kRows];  // of this lane's channels, elements
  DirectPair mine[kColumns];    // offsets in elements
  float sums[kRows][kColumns][4] = {};

 public:
  __device__ DirectWeightGradient(const DirectGradientParams& p, float* saved, int split, int kind)
      : p(p), saved(saved), split(split) {
    pair = kind;
    channel = p.by_pair_chunks(pair);
    pair *= p.chunk_pairs;
    group = p.by_chunks(channel);
    channel *= 16 * kRows;
    pairs = min(p.chunk_pairs, p.pairs - pair);
    channels = min(16 * kRows, p.group_in - channel);
#pragma unroll
    for (int i = 0; i < 2 * kRows; ++i) {
      const int c = 8 * i + row;
      input_offset[i] = c < channels ? c * static_cast<int>(p.input_channel) : 0;
    }
#pragma unroll
    for (int n = 0; n < kColumns; ++n) mine[n] = DirectPair::make(p, pair + (8 * n + row < pairs ? 8 * n + row : 0), 1);
  }

  __device__ __forceinline__ void run() {
    wait_for_previous_grid();
    const int step = p.splits * kWarps;
#pragma unroll 1
    for (int chunk = split * kWarps + threadIdx.x / 32; chunk < p.units; chunk += step) add(chunk);
    let_next_grid_begin();  // the second pass may get ready
    store();
  }

 private:
  __device__ __forceinline__ void add(int chunk) {
    int first = chunk;
    const int batch = p.by_units(first);
    first *= kDirectChunk;
    DirectPlace place;
    place.make(p, first + lane % kDirectChunk);
    const bool inside = __all_sync(0xffffffffu, place.taps == 0xffffffffu);
    const T* input = static_cast<const T*>(p.input) + batch * p.input_batch +
                     (group * p.group_in + channel) * p.input_channel + first;
    const T* grad = static_cast<const T*>(p.grad) + batch * p.grad_batch + group * p.group_out * p.grad_channel;
    int offset[4];
    uint32_t taps[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      offset[e] = __shfl_sync(0xffffffffu, place.offset, 4 * e + column);
      taps[e] = __shfl_sync(0xffffffffu, place.taps, 4 * e + column);
    }
    if (inside) {
      multiply<true>(input, grad, p.positions - first, offset, taps);
    } else {
      multiply<false>(input, grad, p.positions - first, offset, taps);
    }
  }

  using Words = uint32_t[kWords];

  template <bool kInside>
  __device__ __forceinline__ void multiply(const T* input, const T* grad, int left, const int (&offset)[4],
                                           const uint32_t (&taps)[4]) {
    T x[2 * kRows][4], g[kColumns][4];
#pragma unroll
    for (int i = 0; i < 8 * kRows; ++i) {
      const int at = 4 * (i % 4) + column;
      x[i / 4][i % 4] = kInside || at < left ? __ldg(input + input_offset[i / 4] + at) : T{};
    }
#pragma unroll
    for (int i = 0; i < 4 * kColumns; ++i) {
      const DirectPair& pair = mine[i / 4];
      const bool has = kInside || (taps[i % 4] & pair.taps) == pair.taps;
      g[i / 4][i % 4] = has ? __ldg(grad + (offset[i % 4] + static_cast<int>(pair.offset))) : T{};
    }
    if constexpr (sizeof(T) == 2) {
#pragma unroll
      for (int n = 0; n < kColumns; ++n) {
#pragma unroll
        for (int m = 0; m < kRows; ++m) {
          heads_gradient_mma<T>(sums[m][n], two(x[2 * m][0], x[2 * m][1]), two(x[2 * m + 1][0], x[2 * m + 1][1]),
                                two(x[2 * m][2], x[2 * m][3]), two(x[2 * m + 1][2], x[2 * m + 1][3]),
                                two(g[n][0], g[n][1]), two(g[n][2], g[n][3]));
        }
      }
    } else {
      multiply_float(x, g);
    }
  }

  static __device__ __forceinline__ uint32_t two(T first, T second) {
    uint16_t bits[2];
    memcpy(bits, &first, 2), memcpy(bits + 1, &second, 2);
    return bits[0] | static_cast<uint32_t>(bits[1]) << 16;
  }

  // Three products for one; the matrix unit adds 16 positions, the small products first, and float32 the rest.
  __device__ __forceinline__ void multiply_float(const float (&x)[2 * kRows][4], const float (&g)[kColumns][4]) {
    uint32_t b[kColumns][4], b_low[kColumns][4];
#pragma unroll
    for (int i = 0; i < 4 * kColumns; ++i) split_float(g[i / 4][i % 4], b[i / 4][i % 4], b_low[i / 4][i % 4]);
#pragma unroll
    for (int m = 0; m < kRows; ++m) {
      uint32_t a[2][4], a_low[2][4];
#pragma unroll
      for (int i = 0; i < 8; ++i) split_float(x[2 * m + i / 4][i % 4], a[i / 4][i % 4], a_low[i / 4][i % 4]);
#pragma unroll
      for (int n = 0; n < kColumns; ++n) {
        float part[4] = {};
        if constexpr (kSplit) {
#pragma unroll
          for (int s = 0; s < 2; ++s) {
            product(part, a_low, b[n], s);
            product(part, a, b_low[n], s);
          }
        }
#pragma unroll
        for (int s = 0; s < 2; ++s) product(part, a, b[n], s);
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[m][n][i] += part[i];
      }
    }
  }
  static __device__ __forceinline__ void split_float(float x, uint32_t& high, uint32_t& low) {
    if (kSplit) {
      heads_split(__float_as_uint(x), high, low);
    } else {
      high = heads_round(__float_as_uint(x));
    }
  }
  static __device__ __forceinline__ void product(float (&sum)[4], const uint32_t (&a)[2][4], const uint32_t (&b)[4],
                                                 int s) {
    heads_gradient_mma<T>(sum, a[0][2 * s], a[1][2 * s], a[0][2 * s + 1], a[1][2 * s + 1], b[2 * s], b[2 * s + 1]);
  }

  // The block's partial sums, those of its warps in their order.
  __device__ __forceinline__ void store() {
    const int warp = threadIdx.x / 32;
#pragma unroll
    for (int i = 0; i < kRows * kColumns * 4; ++i) {
      saved[warp * kSums + i * 32 + lane] = sums[i / (4 * kColumns)][i / 4 % kColumns][i % 4];
    }
    __syncthreads();
    float* const to = p.partial + split * p.weight_elements + (group * p.group_in + channel) * int64_t{p.pairs} + pair;
    // Sum i of lane l is of channel 16 * m + l / 4 + i / 2 % 2 * 8 and pair 8 * n + l % 4 * 2 + i % 2.
#pragma unroll 4
    for (int i = warp; i < kRows * kColumns * 4; i += kWarps) {
      const int c = i / (4 * kColumns) * 16 + row + i / 2 % 2 * 8, n = i / 4 % kColumns * 8 + column * 2 + i % 2;
      float sum = 0;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) sum += saved[w * kSums + i * 32 + lane];
      if (c < channels && n < pairs) to[c * int64_t{p.pairs} + n] = sum;
    }
  }
};

// Block `part` of `parts` that sum an output channel's gradient, by vectors of 16 bytes.
template <typename T>
__device__ __forceinline__ void direct_sum_channel(const DirectGradientParams& p, double* shared, int part,
                                                   int channel) {
  constexpr int kUnit = 16 / sizeof(T), kTogether = 4, kPiece = kTogether * kDirectGradientThreads;
  wait_for_previous_grid();
  const int outputs = static_cast<int>(p.grad_channel), pieces = outputs / kUnit / kPiece + 1;
  double total = 0;
#pragma unroll 1
  for (int64_t item = part; item < int64_t{p.batch} * pieces; item += p.bias_parts) {
    const int64_t batch = item / pieces;
    const int piece = static_cast<int>(item - batch * pieces);
    const T* from = static_cast<const T*>(p.grad) + batch * p.grad_batch + channel * p.grad_channel;
    const int lead = static_cast<int>(-(reinterpret_cast<uintptr_t>(from) / sizeof(T)) % kUnit);  // scalars before
    const int head = min(lead, outputs), vectors = (outputs - head) / kUnit, tail = outputs - head - vectors * kUnit;
    float sum = 0;
    uint4 word[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const int v = piece * kPiece + i * kDirectGradientThreads + threadIdx.x;
      word[i] = v < vectors ? __ldg(reinterpret_cast<const uint4*>(from + head) + v) : uint4{};
    }
    if (piece == 0) {
      const int i = threadIdx.x;
      if (i < head) sum += to_accumulator(__ldg(from + i));
      if (i < tail) sum += to_accumulator(__ldg(from + outputs - tail + i));
    }
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      T value[kUnit];
      memcpy(value, &word[i], 16);
#pragma unroll
      for (int e = 0; e < kUnit; ++e) sum += to_accumulator(value[e]);
    }
    total += sum;
  }
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) total += __shfl_xor_sync(0xffffffffu, total, lanes);
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = total;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int w = 1; w < kDirectGradientThreads / 32; ++w) total += shared[w];
  p.bias_partial[int64_t{part} * p.out_channels + channel] = static_cast<float>(total);
}

template <typename T, bool kSplit, int kRows, int kColumns>
__global__ void __launch_bounds__(kDirectGradientThreads, kRows == 4 ? 3 : 4)
    direct_weight_gradient_kernel(const __grid_constant__ DirectGradientParams p) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  __shared__ __align__(16) float saved[kDirectGradientThreads * kRows * kColumns * 4];
  const int sums = static_cast<int>(blockIdx.x) - p.splits * p.kinds;
  if (sums < 0) {
    int split = blockIdx.x;
    const int kind = p.by_splits(split);
    DirectWeightGradient<T, kSplit, kRows, kColumns>(p, saved, split, kind).run();
  } else {
    const int channel = sums / p.bias_parts;
    direct_sum_channel<T>(p, reinterpret_cast<double*>(saved), sums - channel * p.bias_parts, channel);
  }
#endif
}

}  // namespace fastconvt::cuda
