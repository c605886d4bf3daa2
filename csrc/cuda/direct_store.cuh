// Parts of the direct kernels: mainly how they store a vector of columns that may not be aligned.
#pragma once

#include "depthwise_columns.cuh"
#include "direct_params.h"

namespace fastconvt::cuda {

// Hides where a value comes from, so that it is not computed again in a loop.
__device__ __forceinline__ void keep(unsigned& x) { asm volatile("" : "+r"(x)); }
__device__ __forceinline__ void keep(int& x) { asm volatile("" : "+r"(x)); }
__device__ __forceinline__ void keep(float& x) { asm volatile("" : "+f"(x)); }
template <typename T>
__device__ __forceinline__ void keep(T*& x) {
  asm volatile("" : "+l"(x));
}

// Elements of a vector at column `place` that are in front of `limit`.
template <typename T, int kVector>
__device__ __forceinline__ void store_part(T* target, unsigned place, unsigned limit, const Pack<T, kVector>& pack) {
#pragma unroll
  for (int v = 0; v < kVector; ++v) {
    if (place + v < limit) target[v] = pack.value[v];
  }
}

// Words from `step` on take what stood `step` before them.
template <int step, int kCount>
__device__ __forceinline__ void move_right(bool moves, unsigned (&w)[kCount]) {
#pragma unroll
  for (int i = kCount - 1; i >= step; --i) w[i] = moves ? w[i - step] : w[i];
}

// The last `skew` elements of the left lane's vector, then the first of this one; 0 <= skew < kVector.
template <typename T, int kVector>
__device__ __forceinline__ Pack<T, kVector> shift_vector(const Pack<T, kVector>& pack, int skew) {
  constexpr int kWords = sizeof(pack) / 4, kInWord = 4 / sizeof(T);
  static_assert(kWords == 1 || kWords == 2 || kWords == 4);
  using Words = Pack<unsigned, kWords>;
  const Words own = reinterpret_cast<const Words&>(pack);
  unsigned w[2 * kWords + 1];
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    w[i] = __shfl_up_sync(0xffffffff, own.value[i], 1);
    w[kWords + i] = own.value[i];
  }
  w[2 * kWords] = 0;
  const int words = (skew + kInWord - 1) / kInWord;
  if constexpr (kInWord == 2) move_right<kWords>((words & kWords) != 0, w);
  if constexpr (kWords > 2) move_right<2>((words & 2) != 0, w);
  if constexpr (kWords > 1) move_right<1>((words & 1) != 0, w);
  Words result;
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    result.value[i] = w[kWords + i];
    if constexpr (kInWord == 2) {
      // An odd skew came a word too far: its upper half, and the next word's lower one.
      if (skew % 2 != 0) result.value[i] = __byte_perm(w[kWords + i], w[kWords + i + 1], 0x5432);
    }
  }
  return reinterpret_cast<const Pack<T, kVector>&>(result);
}

// A vector at column `place` that begins `skew` elements behind an aligned address: a lane stores its left neighbour's
// last ones and its own others. All lanes of a warp call it; neighbours in a row are neighbours in the warp.
template <typename T, int kVector>
__device__ __forceinline__ void store_realigned(T* target, unsigned place, unsigned limit, bool row_begins,
                                                bool row_ends, const Pack<T, kVector>& pack) {
  const int skew = static_cast<int>(reinterpret_cast<uintptr_t>(target) / sizeof(T) % kVector);
  const int lane = threadIdx.x & 31;
  const bool left = lane > 0 && !row_begins, right = lane < 31 && !row_ends;
  const Pack<T, kVector> shifted = shift_vector(pack, skew);
  if (left && place - skew + kVector <= limit) {
    store_pack(target - skew, shifted);
  } else if (left) {
    store_part(target - skew, place - skew, limit, shifted);
  } else if (skew == 0 && place + kVector <= limit) {
    store_pack(target, pack);
  } else {
    store_part(target, place, min(limit, place + kVector - skew), pack);
  }
  if (!right && skew != 0) {
#pragma unroll
    for (int v = 1; v < kVector; ++v) {
      if (v >= kVector - skew && place + v < limit) target[v] = pack.value[v];
    }
  }
}

// The outputs of a pixel's only channels, fewer than four, in channels_last: pixels side by side are one run, of whole
// vectors of four elements.
template <typename T, int kVector, int kChannels>
__device__ __forceinline__ void store_run(T* target, const float (&sum)[kVector][kDirectChannels]) {
  constexpr int kSide = 4;
  static_assert(kVector * kChannels % kSide == 0);
#pragma unroll
  for (int i = 0; i < kVector * kChannels; i += kSide) {
    Pack<T, kSide> pack;
#pragma unroll
    for (int j = 0; j < kSide; ++j) {
      pack.value[j] = from_accumulator<T>(sum[(i + j) / kChannels][(i + j) % kChannels]);
    }
    store_pack(target + i, pack);
  }
}

}  // namespace fastconvt::cuda
