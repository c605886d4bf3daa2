// The overlap-add family's words: to and from shared memory, and as sums of shorter numbers.
#pragma once

#include <cstdint>

namespace fastconvt::cuda {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800

// 16 bits, or zero. Not by an expression, of which the compiler makes conditional ones that wait for the load.
__device__ __forceinline__ uint32_t overlap_add_load_half(const void* source, bool exists) {
  uint32_t word;
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %2, 0; mov.b32 %0, 0; @p ld.global.nc.u16 %0, [%1]; }"
               : "=&r"(word)
               : "l"(source), "r"(static_cast<int>(exists)));
  return word;
}
__device__ __forceinline__ void overlap_add_load(uint32_t (&word)[4], uint32_t source) {
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])
               : "r"(source)
               : "memory");
}
template <int kWords>
__device__ __forceinline__ void overlap_add_store(uint32_t target, const uint32_t (&word)[kWords]) {
  if constexpr (kWords == 4) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(target), "r"(word[0]), "r"(word[1]), "r"(word[2]),
                 "r"(word[3])
                 : "memory");
  } else {
    asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(target), "r"(word[0]), "r"(word[1]) : "memory");
  }
}

// Two float32 numbers as sums of three bfloat16 ones each, which stand side by side. NaN, inf and numbers that round to
// inf leave a NaN.
__device__ __forceinline__ uint32_t overlap_add_round_pair(float x, float y) {
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(y), "f"(x));
  return pair;
}
__device__ __forceinline__ void overlap_add_split_pair(uint32_t a, uint32_t b, uint32_t& first, uint32_t& second,
                                                       uint32_t& third) {
  float x = __uint_as_float(a), y = __uint_as_float(b);
  first = overlap_add_round_pair(x, y);
  x -= __uint_as_float(first << 16), y -= __uint_as_float(first & 0xffff0000u);
  second = overlap_add_round_pair(x, y);
  x -= __uint_as_float(second << 16), y -= __uint_as_float(second & 0xffff0000u);
  third = overlap_add_round_pair(x, y);
}

// x = high + low; high is rounded to nearest, so that low * low is below 2^-22 of a product, and low of any sign. The
// hardware drops the bits of `high` below a TF32 number's. NaN and inf make `low` NaN.
__device__ __forceinline__ void overlap_add_halve(uint32_t& high, uint32_t& low) {
  const float x = __uint_as_float(high);
  high += 0x1000;
  low = __float_as_uint(x - __uint_as_float(high & 0xffffe000u));
}

// To nearest, as a TF32 number. NaN and inf stay what they are; the largest finite values may become inf.
__device__ __forceinline__ uint32_t overlap_add_round(uint32_t word) {
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(word) : "f"(__uint_as_float(word)));
  return word;
}

#endif

}  // namespace fastconvt::cuda
