// channels_last outputs of any number of channels: a position's taps along the width are one run in memory, positions
// of a row make longer ones. A warp lays its outputs out in shared memory as they will be, congruent to memory modulo
// 16 bytes, and copies whole vectors.
#pragma once

#include "pixel_shuffle_product.cuh"

namespace fastconvt::cuda {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800

template <class Traits>
class PixelShuffleRuns {
  using T = typename Traits::T;
  using Sums = typename PixelShuffleProduct<Traits>::Sums;
  static constexpr int kVector = 16 / Traits::kSize;
  static constexpr int kRun = Traits::kRun;

 public:
  __device__ PixelShuffleRuns(const PixelShuffleParams& params, uint32_t shared)
      : p(params),
        stage(static_cast<T*>(
            __cvta_shared_to_generic(shared + params.tile.outputs + threadIdx.x / 32 * params.tile.staged_bytes))) {
    run = p.kernel_width * p.tile.channels;
    line_pitch = Traits::kPositions * run + kVector;
  }

  // Of 64 rows of the order from `first_order` on, words of 32 bits at a time; value(i, j, q) makes the output of a
  // sum.
  template <class Value>
  __device__ __forceinline__ void keep(int first_order, int64_t first_place, Value&& value) const {
    constexpr int kWord = 4 / Traits::kSize;  // outputs, of neighbouring rows
    const int rows = p.tile.channels * p.taps, quad = threadIdx.x % 4;
    T* const at = stage + skew(first_place) + 2 * quad * run;
#pragma unroll
    for (int r = 0; r < Traits::kTilesM / Traits::kGroup; ++r) {
#pragma unroll
      for (int e = 0; e < kRun; e += kWord) {
        int of_line = first_order + (r * 8 + threadIdx.x % 32 / 4) * kRun + e;
        if (of_line >= rows) continue;
        const int i = r * Traits::kGroup + e / 2;
        const int line = p.by_run(of_line);
        T* to = at + line * line_pitch + of_line;
#pragma unroll
        for (int j = 0; j < Traits::kTilesN; ++j, to += 6 * run) {
#pragma unroll
          for (int h = 0; h < 2; ++h, to += run) {
            Pack<T, kWord> word;
#pragma unroll
            for (int w = 0; w < kWord; ++w) word.value[w] = value(i, j, (e + w) % 2 * 2 + h);
            *reinterpret_cast<Pack<T, kWord>*>(to) = word;
          }
        }
      }
    }
  }

  // `count` positions.
  __device__ void copy(uint32_t places, int count) const {
    __syncwarp();
    T* const output = static_cast<T*>(p.output);
    const int skip = skew(pixel_shuffle_load_place(places)), end = count * run + skip, lines = p.taps / p.kernel_width;
    int64_t line_offset = 0;
    int height = 0;
    for (int line = 0; line < lines; ++line) {
      const T* const from = stage + line * line_pitch;
#pragma unroll 4
      for (int element = threadIdx.x % 32 * kVector; element < end; element += 32 * kVector) {
        const int first = max(element - skip, 0);
        int of_position = first;
        const int position = p.by_run(of_position);
        const int64_t place = pixel_shuffle_load_place(places + 8 * position) + line_offset + of_position;
        if (element >= skip && element + kVector <= end) {
          *reinterpret_cast<uint4*>(output + place) = *reinterpret_cast<const uint4*>(from + element);
        } else {
          const int stop = min(element + kVector, end);
          for (int e = first + skip; e < stop; ++e) output[place + e - first - skip] = from[e];
        }
      }
      line_offset += p.output_axis[1];
      if (++height == p.kernel_height) height = 0, line_offset += p.output_axis[0] - p.kernel_height * p.output_axis[1];
    }
    __syncwarp();
  }

 private:
  // Elements from a multiple of 16 bytes to the output's element.
  __device__ int skew(int64_t place) const {
    return static_cast<int>(reinterpret_cast<uintptr_t>(static_cast<T*>(p.output) + place) / Traits::kSize % kVector);
  }

  const PixelShuffleParams& p;
  T* const stage;
  int run, line_pitch;
};

#endif

}  // namespace fastconvt::cuda
