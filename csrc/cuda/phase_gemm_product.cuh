// The matrix products of the phase GEMM: 16 cells by 8 output channels by 32 bytes of input channels an instruction.
#pragma once

#include "device/numeric.cuh"
#include "device/shared_address.cuh"

namespace fastconvt::cuda {

// Four 8 x 16-byte matrices; a lane gives the address of a row and gets 4 bytes of each.
__device__ __forceinline__ void load_four(uint32_t (&r)[4], uint32_t address) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 750
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
#endif
}

__device__ __forceinline__ uint32_t rounded_tf32(uint32_t x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(x) : "f"(__uint_as_float(x)));
#endif
  return x;
}

// x becomes its leading bits, rounded to nearest; returns the rest. Inf and NaN leave NaN in one of the two.
__device__ __forceinline__ uint32_t split_off_rest(uint32_t& x) {
  const float whole = __uint_as_float(x);
  x = (x + 0x1000u) & 0xffffe000u;
  return __float_as_uint(whole - __uint_as_float(x));
}

// d += a * b, the kind of operands by T.
template <typename T>
__device__ __forceinline__ void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  if constexpr (std::is_same_v<T, float>) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else if constexpr (std::is_same_v<T, __half>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
#endif
}

// The operands of one step of a warp: a[i] of 16 cells, b[j] of 8 output channels.
template <int kRowTiles, int kColumnTiles>
struct PhaseGemmOperands {
  uint32_t a[kRowTiles][4];
  uint32_t b[kColumnTiles][2];
};

// `cells` are the lane's row addresses, `columns` its weight address; both move by the same number of bytes along the
// channels.
template <int kRowTiles, int kColumnTiles>
__device__ __forceinline__ void load_operands(PhaseGemmOperands<kRowTiles, kColumnTiles>& o,
                                              const uint32_t (&cells)[kRowTiles], uint32_t cell_shift,
                                              uint32_t columns) {
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) load_four(o.a[i], cells[i] + cell_shift);
#pragma unroll
  for (int j = 0; j < kColumnTiles; j += 2) {
    uint32_t r[4];
    load_four(r, columns + j * 128);
    o.b[j][0] = r[0], o.b[j][1] = r[1], o.b[j + 1][0] = r[2], o.b[j + 1][1] = r[3];
  }
}

// sum += a * b. kThree: float32 by three TF32 products, the small ones first, in sums of their own, since the unit
// truncates where it adds.
template <typename T, bool kThree, int kRowTiles, int kColumnTiles>
__device__ __forceinline__ void multiply_operands(float (&sum)[kRowTiles][kColumnTiles][4],
                                                  PhaseGemmOperands<kRowTiles, kColumnTiles>& o) {
  if constexpr (kThree) {
    uint32_t rest[kRowTiles][4];
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
      for (int q = 0; q < 4; ++q) rest[i][q] = split_off_rest(o.a[i][q]);
#pragma unroll
    for (int j = 0; j < kColumnTiles; ++j) {
      const uint32_t rest0 = split_off_rest(o.b[j][0]), rest1 = split_off_rest(o.b[j][1]);
      float part[kRowTiles][4] = {};
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) multiply<T>(part[i], rest[i], o.b[j][0], o.b[j][1]);
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) multiply<T>(part[i], o.a[i], rest0, rest1);
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) multiply<T>(part[i], o.a[i], o.b[j][0], o.b[j][1]);
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
        for (int q = 0; q < 4; ++q) sum[i][j][q] += part[i][q];
    }
  } else {
    if constexpr (std::is_same_v<T, float>) {  // weights are rounded where they are packed
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
        for (int q = 0; q < 4; ++q) o.a[i][q] = rounded_tf32(o.a[i][q]);
    }
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
      for (int j = 0; j < kColumnTiles; ++j) multiply<T>(sum[i][j], o.a[i], o.b[j][0], o.b[j][1]);
  }
}

}  // namespace fastconvt::cuda
