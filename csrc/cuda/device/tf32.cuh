// Float32 products on tensor cores (compute capability 8.0). A float32 number is split into two TF32 ones, so that
// three products of halves stand for one of float32: what is left out is below 2^-21 of it.
#pragma once

#include "shared_address.cuh"

namespace fastconvt::cuda {

// x = high + low; high has the 11 leading bits.
__device__ __forceinline__ void split_tf32(float x, float& high, float& low) {
  high = __uint_as_float(__float_as_uint(x) & 0xffffe000u);
  low = x - high;
}

// The same with `high` rounded to nearest: for what is split once and used often.
__device__ __forceinline__ void split_tf32_rounded(float x, float& high, float& low) {
  high = __uint_as_float((__float_as_uint(x) + 0x1000u) & 0xffffe000u);
  low = x - high;
}

// To nearest, halves away from zero.
__device__ __forceinline__ uint32_t rounded_tf32(uint32_t x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(x) : "f"(__uint_as_float(x)));
#endif
  return x;
}

// d += a * b: 16 x 8 by 8 x 8. With g = lane / 4 and t = lane % 4, a lane holds a[g][t], a[g + 8][t], a[g][t + 4],
// a[g + 8][t + 4]; b[t][g], b[t + 4][g]; d[g][2 t], d[g][2 t + 1], d[g + 8][2 t], d[g + 8][2 t + 1].
// NOTE: the hardware drops the bits below a TF32 number's of what it multiplies, and truncates where it adds.
__device__ __forceinline__ void multiply_tf32(float (&d)[4], const float (&a)[4], float b0, float b1) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])), "r"(__float_as_uint(a[3])),
        "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)));
#endif
}

// Four 8 x 4 matrices of floats: lane i gives the address of 16 bytes, row i % 8 of matrix i / 8, and gets element
// (lane / 4, lane % 4) of each.
__device__ __forceinline__ void load_matrices(float (&a)[4], uint32_t shared_address) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 750
  uint32_t r0, r1, r2, r3;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r0), "=r"(r1), "=r"(r2), "=r"(r3)
               : "r"(shared_address)
               : "memory");
  a[0] = __uint_as_float(r0), a[1] = __uint_as_float(r1), a[2] = __uint_as_float(r2), a[3] = __uint_as_float(r3);
#endif
}

}  // namespace fastconvt::cuda
