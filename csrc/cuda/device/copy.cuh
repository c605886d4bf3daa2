// Global to shared memory: asynchronous where the hardware can and the types agree, through registers elsewhere.
// Columns: `count` elements any pitch apart, to places target_pitch apart. Copies are visible to their thread after
// wait_for_copies().
#pragma once

#include "numeric.cuh"

namespace fastconvt::cuda {

template <typename T>
__device__ inline void copy_column_async(T* target, int target_pitch, const T* source, int64_t source_pitch,
                                         int count) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  uint32_t to = static_cast<uint32_t>(__cvta_generic_to_shared(target));
#pragma unroll 4
  for (int i = 0; i < count; ++i) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(source), "n"(sizeof(T)) : "memory");
    source += source_pitch;
    to += target_pitch * static_cast<int>(sizeof(T));
  }
#endif
}

template <typename T>
__device__ inline void copy_column(accumulator_t<T>* target, int target_pitch, const T* source, int64_t source_pitch,
                                   int count) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  constexpr bool kAsync = sizeof(T) >= 4;
#else
  constexpr bool kAsync = false;
#endif
  if constexpr (kAsync) {
    copy_column_async(target, target_pitch, source, source_pitch, count);
  } else {
    constexpr int kBatch = 4;  // loads in flight
#pragma unroll 1
    for (int left = count; left > 0; left -= kBatch) {
      T batch[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (i < left) batch[i] = __ldg(source);
        source += source_pitch;
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (i < left) *target = to_accumulator(batch[i]);
        target += target_pitch;
      }
    }
  }
}

template <typename Acc>
__device__ inline void fill_column(Acc* target, int target_pitch, int count) {
#pragma unroll 1
  for (int i = 0; i < count; ++i, target += target_pitch) *target = Acc{0};
}

// A column of neighbouring elements: `count` is a multiple of four, the source aligned to four.
template <typename T>
__device__ inline void copy_vectors(accumulator_t<T>* target, int target_pitch, const T* source, int count) {
  constexpr int kBatch = 2;  // loads in flight
#pragma unroll 1
  for (int left = count; left > 0; left -= 4 * kBatch) {
    Pack<T, 4> batch[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i, source += 4) {
      if (4 * i < left) batch[i] = *reinterpret_cast<const Pack<T, 4>*>(source);
    }
#pragma unroll
    for (int i = 0; i < 4 * kBatch; ++i, target += target_pitch) {
      if (i / 4 * 4 < left) *target = to_accumulator(batch[i / 4].value[i % 4]);
    }
  }
}

__device__ inline void wait_for_copies() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

}  // namespace fastconvt::cuda
