// Products of positions and plain weights, which lie in rows: each warp makes operands of what it multiplies.
#pragma once

#include "dense_input_gradient_plain.cuh"

namespace fastconvt::cuda {

// Where a warp's operands are: granules of both, its rows, what this lane reads of its first columns.
template <int kRows>
struct DensePlainOperands {
  const int* steps;
  const int* table;
  uint32_t rows[kRows];
  uint32_t stage, weights;
  int columns;  // bytes of eight rows of weights
  bool quads;
};

// The operands of 2 kSteps granules, from the first one.
template <int kSteps, int kRows, int kColumns>
__device__ __forceinline__ void load_plain_weights(const DensePlainOperands<kRows>& o, int granule,
                                                   uint32_t (&words)[kColumns][2 * kSteps]) {
  if (kSteps == 2 && o.quads) {
    const uint32_t at = o.weights + o.table[granule];
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
      asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(words[n][0]), "=r"(words[n][1]), "=r"(words[n][2 * kSteps - 2]),
                     "=r"(words[n][2 * kSteps - 1])
                   : "r"(at + n * o.columns)
                   : "memory");
    }
    return;
  }
#pragma unroll
  for (int k = 0; k < 2 * kSteps; ++k) {
    const int at = o.table[granule + k];
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
      uint32_t word;
      asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(o.weights + max(at, 0) + n * o.columns) : "memory");
      words[n][k] = at < 0 ? 0 : word;
    }
  }
}

// Adds kSteps steps, from the first granule; float32 takes three products for one, as in dense_gradient_steps.cuh.
template <DensePrecision kPrecision, int kSteps, int kRows, int kColumns>
__device__ __forceinline__ void add_plain_steps(const DensePlainOperands<kRows>& o, int granule,
                                                uint32_t (&b)[kColumns][2 * kSteps], DenseSums<kRows, kColumns>& sums) {
  constexpr bool kSplit = kPrecision == DensePrecision::kFloat32;
  uint32_t at[kSteps], rest[kColumns][2 * kSteps];
#pragma unroll
  for (int k = 0; k < kSteps; ++k) at[k] = o.stage + o.steps[granule + 2 * k + threadIdx.x % 32 / 16];
#pragma unroll
  for (int n = 0; n < kColumns; ++n) {
#pragma unroll
    for (int k = 0; k < 2 * kSteps; ++k) {
      if constexpr (kSplit) {
        split_dense(b[n][k], b[n][k], rest[n][k]);
      } else {
        b[n][k] = round_tf32(__uint_as_float(b[n][k]));
      }
    }
  }
#pragma unroll
  for (int m = 0; m < kRows; ++m) {
    uint32_t high[kSteps][4], low[kSteps][4];
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      uint32_t a[4];
      load_dense<false>(a, o.rows[m] + at[k]);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if constexpr (kSplit) {
          split_dense(a[i], high[k][i], low[k][i]);
        } else {
          high[k][i] = push_tf32(a[i]);
        }
      }
    }
    if constexpr (kSplit) {
      float part[kColumns][4] = {};
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
#pragma unroll
        for (int n = 0; n < kColumns; ++n) multiply_dense<float>(part[n], low[k], b[n][2 * k], b[n][2 * k + 1]);
#pragma unroll
        for (int n = 0; n < kColumns; ++n) multiply_dense<float>(part[n], high[k], rest[n][2 * k], rest[n][2 * k + 1]);
      }
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
#pragma unroll
        for (int n = 0; n < kColumns; ++n) multiply_dense<float>(part[n], high[k], b[n][2 * k], b[n][2 * k + 1]);
      }
#pragma unroll
      for (int i = 0; i < 4 * kColumns; ++i) sums[m][i / 4][i % 4] += part[i / 4][i % 4];
    } else {
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
#pragma unroll
        for (int n = 0; n < kColumns; ++n) multiply_dense<float>(sums[m][n], high[k], b[n][2 * k], b[n][2 * k + 1]);
      }
    }
  }
}

// Adds a stage's pairs of steps first, first + apart, ...
template <DensePrecision kPrecision, int kRows, int kColumns>
__device__ __forceinline__ void add_plain_stage(const DensePlainOperands<kRows>& o, int first, int apart, int count,
                                                DenseSums<kRows, kColumns>& sums) {
  int step = 2 * first;
#pragma unroll 1
  for (; step + 1 < count; step += 2 * apart) {
    uint32_t b[kColumns][4];
    load_plain_weights<2, kRows, kColumns>(o, 2 * step, b);
    add_plain_steps<kPrecision, 2, kRows, kColumns>(o, 2 * step, b, sums);
  }
  if (step < count) {
    uint32_t b[kColumns][2];
    load_plain_weights<1, kRows, kColumns>(o, 2 * step, b);
    add_plain_steps<kPrecision, 1, kRows, kColumns>(o, 2 * step, b, sums);
  }
}

}  // namespace fastconvt::cuda
