// Products of four warps together (compute capability 9.0a), 16 bits: 64 rows by 64 positions by 16 input channels.
// Elsewhere the same from the same places in shared memory, a warp at a time.
#pragma once

#include "device/wgmma.cuh"
#include "pixel_shuffle_weights.cuh"

namespace fastconvt::cuda {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800

// To the nearest TF32 number: the unit would truncate.
__device__ __forceinline__ void pixel_shuffle_round_input(uint32_t& x) {
  asm volatile("cvt.rna.tf32.f32 %0, %1;" : "=r"(x) : "f"(__uint_as_float(x)));
}

// sum = left * right + start.
template <typename T>
__device__ __forceinline__ void pixel_shuffle_multiply(float (&sum)[4], const uint32_t (&left)[4],
                                                       const uint32_t (&right)[2], const float (&start)[4]) {
  if constexpr (sizeof(T) == 4) {
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%10, %11, %12, %13};"
        : "=f"(sum[0]), "=f"(sum[1]), "=f"(sum[2]), "=f"(sum[3])
        : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right[0]), "r"(right[1]), "f"(start[0]),
          "f"(start[1]), "f"(start[2]), "f"(start[3]));
  } else if constexpr (std::is_same_v<T, __half>) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%10, %11, %12, %13};"
        : "=f"(sum[0]), "=f"(sum[1]), "=f"(sum[2]), "=f"(sum[3])
        : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right[0]), "r"(right[1]), "f"(start[0]),
          "f"(start[1]), "f"(start[2]), "f"(start[3]));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%10, %11, %12, %13};"
        : "=f"(sum[0]), "=f"(sum[1]), "=f"(sum[2]), "=f"(sum[3])
        : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right[0]), "r"(right[1]), "f"(start[0]),
          "f"(start[1]), "f"(start[2]), "f"(start[3]));
  }
}

#define PIXEL_SHUFFLE_OPERANDS                                                                                      \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, " \
  "%24, %25, %26, %27, %28, %29, %30, %31}, %32, %33, 1, 1, 1"
#define PIXEL_SHUFFLE_FOUR(j) "+f"(sum[j][0]), "+f"(sum[j][1]), "+f"(sum[j][2]), "+f"(sum[j][3])
#define PIXEL_SHUFFLE_WIDE(name, transposed)                                                                 \
  asm volatile("wgmma.mma_async.sync.aligned.m64n64" name " " PIXEL_SHUFFLE_OPERANDS transposed ";"          \
               : PIXEL_SHUFFLE_FOUR(0), PIXEL_SHUFFLE_FOUR(1), PIXEL_SHUFFLE_FOUR(2), PIXEL_SHUFFLE_FOUR(3), \
                 PIXEL_SHUFFLE_FOUR(4), PIXEL_SHUFFLE_FOUR(5), PIXEL_SHUFFLE_FOUR(6), PIXEL_SHUFFLE_FOUR(7)  \
               : "l"(pixel_shuffle_descriptor(weights)), "l"(pixel_shuffle_descriptor(inputs)))

// Rows of 128 bytes, eight of them after the other, vectors of 16 bytes where the row's number modulo 8 says.
__device__ __forceinline__ uint64_t pixel_shuffle_descriptor(uint32_t address) {
  return (address & 0x3ffff) >> 4 | uint64_t{1} << 16 | uint64_t{1024 >> 4} << 32 | uint64_t{1} << 62;
}

// sum += weights * inputs: 64 rows of 128 bytes of channels by 64 positions of the same (channels_last), or by 16
// channels of 64 positions.
template <typename T, bool kChannelsLast>
__device__ __forceinline__ void pixel_shuffle_wide(float (&sum)[8][4], uint32_t weights, uint32_t inputs) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  if constexpr (std::is_same_v<T, __half> && kChannelsLast) {
    PIXEL_SHUFFLE_WIDE("k16.f32.f16.f16", ", 0, 0");
  } else if constexpr (std::is_same_v<T, __half>) {
    PIXEL_SHUFFLE_WIDE("k16.f32.f16.f16", ", 0, 1");
  } else if constexpr (kChannelsLast) {
    PIXEL_SHUFFLE_WIDE("k16.f32.bf16.bf16", ", 0, 0");
  } else {
    PIXEL_SHUFFLE_WIDE("k16.f32.bf16.bf16", ", 0, 1");
  }
#else
  const int lane = threadIdx.x % 32;
  const auto place = [](uint32_t at) { return at ^ (at >> 7 & 7) << 4; };
  uint32_t left[4];
  pixel_shuffle_matrices<false>(left[0], left[1], left[2], left[3],
                                place(weights + (threadIdx.x / 32 % 4 * 16 + lane % 16) * 128 + lane / 16 * 16));
#pragma unroll
  for (int j = 0; j < 8; j += 2) {
    const int row = kChannelsLast ? lane % 8 + (j + lane / 16) * 8 : lane % 16;
    const int vector = kChannelsLast ? lane / 8 % 2 : j + lane / 16;
    uint32_t right[2][2];
    pixel_shuffle_matrices<!kChannelsLast>(right[0][0], right[0][1], right[1][0], right[1][1],
                                           place(inputs + row * 128 + vector * 16));
    pixel_shuffle_multiply<T>(sum[j], left, right[0], sum[j]);
    pixel_shuffle_multiply<T>(sum[j + 1], left, right[1], sum[j + 1]);
  }
#endif
}

// Keeps the compiler from moving writes of what wide products read past their beginning, and reads before their end.
__device__ __forceinline__ void pixel_shuffle_pin(float& x) { asm volatile("" : "+f"(x)::"memory"); }
template <typename E, int kCount>
__device__ __forceinline__ void pixel_shuffle_pin(E (&x)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) pixel_shuffle_pin(x[i]);
}

#endif

}  // namespace fastconvt::cuda
