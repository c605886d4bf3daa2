// Element types and the types they are accumulated in.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace fastconvt::cuda {

template <typename T>
struct Accumulator {
  using type = float;
};
template <>
struct Accumulator<double> {
  using type = double;
};
template <typename T>
using accumulator_t = typename Accumulator<T>::type;

__device__ inline float to_accumulator(float x) { return x; }
__device__ inline double to_accumulator(double x) { return x; }
__device__ inline float to_accumulator(__half x) { return __half2float(x); }
__device__ inline float to_accumulator(__nv_bfloat16 x) { return __bfloat162float(x); }

__device__ __forceinline__ bool is_finite(float x) { return fabsf(x) < __int_as_float(0x7f800000); }

// Rounds to nearest even, once.
template <typename T>
__device__ inline T from_accumulator(accumulator_t<T> x) {
  if constexpr (sizeof(T) != 2) {
    return x;
  } else if constexpr (std::is_same_v<T, __half>) {
    return __float2half_rn(x);
  } else {
    return __float2bfloat16_rn(x);
  }
}

// Two elements of 16 bits in a word, the first one below.
template <typename T>
__device__ __forceinline__ uint32_t round_pair(float low, float high) {
  if constexpr (std::is_same_v<T, __half>) {
    const __half2 pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
  } else {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
  }
}

// kCount values side by side, moved as one or two vector accesses.
template <typename T, int kCount>
struct alignas(sizeof(T) * kCount < 16 ? sizeof(T) * kCount : 16) Pack {
  T value[kCount];
};

template <typename T, int kCount>
__device__ __forceinline__ Pack<T, kCount> rounded(const float (&x)[kCount]) {
  Pack<T, kCount> pack;
#pragma unroll
  for (int i = 0; i < kCount; ++i) pack.value[i] = from_accumulator<T>(x[i]);
  return pack;
}

}  // namespace fastconvt::cuda
