// Products of the three precisions on matrix units, and sums of a warp.
#pragma once

#include "dense_gradient.cuh"

namespace fastconvt::cuda {

__device__ __forceinline__ uint32_t round_tf32(float x) {
  uint32_t bits = __float_as_uint(x);
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
#endif
  return bits;
}

// Rounds in that the matrix unit drops the bits below a TF32 number's: an error of at most 2^-11 of x. Infinity and NaN
// stay what they are.
__device__ __forceinline__ uint32_t push_tf32(uint32_t x) {
  return __float_as_uint(__uint_as_float(x) * (1 + 1.f / 2048));
}
// Rounds to nearest; what is not finite, or above 2^115, becomes NaN.
__device__ __forceinline__ uint32_t nearest_tf32(uint32_t x) {
  const float value = __uint_as_float(x), scaled = __fmul_rn(value, 8193.f);
  return __float_as_uint(__fsub_rn(scaled, __fsub_rn(scaled, value)));
}
// x as a sum of two TF32 numbers. Infinity, NaN and numbers that round to infinity make a rest that is infinite or NaN.
__device__ __forceinline__ void split_dense(uint32_t x, uint32_t& high, uint32_t& low) {
  high = (x + 0x1000u) & 0xffffe000u;
  low = push_tf32(__float_as_uint(__uint_as_float(x) - __uint_as_float(high)));
}

// d += a * b: 16 rows by 8 columns; the inner dimension is 16 elements of 16 bits, or 8 of 32 bits. With g = lane / 4
// and t = lane % 4, a[0] and a[1] are rows g and g + 8 of the first half, elements t of 32 bits, a[2] and a[3] of the
// second; b[0] and b[1] column g of the halves; d[0] and d[1] are row g, columns 2 t and 2 t + 1, the others row g + 8.
template <typename T>
__device__ __forceinline__ void multiply_dense(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  if constexpr (sizeof(T) == 4) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, "
        "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
        "%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else if constexpr (std::is_same_v<T, __half>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, "
        "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
        "%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, "
        "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, "
        "%2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
#endif
}

// Four 8 x 8 matrices of 16 bits, or 8 x 4 of 32 bits: lane i gives the address of row i % 8 of matrix i / 8.
template <bool kTransposed>
__device__ __forceinline__ void load_dense(uint32_t (&a)[4], uint32_t address) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 750
  if constexpr (kTransposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
                 : "r"(address)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
                 : "r"(address)
                 : "memory");
  }
#endif
}

// The sums of a warp, as the unit leaves them.
template <int kRows, int kColumns>
using DenseSums = float[kRows][kColumns][4];

// Adds what a thread has in shared memory, `room`, and its sums there, or in the registers at the end.
template <int kRows, int kColumns>
__device__ __forceinline__ void flush_dense(float4* room, bool first, bool last, DenseSums<kRows, kColumns>& sums) {
#pragma unroll
  for (int i = 0; i < kRows * kColumns; ++i) {
    auto& s = sums[i / kColumns][i % kColumns];
    float4& total = room[i * kDenseConsumers<float>];
    if (!first) {
      const float4 t = total;
      s[0] += t.x, s[1] += t.y, s[2] += t.z, s[3] += t.w;
    }
    if (last) continue;
    total = make_float4(s[0], s[1], s[2], s[3]);
    s[0] = s[1] = s[2] = s[3] = 0;
  }
}

// The sums of warps that shared the steps come together in those of the first ones.
template <int kRows, int kColumns>
__device__ __forceinline__ void reduce_dense(int consumers, int warps, int warps_k, int warp, int warp_k, float4* room,
                                             DenseSums<kRows, kColumns>& sums) {
  const int lane = threadIdx.x % 32;
  if (warp_k > 0) {
#pragma unroll
    for (int i = 0; i < kRows * kColumns; ++i) {
      const auto& s = sums[i / kColumns][i % kColumns];
      room[(((warp_k - 1) * warps + warp) * kRows * kColumns + i) * 32 + lane] = make_float4(s[0], s[1], s[2], s[3]);
    }
  }
  dense_wait(kDenseTeam, consumers);
  if (warp_k == 0) {
    for (int k = 1; k < warps_k; ++k) {
#pragma unroll
      for (int i = 0; i < kRows * kColumns; ++i) {
        const float4 s = room[(((k - 1) * warps + warp) * kRows * kColumns + i) * 32 + lane];
        auto& to = sums[i / kColumns][i % kColumns];
        to[0] += s.x, to[1] += s.y, to[2] += s.z, to[3] += s.w;
      }
    }
  }
}

}  // namespace fastconvt::cuda
