// mma.sync with 16 rows (output channels), 8 columns (bases) and 8 terms (input channels): TF32 or 16-bit operands,
// float32 sums. Of lane l, row = l / 4 and quad = l % 4.
#pragma once

#include "device/numeric.cuh"
#include "device/shared_address.cuh"

namespace fastconvt::cuda {

// A lane's share of the left operand. TF32: (row, quad), (row + 8, quad), (row, quad + 4), (row + 8, quad + 4).
// 16 bits: terms 2 * quad and 2 * quad + 1 of rows `row` and `row + 8`.
template <typename T>
struct alignas(sizeof(T) * 4) MmaLeft {
  uint32_t word[sizeof(T)];
};

// NaN and inf stay what they are; the largest finite values may become inf.
__device__ inline uint32_t to_tf32(float x) {
  uint32_t word = 0;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(word) : "f"(x));
#endif
  return word;
}

template <typename T>
__device__ inline uint32_t two_halves(T low, T high) {
  static_assert(sizeof(T) == 2);
  Pack<T, 2> both{{low, high}};
  return *reinterpret_cast<const uint32_t*>(&both);
}

// load(row, term) is an element of the operand.
template <typename T, typename Load>
__device__ MmaLeft<T> make_left(int row, int quad, Load&& load) {
  MmaLeft<T> left;
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(T)); ++i) {
    if constexpr (sizeof(T) == 4) {
      left.word[i] = to_tf32(load(row + i % 2 * 8, quad + i / 2 * 4));
    } else {
      left.word[i] = two_halves(load(row + i * 8, 2 * quad), load(row + i * 8, 2 * quad + 1));
    }
  }
  return left;
}

// sum: (row, 2 * quad), (row, 2 * quad + 1), (row + 8, 2 * quad), (row + 8, 2 * quad + 1).
// right, TF32: terms quad and quad + 4 of column `row`; 16 bits: terms 2 * quad and 2 * quad + 1.
__device__ inline void multiply_add(float (&sum)[4], const MmaLeft<float>& left, uint32_t right0, uint32_t right1) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(left.word[0]), "r"(left.word[1]), "r"(left.word[2]), "r"(left.word[3]), "r"(right0), "r"(right1));
#endif
}
__device__ inline void multiply_add(float (&sum)[4], const MmaLeft<__half>& left, uint32_t right) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(left.word[0]), "r"(left.word[1]), "r"(right));
#endif
}
__device__ inline void multiply_add(float (&sum)[4], const MmaLeft<__nv_bfloat16>& left, uint32_t right) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(left.word[0]), "r"(left.word[1]), "r"(right));
#endif
}

// A lane's sums by phase of the last axis and tile; terms[i / 2] is the bias of sum i. A bias that is not finite stays
// out of the sums, where it would look like a wrong one, until here.
template <int kStride, int kTiles>
__device__ __forceinline__ void add_infinite_terms(const float (&terms)[2], float (&sum)[kStride][kTiles][4]) {
  if (__all_sync(~0u, is_finite(terms[0]) && is_finite(terms[1]))) return;
#pragma unroll
  for (int r = 0; r < kStride; ++r)
#pragma unroll
    for (int j = 0; j < kTiles; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[r][j][i] += is_finite(terms[i / 2]) ? 0.f : terms[i / 2];
}

// Inputs that do not exist are zeros, which only finite weights leave without effect, and TF32 may round to inf: both
// show in a sum that is not finite.
template <int kStride, int kTiles>
__device__ __forceinline__ bool are_finite(const float (&sum)[kStride][kTiles][4]) {
  float probe[4] = {};
#pragma unroll
  for (int r = 0; r < kStride; ++r)
#pragma unroll
    for (int j = 0; j < kTiles; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) probe[i] = fmaf(sum[r][j][i], 0.f, probe[i]);
  return __all_sync(~0u, (probe[0] + probe[1]) + (probe[2] + probe[3]) == 0.f);
}

}  // namespace fastconvt::cuda
