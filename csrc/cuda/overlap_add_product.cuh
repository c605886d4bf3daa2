// The overlap-add family's matrix products: 16 cells by 8 columns by 8 words of channels.
#pragma once

#include "device/shared_address.cuh"
#include "overlap_add_stage.cuh"

namespace fastconvt::cuda {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800

using OverlapAddLeft = uint32_t[4];  // cells (g, g + 8) of words t, then of words t + 4

__device__ __forceinline__ void overlap_add_load_left(OverlapAddLeft& left, uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(left[0]), "=r"(left[1]), "=r"(left[2]), "=r"(left[3])
               : "r"(address)
               : "memory");
}
__device__ __forceinline__ void overlap_add_load_right(uint32_t (&right)[2], uint32_t address) {
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(right[0]), "=r"(right[1]) : "r"(address) : "memory");
}

__device__ __forceinline__ void overlap_add_tf32(float (&sum)[4], const OverlapAddLeft& left,
                                                 const uint32_t (&right)[2]) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right[0]), "r"(right[1]));
}
// From zero.
__device__ __forceinline__ void overlap_add_start_tf32(float (&sum)[4], const OverlapAddLeft& left,
                                                       const uint32_t (&right)[2]) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%10, %10, %10, %10};"
      : "=f"(sum[0]), "=f"(sum[1]), "=f"(sum[2]), "=f"(sum[3])
      : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right[0]), "r"(right[1]), "f"(0.f));
}
// From zero.
__device__ __forceinline__ void overlap_add_start_16(float (&sum)[4], const OverlapAddLeft& left,
                                                     const uint32_t (&right)[2]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%10, %10, %10, %10};"
      : "=f"(sum[0]), "=f"(sum[1]), "=f"(sum[2]), "=f"(sum[3])
      : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right[0]), "r"(right[1]), "f"(0.f));
}
template <typename T>
__device__ __forceinline__ void overlap_add_16(float (&sum)[4], const OverlapAddLeft& left,
                                               const uint32_t (&right)[2]) {
  if constexpr (std::is_same_v<T, __half>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right[0]), "r"(right[1]));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right[0]), "r"(right[1]));
  }
}

__device__ __forceinline__ int4 overlap_add_load_entry(uint32_t address) {
  int4 entry;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(entry.x), "=r"(entry.y), "=r"(entry.z), "=r"(entry.w)
               : "r"(address)
               : "memory");
  return entry;
}

// The operands of one entry: kRows tiles of 16 cells, kTiles column tiles.
template <int kRows, int kTiles>
struct OverlapAddOperands {
  OverlapAddLeft left[kRows];
  uint32_t right[kTiles][2];
  int exists[kTiles];  // -1: it does not
};

// sum += left * right, for every column tile that exists: the same for all lanes.
template <typename T, OverlapAddPrecision kPrecision, int kRows, int kTiles>
__device__ __forceinline__ void overlap_add_multiply(const OverlapAddOperands<kRows, kTiles>& o,
                                                     float (&sum)[kTiles][kRows][4]) {
#pragma unroll
  for (int j = 0; j < kTiles; ++j) {
    if (o.exists[j] < 0) continue;
#pragma unroll
    for (int m = 0; m < kRows; ++m) {
      if constexpr (kPrecision == OverlapAddPrecision::kTf32) {
        overlap_add_tf32(sum[j][m], o.left[m], o.right[j]);
      } else {
        overlap_add_16<T>(sum[j][m], o.left[m], o.right[j]);
      }
    }
  }
}
// The same for float32. The right operands, with their rests, are loaded here, since registers are short.
template <int kRows, int kTiles>
__device__ __forceinline__ void overlap_add_multiply_strict(OverlapAddOperands<kRows, kTiles>& o, uint32_t weights,
                                                            float (&sum)[kTiles][kRows][4]) {
  OverlapAddLeft rest[kRows];
#pragma unroll
  for (int m = 0; m < kRows; ++m) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      overlap_add_halve(o.left[m][i], rest[m][i]);
      // Once for all column tiles.
      asm volatile("" : "+r"(o.left[m][i]), "+r"(rest[m][i]));
    }
  }
#pragma unroll
  for (int j = 0; j < kTiles; ++j) {
    if (o.exists[j] < 0) continue;
    uint32_t both[4];
    overlap_add_load(both, weights + o.exists[j]);
    const uint32_t right[2] = {both[0], both[1]}, right_rest[2] = {both[2], both[3]};
    // A float32 sum outside the matrix unit, which truncates.
    float term[kRows][4];
#pragma unroll
    for (int m = 0; m < kRows; ++m) overlap_add_start_tf32(term[m], rest[m], right);
#pragma unroll
    for (int m = 0; m < kRows; ++m) overlap_add_tf32(term[m], o.left[m], right_rest);
#pragma unroll
    for (int m = 0; m < kRows; ++m) overlap_add_tf32(term[m], o.left[m], right);
#pragma unroll
    for (int m = 0; m < kRows; ++m) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[j][m][i] += term[m][i];
    }
  }
}

// The same for factors that are sums of three terms, the largest one first: two offsets are the sixteen of an inner
// dimension.
using OverlapAddThreeLeft = OverlapAddLeft[3];
using OverlapAddThreeRight = uint32_t[3][2];

template <int kRows>
__device__ __forceinline__ void overlap_add_multiply_three(const OverlapAddThreeLeft (&left)[kRows],
                                                           const OverlapAddThreeRight& right, float (&sum)[kRows][4]) {
  // The smallest products first; those below 2^-25 are left out. In a sum outside the matrix unit, which truncates.
  constexpr int kOrder[6][2] = {{2, 0}, {0, 2}, {1, 1}, {1, 0}, {0, 1}, {0, 0}};
  float term[kRows][4];
#pragma unroll
  for (int m = 0; m < kRows; ++m) overlap_add_start_16(term[m], left[m][kOrder[0][0]], right[kOrder[0][1]]);
#pragma unroll
  for (int i = 1; i < 6; ++i) {
#pragma unroll
    for (int m = 0; m < kRows; ++m) {
      overlap_add_16<__nv_bfloat16>(term[m], left[m][kOrder[i][0]], right[kOrder[i][1]]);
    }
  }
#pragma unroll
  for (int m = 0; m < kRows; ++m) {
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[m][i] += term[m][i];
  }
}

#endif

}  // namespace fastconvt::cuda
