// What the persistent row family needs of mma.sync beyond rows_mma_fragment.cuh: for 16-bit operands, and for float32
// ones that are split into two TF32 terms.
#pragma once

#include "device/tf32.cuh"
#include "rows_mma_fragment.cuh"

namespace fastconvt::cuda {

// Sixteen terms: 8 with `left`, 8 with `next`.
__device__ inline void multiply_add_two(float (&sum)[4], const MmaLeft<__half>& left, const MmaLeft<__half>& next,
                                        uint32_t right, uint32_t next_right) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(left.word[0]), "r"(left.word[1]), "r"(next.word[0]), "r"(next.word[1]), "r"(right), "r"(next_right));
#endif
}
__device__ inline void multiply_add_two(float (&sum)[4], const MmaLeft<__nv_bfloat16>& left,
                                        const MmaLeft<__nv_bfloat16>& next, uint32_t right, uint32_t next_right) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(left.word[0]), "r"(left.word[1]), "r"(next.word[0]), "r"(next.word[1]), "r"(right), "r"(next_right));
#endif
}

// Two values, rounded, in a word.
__device__ inline uint32_t rounded_pair(__half, float low, float high) {
  const __half2 both = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&both);
}
__device__ inline uint32_t rounded_pair(__nv_bfloat16, float low, float high) {
  const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&both);
}

// make_left for both terms.
template <typename Load>
__device__ void make_split_left(int row, int quad, Load&& load, MmaLeft<float>& high, MmaLeft<float>& low) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float terms[2];
    split_tf32_rounded(load(row + i % 2 * 8, quad + i / 2 * 4), terms[0], terms[1]);
    high.word[i] = __float_as_uint(terms[0]);
    low.word[i] = __float_as_uint(terms[1]);
  }
}

// Whether sums of split operands are right: finite, and not so small, unless they are zero, that a factor's second term
// may have been lost below the smallest TF32 numbers. Magnitudes are added up: what overflows there is made again, too.
template <int kStride, int kTiles>
__device__ __forceinline__ bool are_exact(const float (&sum)[kStride][kTiles][4]) {
  constexpr float kSmall = 7.9e-31f;  // 2^-100
  float magnitude[4] = {};
#pragma unroll
  for (int r = 0; r < kStride; ++r)
#pragma unroll
    for (int j = 0; j < kTiles; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) magnitude[i] += fabsf(sum[r][j][i]);
  bool exact = true;
#pragma unroll
  for (int channel = 0; channel < 2; ++channel) {
    const float both = magnitude[2 * channel] + magnitude[2 * channel + 1];
    exact = exact && is_finite(both) && (both == 0 || both >= kSmall);
  }
  return __all_sync(~0u, exact);
}

// Four matrices of 8 x 8 16-bit elements: lane i gives the address of 16 bytes, row i % 8 of matrix i / 8, and gets
// rows 2 * quad and 2 * quad + 1 of column `row`: right operands of 8 terms.
__device__ inline void load_transposed(const void* at, uint32_t* matrix) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 750
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(matrix[0]), "=r"(matrix[1]), "=r"(matrix[2]), "=r"(matrix[3])
               : "r"(shared_address(at))
               : "memory");
#endif
}

}  // namespace fastconvt::cuda
