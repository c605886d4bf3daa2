// Weights of 32 bits for the input's gradient: a block stages them as they lie in memory, so that they need no memory
// of their own. Those that stay become operands once, in shared memory; each warp makes its own of others.
#pragma once

#include "dense_gradient_copy.cuh"
#include "dense_gradient_product.cuh"

namespace fastconvt::cuda {

// Fills the table of granules that are multiplied.
__device__ __forceinline__ void fill_plain_weights(const DenseParams& p, int* table) {
  const int taps = p.axis[0].taps * p.axis[1].taps * p.axis[2].taps, runs = p.runs;
  for (int i = threadIdx.x; i < (2 * p.steps + 3) / 4 * 4; i += blockDim.x) {
    const int plane = i / taps, tap = i - plane * taps;
    const int channel = runs > 1 ? plane : plane * kGranule<float>;
    table[i] = plane < p.chunk_planes ? (channel * p.weight_channel + tap * runs) * 4 : -1;
  }
}

// Stages a chunk of a block's columns, a row each, with zeros for what does not exist.
__device__ __forceinline__ void stage_plain_weights(const DenseParams& p, int group, int block, int columns, int chunk,
                                                    char* stage, int thread, int threads) {
  int tap_block = chunk / p.plane_chunks, tap[3];
  const int first = (chunk - tap_block * p.plane_chunks) * p.chunk_planes * p.grad.plane_channels;
  find_taps(p, tap_block, tap);
  const int kernel = p.kernel[0] * p.kernel[1] * p.kernel[2], channels = p.chunk_planes * p.grad.plane_channels;
  const int row = p.grad.channels * kernel, left = min(p.grad.channels - first, channels);
  const int rows = p.input.channels - block * columns;
  const float* const weights = static_cast<const float*>(p.weight);
  const float* const from = weights + (group * p.input.channels + block * columns) * row + first * kernel;
  const uint32_t target = shared_address(stage);
  if (p.weight_vector) {
    const int units = p.by_weight_row.divisor, count = columns * units, exist = left * kernel / 4;
    const int gap = (p.weight_channel - kernel) * 4;
#pragma unroll 4
    for (int i = thread; i < count; i += threads) {
      int unit = i, in_channel;
      const int column = p.by_weight_row(unit);
      in_channel = unit;
      const int channel = p.by_weight_channel(in_channel);
      const bool exists = column < rows && unit < exist;
      copy_or_zero<16>(target + column * p.weight_row * 4 + unit * 16 + channel * gap,
                       exists ? from + column * row + unit * 4 : weights, exists);
    }
    return;
  }
  const int width = p.axis[2].taps * p.runs, taps = p.axis[0].taps * p.axis[1].taps * width;
  for (int i = thread % 32; i < channels * taps; i += 32) {
    const int channel = i / taps;
    int at = i - channel * taps;
    const int in_channel = at, kw = tap[2] * p.runs + at % width;
    at /= width;
    const int kh = tap[1] + at % p.axis[1].taps, kd = tap[0] + at / p.axis[1].taps;
    const bool in_kernel = channel < left && kd < p.kernel[0] && kh < p.kernel[1] && kw < p.kernel[2];
    const int offset = channel * kernel + (kd * p.kernel[1] + kh) * p.kernel[2] + kw;
    const uint32_t to = target + (channel * p.weight_channel + in_channel) * 4;
#pragma unroll 4
    for (int column = thread / 32; column < columns; column += threads / 32) {
      const bool exists = in_kernel && column < rows;
      copy_or_zero<4>(to + column * p.weight_row * 4, exists ? from + column * row + offset : weights, exists);
    }
  }
}

// What the largest chunk of weights has: operands of (step, eight columns, lane).
constexpr int kPlainEntries = static_cast<int>(kDenseGradientEntries);

__device__ __forceinline__ uint32_t load_plain(uint32_t row, int at) {
  uint32_t word;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(row + max(at, 0)) : "memory");
  return at < 0 ? 0 : word;
}

template <DensePrecision kPrecision>
__device__ __forceinline__ void store_operands(char* stage, int entry, uint32_t even, uint32_t odd) {
  if constexpr (kPrecision == DensePrecision::kFloat32) {
    uint4 words;
    split_dense(even, words.x, words.z), split_dense(odd, words.y, words.w);
    reinterpret_cast<uint4*>(stage)[entry] = words;
  } else {
    reinterpret_cast<uint2*>(stage)[entry] =
        make_uint2(round_tf32(__uint_as_float(even)), round_tf32(__uint_as_float(odd)));
  }
}

// All threads of a block turn a staged chunk into operands, in its place: they read before the first one writes.
template <DensePrecision kPrecision, int kThreads>
__device__ __forceinline__ void make_operands(const DenseParams& p, const int* table, int columns, char* stage) {
  constexpr int kTurns = (kPlainEntries / 2 + kThreads - 1) / kThreads;  // of pairs of steps
  const int tile_bits = __ffs(columns / 8) - 1, step = 32 << tile_bits, pairs = (p.steps + 1) / 2 * step;
  const int lane = threadIdx.x % 32, channel = p.runs > 1 ? 1 : p.weight_channel;
  const uint32_t rows = shared_address(stage) + (lane / 4 * p.weight_row + lane % 4 * channel) * 4;
  uint32_t words[kTurns][4];
#pragma unroll
  for (int k = 0; k < kTurns; ++k) {
    const int index = threadIdx.x + k * kThreads, pair = index >> (tile_bits + 5);
    if (index >= pairs) continue;
    const uint32_t row = rows + ((index >> 5) - (pair << tile_bits)) * 8 * p.weight_row * 4;
    const int4 at = reinterpret_cast<const int4*>(table)[pair];
    words[k][0] = load_plain(row, at.x), words[k][1] = load_plain(row, at.y);
    words[k][2] = load_plain(row, at.z), words[k][3] = load_plain(row, at.w);
  }
  __syncthreads();
#pragma unroll
  for (int k = 0; k < kTurns; ++k) {
    const int index = threadIdx.x + k * kThreads, pair = index >> (tile_bits + 5), entry = index + pair * step;
    if (index >= pairs) continue;
    store_operands<kPrecision>(stage, entry, words[k][0], words[k][1]);
    if (2 * pair + 1 < p.steps) store_operands<kPrecision>(stage, entry + step, words[k][2], words[k][3]);
  }
}

}  // namespace fastconvt::cuda
