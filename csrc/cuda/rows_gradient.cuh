// What both gradients of rows share on the device: fragments of mma.sync.m16n8k8, and rows on their way to shared
// memory. Requires compute capability 8.0; code for older GPUs is empty.
#pragma once

#include <cuda_runtime.h>

#include "../core/rows_gradient.h"
#include "device/copy_groups.cuh"
#include "device/fast_divide.h"
#include "device/numeric.cuh"
#include "device/shared_address.cuh"
#include "params.h"

namespace fastconvt::cuda {

constexpr int kRowsThreads = 32 * kRowsWarps;

// How operands enter the matrix unit, which multiplies TF32 numbers: 11 significant bits.
enum class RowsOperands {
  kSplit,  // float32 as a sum of two TF32 numbers: three products, all but 2^-22 of the fourth
  kRound,  // float32 rounded to TF32
  kAsIs,   // float16 and bfloat16 are TF32 numbers
};

struct Tf32Pair {
  uint32_t high, low;
};

// Infinity, NaN and numbers that round to infinity make a `low` that is infinite or NaN: no sum that has seen one stays
// finite.
template <RowsOperands kOperands>
__device__ __forceinline__ Tf32Pair split_tf32(float x) {
  const uint32_t bits = __float_as_uint(x);
  if constexpr (kOperands == RowsOperands::kSplit) {
    const uint32_t high = (bits + 0x1000u) & 0xffffe000u;
    return {high, __float_as_uint(x - __uint_as_float(high))};
  } else if constexpr (kOperands == RowsOperands::kRound) {
    uint32_t high = bits;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(high) : "f"(x));
#endif
    return {high, 0};
  } else {
    return {bits, 0};
  }
}

// a * b + c: a is 16 x 8, b is 8 x 8. The matrix unit truncates each sum, so only the few products of one step are
// added there; everything else is added in float32, rounded.
__device__ __forceinline__ void mma_tf32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                         const float (&c)[4]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%10, %11, %12, %13};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
#endif
}

// One tensor's rows as they are copied to shared memory: by vectors, whatever their alignment. An element stands where
// its address, modulo the vector, says: `skew` elements after the place that it would have otherwise. Where all rows
// begin and end at multiples of the vector they are `aligned`, and all channels have one skew.
struct RowSource {
  const void* data;
  int64_t batch;  // strides, in elements
  int channel, row, column;
  int width;
  unsigned vector;  // elements; 1: channels_last, where elements are copied one by one
  bool channels_last;
  bool aligned;
  FastDivide by_channels;  // of a stage
};

template <typename T>
constexpr int kRowVector = 16 / sizeof(T);

// The index of an element in memory, modulo 2^32.
template <typename T>
__device__ __forceinline__ unsigned memory_index(const T* element) {
  return static_cast<unsigned>(reinterpret_cast<uintptr_t>(element) / sizeof(T));
}

__device__ __forceinline__ int skew_of(const RowSource& source, unsigned index) { return index & (source.vector - 1); }

// Copies the 16 bytes at a row's beginning or end that hold elements of the row before or after it: lanes 0 to 15 the
// beginning, the others the end, of four channels, 4 bytes each. `origin` is the column of the first place.
template <typename T>
__device__ __forceinline__ void stage_edges(const RowSource& source, const T* row, int origin, int vectors, int kind,
                                            int existing, int pitch, T* stage) {
  constexpr int kVector = kRowVector<T>, kUnit = 4 / sizeof(T);
  const int lane = threadIdx.x % 32;
  const int edge = lane < 16 ? -origin : source.width - origin;  // the place where the row begins or ends
  if (edge <= 0 || edge % kVector == 0 || edge / kVector >= vectors) return;
  const int place = edge / kVector * kVector + lane % 4 * kUnit;
  const bool begins = static_cast<unsigned>(origin + place) < source.width;
  const bool ends = static_cast<unsigned>(origin + place + kUnit - 1) < source.width;
#pragma unroll 1
  for (int channel = kind + lane / 4 % 4 * kVector; channel < existing; channel += 4 * kVector) {
    const T* element = row + static_cast<int64_t>(channel - kind) * source.channel + place;
    T* to = stage + channel * pitch + place;
    if (begins == ends) {
      copy_or_zero<4>(shared_address(to), begins ? element : row, begins);
    } else {  // two bytes of each
      to[0] = begins ? element[0] : T{};
      to[kUnit - 1] = ends ? element[kUnit - 1] : T{};
    }
  }
}

// Aligned rows: a thread copies one place of kBytes in every few channels.
template <int kThreads, int kBytes, typename T>
__device__ __forceinline__ void stage_aligned(int thread, const RowSource& source, const T* from, int first,
                                              int columns, int channels, int existing, int pitch, T* stage) {
  constexpr int kVector = kBytes / sizeof(T);
  const int places = min(kThreads, columns > 64 * kVector ? 128 : columns > 32 * kVector ? 64 : 32);
  const int apart = kThreads / places;
  const int first_channel = thread / places;
  const int64_t step = static_cast<int64_t>(apart) * source.channel;
  const int target_step = apart * pitch * static_cast<int>(sizeof(T));
  from += first;
  const int skew = skew_of(source, memory_index(from));
  from -= skew;
  first -= skew;
#pragma unroll 1
  for (int c = thread % places * kVector; c < columns; c += places * kVector) {
    const bool exists = static_cast<unsigned>(first + c) < source.width;
    const T* element = from + static_cast<int64_t>(first_channel) * source.channel + c;
    uint32_t target = shared_address(stage + first_channel * pitch + c);
    int channel = first_channel;
#pragma unroll 1
    for (; channel + 3 * apart < existing; channel += 4 * apart) {
#pragma unroll
      for (int i = 0; i < 4; ++i, element += step, target += target_step) copy_or_zero<kBytes>(target, element, exists);
    }
#pragma unroll 1
    for (; channel < existing; channel += apart, element += step, target += target_step) {
      copy_or_zero<kBytes>(target, element, exists);
    }
#pragma unroll 1
    for (; channel < channels; channel += apart, target += target_step) copy_or_zero<kBytes>(target, from, false);
  }
}

// A warp copies the channels of one skew at a time, 16 bytes a lane.
template <int kThreads, typename T>
__device__ __forceinline__ void stage_vectors(int thread, const RowSource& source, const T* from, int first,
                                              int columns, int channels, int existing, int pitch, T* stage) {
  constexpr int kVector = kRowVector<T>, kUnroll = 4;
  const int lane = threadIdx.x % 32;
  const int vectors = (columns + kVector - 1) / kVector;
#pragma unroll 1
  for (int kind = thread / 32; kind < min(kVector, channels); kind += kThreads / 32) {
    const T* row = from + static_cast<int64_t>(kind) * source.channel + first;
    const int skew = static_cast<int>(memory_index(row) & (kVector - 1));
    row -= skew;
    const int origin = first - skew;
    const int64_t step = static_cast<int64_t>(kVector) * source.channel;
#pragma unroll 1
    for (int base = lane; base - lane < vectors; base += kUnroll * 32) {
      bool copied[kUnroll], whole[kUnroll];
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        const int column = origin + (base + 32 * i) * kVector;
        whole[i] = column >= 0 && column <= source.width - kVector;
        copied[i] = base + 32 * i < vectors && (whole[i] || column <= -kVector || column >= source.width);
      }
      const T* element = row + base * kVector;
      uint32_t target = shared_address(stage + kind * pitch + base * kVector);
      int channel = kind;
#pragma unroll 1
      for (; channel < existing; channel += kVector, element += step, target += 16 * pitch) {
#pragma unroll
        for (int i = 0; i < kUnroll; ++i) {
          if (copied[i]) copy_or_zero<16>(target + 512 * i, element + 32 * kVector * i, whole[i]);
        }
      }
#pragma unroll 1
      for (; channel < channels; channel += kVector, target += 16 * pitch) {
#pragma unroll
        for (int i = 0; i < kUnroll; ++i) {
          if (base + 32 * i < vectors) copy_or_zero<16>(target + 512 * i, from, false);
        }
      }
    }
    stage_edges(source, row, origin, vectors, kind, existing, pitch, stage);
  }
}

// Columns first, first + 1, ... of a row, which begins at `from`, in `channels` channels, `pitch` elements apart; zeros
// where there is none: beyond the width, and from channel `existing` on. `columns` counts kRowVector - 1 places for the
// skew. Asynchronous, for the most part.
template <int kThreads, typename T>
__device__ __forceinline__ void stage_row(int thread, const RowSource& source, const T* from, int first, int columns,
                                          int channels, int existing, int pitch, T* stage) {
  existing = min(existing, channels);
  if (source.aligned) {
    return source.vector * sizeof(T) == 16
               ? stage_aligned<kThreads, 16>(thread, source, from, first, columns, channels, existing, pitch, stage)
               : stage_aligned<kThreads, 8>(thread, source, from, first, columns, channels, existing, pitch, stage);
  }
  if (!source.channels_last)
    return stage_vectors<kThreads>(thread, source, from, first, columns, channels, existing, pitch, stage);
#pragma unroll 4
  for (int i = thread; i < columns * channels; i += kThreads) {
    int channel = i;
    const int c = source.by_channels(channel);
    const bool exists = static_cast<unsigned>(first + c) < source.width && channel < existing;
    const T* element = from + (exists ? channel + static_cast<int64_t>(first + c) * source.column : 0);
    T* target = stage + channel * pitch + c;
    if constexpr (sizeof(T) == 4) {
      copy_or_zero<4>(shared_address(target), element, exists);
    } else {
      *target = exists ? *element : T{};
    }
  }
}

// Rows of `width` elements, of which a stage has `channels` channels. Rows aligned to `least_bytes`, 8 or 16, are
// copied as such.
inline RowSource row_source(const Problem& problem, const Strides& strides, int64_t width, int64_t channels,
                            int least_bytes, const void* data) {
  RowSource source{};
  source.data = data;
  source.batch = strides.batch;
  source.channel = static_cast<int>(strides.channel);
  source.row = static_cast<int>(strides.axis[1]);
  source.column = static_cast<int>(strides.axis[2]);
  source.width = static_cast<int>(width);
  source.channels_last = problem.layout == Layout::kChannelsLast;
  source.by_channels = fast_divide(static_cast<int>(channels));
  const int64_t size = problem.element_size();
  source.vector = static_cast<unsigned>(source.channels_last ? 1 : 16 / size);
  for (int bytes = 16; bytes >= least_bytes && !source.channels_last && !source.aligned; bytes /= 2) {
    source.aligned = width % (bytes / size) == 0 && reinterpret_cast<uintptr_t>(data) % bytes == 0;
    if (source.aligned) source.vector = static_cast<unsigned>(bytes / size);
  }
  return source;
}

}  // namespace fastconvt::cuda
