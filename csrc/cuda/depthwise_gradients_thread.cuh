// What a thread of depthwise_gradients.cuh keeps in registers, and how it adds a row of the output's gradient.
#pragma once

#include "depthwise_gradients_params.cuh"

namespace fastconvt::cuda {

// A bit for each column that the inputs from x on reach and that exists.
template <class Traits>
__device__ __forceinline__ unsigned existing_columns(const AxisParams& width, int x) {
  constexpr unsigned kAll = (1u << Traits::kColumns) - 1;
  const int first = x * Traits::kStride - width.padding, left = static_cast<int>(width.out) - first;
  const unsigned from = first >= 0 ? kAll : first > -32 ? kAll << -first : 0;
  const unsigned to = left >= Traits::kColumns ? kAll : left > 0 ? (1u << left) - 1 : 0;
  return from & to;
}

// In a single axis, how many columns of the inputs from x on the bias's gradient takes: all are taken once.
template <class Traits>
__device__ __forceinline__ int bias_columns_of(const AxisParams& width, int x) {
  const int left = static_cast<int>(width.in) - x;
  if (left <= 0) return 0;
  if (left > Traits::kInputs) return Traits::kInputs * Traits::kStride;
  return left * Traits::kStride + Traits::kKernel - Traits::kStride;
}

// Keeps the first plane's share of what is complete at the next base of the depth, and adds the last one's.
template <class Traits>
__device__ __forceinline__ void exchange_planes(float* plane, float (&value)[Traits::kDepth][Traits::kInputs]) {
#pragma unroll
  for (int e = 0; e < Traits::kInputs; ++e) {
    const float kept = plane[e];
    plane[e] = value[0][e];
    value[0][e] = kept + value[Traits::kDepth - 1][e];
  }
}

// The columns of a staged row that a thread reaches, from kAt on: in vectors as large as their alignment allows.
template <class Traits, int kAt = 0>
__device__ __forceinline__ void load_columns(const typename Traits::T* row, float (&grad)[Traits::kColumns]) {
  using T = typename Traits::T;
  constexpr auto fits = [](int count) {
    return Traits::kModulus % count == 0 && (Traits::kFirst + kAt) % count == 0 && kAt + count <= Traits::kColumns &&
           count <= Traits::kChunk;
  };
  constexpr int kLoad = fits(8) ? 8 : fits(4) ? 4 : fits(2) ? 2 : 1;
  const auto pack = *reinterpret_cast<const Pack<T, kLoad>*>(row + kAt);
#pragma unroll
  for (int e = 0; e < kLoad; ++e) grad[kAt + e] = to_accumulator(pack.value[e]);
  if constexpr (kAt + kLoad < Traits::kColumns) load_columns<Traits, kAt + kLoad>(row, grad);
}

// x, or zero.
__device__ __forceinline__ float keep_bits(float x, int mask) { return __int_as_float(__float_as_int(x) & mask); }

template <class Traits>
struct DepthwiseGradientsThread {
  using T = typename Traits::T;
  static constexpr int kInputs = Traits::kInputs, kDepth = Traits::kDepth, kHeight = Traits::kHeight;
  static constexpr int kPhases = Traits::kPhases, kKernel = Traits::kKernel, kStride = Traits::kStride;
  static constexpr int kColumns = Traits::kColumns;

  float weight[kPhases][kDepth][kHeight][kKernel], sum[kPhases][kDepth][kHeight][kKernel];
  float bias = 0;
  float input[kDepth][kHeight][kInputs];  // of the last bases, the latest first
  float carry[kDepth][kHeight][kInputs];  // for the next bases; one more than is needed
  float part[kDepth][kHeight][kInputs];   // of this base

  __device__ __forceinline__ void begin() {
#pragma unroll
    for (int i = 0; i < kDepth * kHeight * kInputs; ++i)
      part[i / (kHeight * kInputs)][i / kInputs % kHeight][i % kInputs] = 0;
  }

  __device__ __forceinline__ void restart() {
#pragma unroll
    for (int i = 0; i < kDepth * kHeight * kInputs; ++i) {
      input[i / (kHeight * kInputs)][i / kInputs % kHeight][i % kInputs] = 0;
      carry[i / (kHeight * kInputs)][i / kInputs % kHeight][i % kInputs] = 0;
    }
  }

  __device__ __forceinline__ float& sum_at(int i) { return (&sum[0][0][0][0])[i]; }
  __device__ __forceinline__ float& weight_at(int i) { return (&weight[0][0][0][0])[i]; }

  // To this thread's column of shared memory.
  __device__ __forceinline__ void keep(float* column) {
#pragma unroll
    for (int i = 0; i < Traits::kSums; ++i) {
      column[i * Traits::kThreads] += sum_at(i);
      sum_at(i) = 0;
    }
    column[Traits::kSums * Traits::kThreads] += bias;
    bias = 0;
  }

  __device__ __forceinline__ void load_inputs(const T* source, int plane_pitch, const int (&rows)[kDepth], int row) {
#pragma unroll
    for (int d = 0; d < kDepth; ++d) {
      const auto pack = *reinterpret_cast<const Pack<T, kInputs>*>(source + d * plane_pitch);
#pragma unroll
      for (int e = 0; e < kInputs; ++e)
        input[d][0][e] = Traits::kFlat || row < rows[d] ? to_accumulator(pack.value[e]) : 0.f;
    }
  }

  // The sum of the inputs' own columns.
  __device__ __forceinline__ float own_columns(const float (&grad)[kColumns]) const {
    float total = grad[Traits::kMargin];
#pragma unroll
    for (int e = 1; e < Traits::kOwn; ++e) total += grad[Traits::kMargin + e];
    return total;
  }

  // All of them, or the first `count` columns.
  __device__ __forceinline__ void add_bias(const float (&grad)[kColumns], bool whole, int count) {
    float total = 0;
    if (whole) {
      total = own_columns(grad);
    } else {
#pragma unroll
      for (int e = 0; e < kColumns; ++e) total += e < count ? grad[e] : 0.f;
    }
    bias += total;
  }

  // A row of the output's gradient, of phase `ph`, meets the inputs.
  template <bool kStarts>
  __device__ __forceinline__ void add_row(int ph, const float (&grad)[kColumns]) {
#pragma unroll
    for (int d = 0; d < kDepth; ++d) {
#pragma unroll
      for (int h = 0; h < kHeight; ++h) {
#pragma unroll
        for (int t = 0; t < kKernel; ++t) {
#pragma unroll
          for (int i = 0; i < kInputs; ++i) {
            const float g = grad[i * kStride + t], w = weight[ph][d][h][t];
            part[d][h][i] = kStarts && t == 0 ? w * g : fmaf(w, g, part[d][h][i]);
            sum[ph][d][h][t] = fmaf(input[d][h][i], g, sum[ph][d][h][t]);
          }
        }
      }
    }
  }

  // Ends a base: gives the input's gradients that are complete.
  __device__ __forceinline__ void finish(float (&value)[kDepth][kInputs]) {
#pragma unroll
    for (int d = 0; d < kDepth; ++d) {
#pragma unroll
      for (int i = 0; i < kInputs; ++i) {
        value[d][i] =
            kHeight > 1 ? carry[d][kHeight > 1 ? kHeight - 2 : 0][i] + part[d][kHeight - 1][i] : part[d][0][i];
#pragma unroll
        for (int h = kHeight - 2; h >= 0; --h) {
          carry[d][h][i] = h > 0 ? carry[d][h > 0 ? h - 1 : 0][i] + part[d][h][i] : part[d][h][i];
        }
#pragma unroll
        for (int h = kHeight - 1; h > 0; --h) input[d][h][i] = input[d][h > 0 ? h - 1 : 0][i];
      }
    }
#pragma unroll
    for (int apart = Traits::kClasses / 2; apart > 0; apart /= 2) {
#pragma unroll
      for (int i = 0; i < kDepth * kInputs; ++i) {
        float& v = value[i / kInputs][i % kInputs];
        v += __shfl_xor_sync(0xffffffffu, v, apart * Traits::kNextClass);
      }
    }
  }
};

// The tap of place `place` in the window of phase r; negative if there is none.
__device__ __forceinline__ int window_tap_of(const AxisParams& axis, const FastDivide& by_dilation, int r, int place) {
  int rest = r + place * axis.stride;
  const int tap = by_dilation(rest);
  return tap < axis.kernel && rest == 0 ? tap : -1;
}

}  // namespace fastconvt::cuda
