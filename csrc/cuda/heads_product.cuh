// The head family's matrix products: 16 (channel, tap) pairs by 8 positions by 32 bytes of input channels.
//
// A lane's right operands of four products are 8 words: with quad = lane % 4 and column = lane / 4, positions
// 4 * column .. 4 * column + 3 of its own channels, 2 (float32) or 4 (16 bits) from quad * 2 or quad * 4 on. Which term
// of the product a channel is does not matter, as long as the weights agree.
#pragma once

#include "device/shared_address.cuh"
#include "device/tf32.cuh"
#include "rows_mma_fragment.cuh"

namespace fastconvt::cuda {

enum class HeadsPrecision : int { kFloat32, kTf32, k16Bits };

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800

// kBytes to registers, aligned as large; zeros where nothing exists. Without a branch, which would wait for it.
template <int kBytes>
__device__ __forceinline__ void heads_load_vector(uint32_t* word, const void* source, bool exists) {
  if constexpr (kBytes == 16) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %4, 0; mov.b32 %0, 0; mov.b32 %1, 0; mov.b32 %2, 0; mov.b32 %3, 0; "
        "@p ld.global.nc.L1::no_allocate.L2::256B.v4.b32 {%0, %1, %2, %3}, [%5]; }"
        : "=&r"(word[0]), "=&r"(word[1]), "=&r"(word[2]), "=&r"(word[3])
        : "r"(static_cast<int>(exists)), "l"(source));
  } else {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %2, 0; mov.b32 %0, 0; mov.b32 %1, 0; @p ld.global.nc.L2::256B.v2.b32 {%0, %1}, "
        "[%3]; }"
        : "=&r"(word[0]), "=&r"(word[1])
        : "r"(static_cast<int>(exists)), "l"(source));
  }
}
__device__ __forceinline__ uint4 heads_load(uint32_t address) {
  uint4 word;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(word.x), "=r"(word.y), "=r"(word.z), "=r"(word.w)
               : "r"(address)
               : "memory");
  return word;
}
__device__ __forceinline__ void heads_multiply_tf32(float (&sum)[4], const uint32_t (&left)[4], uint32_t right0,
                                                    uint32_t right1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right0), "r"(right1));
}
// From zero.
__device__ __forceinline__ void heads_start_tf32(float (&sum)[4], const uint32_t (&left)[4], uint32_t right0,
                                                 uint32_t right1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%10, %10, %10, %10};"
      : "=f"(sum[0]), "=f"(sum[1]), "=f"(sum[2]), "=f"(sum[3])
      : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right0), "r"(right1), "f"(0.f));
}
template <typename T>
__device__ __forceinline__ void heads_multiply_16(float (&sum)[4], const uint32_t (&left)[4], uint32_t right0,
                                                  uint32_t right1) {
  if constexpr (std::is_same_v<T, __half>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right0), "r"(right1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right0), "r"(right1));
  }
}

#endif

// A lane's right operands: words of channel 0 (16 bits: channels 0 and 1) and 1 (2 and 3) by position.
struct HeadsRight {
  uint32_t word[2][4];

  // From planes of four positions each.
  template <typename T>
  __device__ __forceinline__ void from_planes(const uint32_t (&raw)[8]) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if constexpr (sizeof(T) == 4) {
        word[i / 4][i % 4] = raw[i];
      } else {
        const int first = i / 4 * 4 + i % 4 / 2;
        word[i / 4][i % 4] = __byte_perm(raw[first], raw[first + 2], i % 2 == 0 ? 0x5410 : 0x7632);
      }
    }
  }
};

// Rounds to TF32 in that the tensor core truncates: an error of at most 2^-11 of it. NaN and inf stay what they are.
__device__ __forceinline__ uint32_t heads_round_tf32(uint32_t word) {
  return __float_as_uint(__uint_as_float(word) * (1 + 1.f / 2048));
}

}  // namespace fastconvt::cuda
