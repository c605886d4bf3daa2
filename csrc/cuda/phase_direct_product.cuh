// The phase-direct family's arithmetic: all taps of one channel for the cells of a thread.
#pragma once

#include "phase_direct_params.cuh"

namespace fastconvt::cuda {

template <class Traits>
struct PhaseDirectProduct {
  static constexpr int kRows = Traits::kRows, kColumns = Traits::kColumns, kStride = Traits::kStride,
                       kKernel = Traits::kKernel, kReach = Traits::kReach;
  static constexpr int kWidth = kColumns + kReach - 1;  // inputs of a row of a thread

  // Of rows of cells, phases of the height, columns, phases of the width: as outputs lie.
  using Sums = float[kRows][kStride][kColumns][kStride];
  using Window = float[kRows][kWidth];

  static __device__ __forceinline__ float& at(Sums& sum, int i) {
    return sum[i / (kStride * kColumns * kStride)][i / (kColumns * kStride) % kStride][i / kStride % kColumns]
              [i % kStride];
  }
  static __device__ __forceinline__ void clear(Sums& sum) {
#pragma unroll
    for (int i = 0; i < Traits::kSums; ++i) at(sum, i) = 0;
  }

  // `from` is kLead after an address that is aligned to 16 bytes.
  static __device__ __forceinline__ void load_row(float (&x)[kWidth], const float* from) {
#pragma unroll
    for (int i = 0, size = 0; i < kWidth; i += size) {
      const int left = kWidth - i, place = (Traits::kLead + i) % 4;
      size = place == 0 && left >= 4 ? 4 : place % 2 == 0 && left >= 2 ? 2 : 1;
      if (size == 4) {
        const float4 v = *reinterpret_cast<const float4*>(from + i);
        x[i] = v.x, x[i + 1] = v.y, x[i + 2] = v.z, x[i + 3] = v.w;
      } else if (size == 2) {
        const float2 v = *reinterpret_cast<const float2*>(from + i);
        x[i] = v.x, x[i + 1] = v.y;
      } else {
        x[i] = from[i];
      }
    }
  }

  // The taps of a kernel's row, which make the phase `phase` of the height. A window's row r is x[(first + r) % kRows].
  template <bool kSet>
  static __device__ __forceinline__ void multiply_row(const float (&w)[kKernel], const Window& x, int first, int phase,
                                                      Sums& sum) {
#pragma unroll
    for (int tap = 0; tap < kKernel; ++tap) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
          const float value = x[(first + r) % kRows][c + kReach - 1 - tap / kStride];
          float& s = sum[r][phase][c][tap % kStride];
          s = kSet && tap < kStride ? w[tap] * value : fmaf(w[tap], value, s);
        }
      }
    }
  }

  // Sums of many taps go to totals after each chain of channels; those of few, which stay within the rule of accuracy
  // for all channels of a warp, only in the end.
  static __host__ __device__ constexpr bool is_light(int i) {
    const int y = i / (kColumns * kStride) % kStride, x = i % kStride;
    return ((kKernel - y + kStride - 1) / kStride) * ((kKernel - x + kStride - 1) / kStride) <= 4;
  }
  static __device__ __forceinline__ void move(Sums& sum, Sums& total) {
#pragma unroll
    for (int i = 0; i < Traits::kSums; ++i) {
      if (is_light(i)) continue;
      at(total, i) += at(sum, i);
      if (Traits::kChain != 1) at(sum, i) = 0;
    }
  }
  static __device__ __forceinline__ void copy_light(Sums& sum, Sums& total) {
#pragma unroll
    for (int i = 0; i < Traits::kSums; ++i) {
      if (is_light(i)) at(total, i) = at(sum, i);
    }
  }

  // kSet: sum = the channel's products, instead of +=. The window moves down a row at a time, so each row is loaded
  // once; weights come four at a time, to all lanes. The compiler spreads the loads some 40 instructions ahead.
  template <bool kSet>
  static __device__ __forceinline__ void run(const float* input, const float* weights, Sums& sum) {
    Window x;
#pragma unroll
    for (int r = 0; r < kRows - 1; ++r) load_row(x[r], input + r * Traits::kPitch);
    float4 four = {};
    int place = 0;
#pragma unroll
    for (int step = 0; step < kReach; ++step) {
      load_row(x[(step + kRows - 1) % kRows], input + (step + kRows - 1) * Traits::kPitch);
      const int back = kReach - 1 - step;
#pragma unroll
      for (int phase = 0; phase < kStride; ++phase) {
        if (phase + kStride * back >= kKernel) continue;
        float w[kKernel];
#pragma unroll
        for (int tap = 0; tap < kKernel; ++tap, ++place) {
          if (place % 4 == 0) four = reinterpret_cast<const float4*>(weights)[place / 4];
          w[tap] = place % 4 == 0 ? four.x : place % 4 == 1 ? four.y : place % 4 == 2 ? four.z : four.w;
        }
        if (kSet && phase + kStride * (back + 1) >= kKernel) {
          multiply_row<true>(w, x, step, phase, sum);
        } else {
          multiply_row<false>(w, x, step, phase, sum);
        }
      }
    }
  }
};

}  // namespace fastconvt::cuda
