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

// x = high + low; high is rounded to nearest, so that low * low is below 2^-22 of a product, and low of any sign. The
// hardware drops the bits of `high` below a TF32 number's. NaN and inf make `low` NaN.
__device__ __forceinline__ void overlap_add_halve(uint32_t& high, uint32_t& low) {
  const float x = __uint_as_float(high);
  high += 0x1000;
  low = __float_as_uint(x - __uint_as_float(high & 0xffffe000u));
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
  int exists[kTiles];
};

// sum += left * right, for every column tile that exists: the same for all lanes.
template <typename T, OverlapAddPrecision kPrecision, int kRows, int kTiles>
__device__ __forceinline__ void overlap_add_multiply(OverlapAddOperands<kRows, kTiles>& o,
                                                     float (&sum)[kTiles][kRows][4]) {
  OverlapAddLeft rest[kRows];
  if constexpr (kPrecision == OverlapAddPrecision::kFloat32) {
#pragma unroll
    for (int m = 0; m < kRows; ++m) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        overlap_add_halve(o.left[m][i], rest[m][i]);
        // Once for all column tiles.
        asm volatile("" : "+r"(o.left[m][i]), "+r"(rest[m][i]));
      }
    }
  }
#pragma unroll
  for (int j = 0; j < kTiles; ++j) {
    if (o.exists[j] < 0) continue;
    if constexpr (kPrecision == OverlapAddPrecision::kFloat32) {
      // A float32 sum outside the matrix unit, which truncates.
      uint32_t right_rest[2];
      overlap_add_halve(o.right[j][0], right_rest[0]), overlap_add_halve(o.right[j][1], right_rest[1]);
      float term[kRows][4];
#pragma unroll
      for (int m = 0; m < kRows; ++m) overlap_add_start_tf32(term[m], rest[m], o.right[j]);
#pragma unroll
      for (int m = 0; m < kRows; ++m) overlap_add_tf32(term[m], o.left[m], right_rest);
#pragma unroll
      for (int m = 0; m < kRows; ++m) overlap_add_tf32(term[m], o.left[m], o.right[j]);
#pragma unroll
      for (int m = 0; m < kRows; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[j][m][i] += term[m][i];
      }
    } else if constexpr (kPrecision == OverlapAddPrecision::kTf32) {
#pragma unroll
      for (int m = 0; m < kRows; ++m) overlap_add_tf32(sum[j][m], o.left[m], o.right[j]);
    } else {
#pragma unroll
      for (int m = 0; m < kRows; ++m) overlap_add_16<T>(sum[j][m], o.left[m], o.right[j]);
    }
  }
}

#endif

}  // namespace fastconvt::cuda
