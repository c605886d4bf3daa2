// Products of positions and packed weights, step by step: the input's gradient, and the forward.
#pragma once

#include "dense_gradient_copy.cuh"
#include "dense_gradient_product.cuh"

namespace fastconvt::cuda {

// Operands of a (step, eight columns, lane): two halves, with their rests if split.
template <DensePrecision kPrecision>
constexpr int kDenseEntry = kPrecision == DensePrecision::kFloat32 ? 16 : 8;  // bytes

__device__ __forceinline__ void copy_words(const char* from, char* to, int bytes, int thread, int threads) {
#pragma unroll 4
  for (int i = thread * 16; i < bytes; i += threads * 16) copy_or_zero<16>(shared_address(to + i), from + i, true);
}

// Where a warp's operands are: steps' granules, its rows, its weights.
template <int kRows>
struct DenseOperands {
  const int* steps;
  uint32_t rows[kRows];
  uint32_t stage;
  const char* weights;
  int weight_step;
};

// Adds kSteps steps, `apart` from each other, in float32: three products for one, the small ones first. The unit
// truncates where it adds, so that long sums are made outside of it.
template <int kSteps, int kRows, int kColumns>
__device__ __forceinline__ void add_split_steps(const DenseOperands<kRows>& operands, int step, int apart,
                                                DenseSums<kRows, kColumns>& sums) {
  constexpr int kEntry = kDenseEntry<DensePrecision::kFloat32>;
  uint32_t at[kSteps];
  uint4 b[kSteps][kColumns];
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    at[k] = operands.stage + operands.steps[2 * (step + k * apart) + threadIdx.x % 32 / 16];
    const char* entry = operands.weights + (step + k * apart) * operands.weight_step;
#pragma unroll
    for (int n = 0; n < kColumns; ++n) b[k][n] = *reinterpret_cast<const uint4*>(entry + n * 32 * kEntry);
  }
#pragma unroll
  for (int m = 0; m < kRows; ++m) {
    uint32_t high[kSteps][4], low[kSteps][4];
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      uint32_t a[4];
      load_dense<false>(a, operands.rows[m] + at[k]);
#pragma unroll
      for (int i = 0; i < 4; ++i) split_dense(a[i], high[k][i], low[k][i]);
    }
    float part[kColumns][4] = {};
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
#pragma unroll
      for (int n = 0; n < kColumns; ++n) multiply_dense<float>(part[n], low[k], b[k][n].x, b[k][n].y);
#pragma unroll
      for (int n = 0; n < kColumns; ++n) multiply_dense<float>(part[n], high[k], b[k][n].z, b[k][n].w);
    }
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
#pragma unroll
      for (int n = 0; n < kColumns; ++n) multiply_dense<float>(part[n], high[k], b[k][n].x, b[k][n].y);
    }
#pragma unroll
    for (int i = 0; i < 4 * kColumns; ++i) sums[m][i / 4][i % 4] += part[i / 4][i % 4];
  }
}

// Adds a stage's steps first, first + apart, ...
template <typename T, DensePrecision kPrecision, int kRows, int kColumns>
__device__ __forceinline__ void add_dense_steps(const DenseOperands<kRows>& operands, int first, int apart, int count,
                                                DenseSums<kRows, kColumns>& sums) {
  if constexpr (kPrecision == DensePrecision::kFloat32) {
    int step = first;
#pragma unroll 1
    for (; step + apart < count; step += 2 * apart) add_split_steps<2, kRows, kColumns>(operands, step, apart, sums);
    if (step < count) add_split_steps<1, kRows, kColumns>(operands, step, apart, sums);
  } else {
    constexpr int kEntry = kDenseEntry<kPrecision>;
#pragma unroll 2
    for (int step = first; step < count; step += apart) {
      const uint32_t at = operands.stage + operands.steps[2 * step + threadIdx.x % 32 / 16];
      const char* entry = operands.weights + step * operands.weight_step;
      uint2 b[kColumns];
#pragma unroll
      for (int n = 0; n < kColumns; ++n) b[n] = *reinterpret_cast<const uint2*>(entry + n * 32 * kEntry);
      uint32_t a[kRows][4];
#pragma unroll
      for (int m = 0; m < kRows; ++m) {
        load_dense<false>(a[m], operands.rows[m] + at);
        if constexpr (kPrecision == DensePrecision::kTf32) {
#pragma unroll
          for (int i = 0; i < 4; ++i) a[m][i] = push_tf32(a[m][i]);
        }
      }
#pragma unroll
      for (int m = 0; m < kRows; ++m) {
#pragma unroll
        for (int n = 0; n < kColumns; ++n) multiply_dense<T>(sums[m][n], a[m], b[n].x, b[n].y);
      }
    }
  }
}

}  // namespace fastconvt::cuda
