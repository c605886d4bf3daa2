// Copies of inputs to shared memory and the barriers that tell of them (compute capability 8.0).
#pragma once

#include "../core/pixel_shuffle.h"

#include "device/barrier.cuh"
#include "device/numeric.cuh"
#include "device/shared_address.cuh"

namespace fastconvt::cuda {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800

// kBytes, aligned as large.
template <int kBytes>
__device__ __forceinline__ void pixel_shuffle_copy(uint32_t target, const void* source) {
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(target), "l"(source) : "memory");
  } else if constexpr (kBytes >= 4) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(target), "l"(source), "n"(kBytes) : "memory");
  } else {
    const unsigned short value = __ldg(static_cast<const unsigned short*>(source));
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(target), "h"(value) : "memory");
  }
}
// Zeros, visible to others when copies are: they are copies from anywhere, of nothing.
template <int kBytes>
__device__ __forceinline__ void pixel_shuffle_clear(uint32_t target, const void* anywhere) {
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, 0;" ::"r"(target), "l"(anywhere) : "memory");
  } else if constexpr (kBytes >= 4) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, 0;" ::"r"(target), "l"(anywhere), "n"(kBytes) : "memory");
  } else {
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(target), "h"(static_cast<unsigned short>(0)) : "memory");
  }
}

// Calls function(integral_constant) with the bytes of a copy.
template <int kLeast, typename Function>
__device__ __forceinline__ void pixel_shuffle_with_bytes(int bytes, Function&& function) {
  if (bytes == 16) {
    function(std::integral_constant<int, 16>{});
  } else if (bytes == 8) {
    function(std::integral_constant<int, 8>{});
  } else if (bytes == 4 || kLeast == 4) {
    function(std::integral_constant<int, 4>{});
  } else {
    function(std::integral_constant<int, kLeast>{});
  }
}

// A thread's share of a copy of rows: one column of kBytes, every step-th row.
struct PixelShuffleShare {
  int column, row, step, count;

  // `columns` is a power of two.
  __device__ PixelShuffleShare(int columns, int rows) {
    const int thread = threadIdx.x % kPixelShuffleProducers;
    column = thread & (columns - 1);
    step = columns < kPixelShuffleProducers ? kPixelShuffleProducers / columns : 1;
    row = columns < kPixelShuffleProducers ? thread / columns : 0;
    count = row < rows ? (rows - row - 1) / step + 1 : 0;
  }
  // What lies beyond `exist` rows is zeros. The pitches are from a row to the next one, in bytes.
  template <int kBytes>
  __device__ __forceinline__ void copy(uint32_t to, int to_pitch, const void* source, int64_t from_pitch, int exist,
                                       const void* anywhere) const {
    const char* from = static_cast<const char*>(source);
    const int to_step = step * to_pitch;
    const int64_t from_step = step * from_pitch;
    if (exist - row > (count - 1) * step) {
      int left = count;
#pragma unroll 1
      for (; left >= 4; left -= 4) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          pixel_shuffle_copy<kBytes>(to, from);
          to += to_step, from += from_step;
        }
      }
#pragma unroll 1
      for (; left > 0; --left) {
        pixel_shuffle_copy<kBytes>(to, from);
        to += to_step, from += from_step;
      }
    } else {
#pragma unroll 1
      for (int i = row, left = count; left > 0; --left, i += step) {
        if (i < exist) {
          pixel_shuffle_copy<kBytes>(to, from);
        } else {
          pixel_shuffle_clear<kBytes>(to, anywhere);
        }
        to += to_step, from += from_step;
      }
    }
  }
};

// Of the first `threads` threads of the block.
__device__ __forceinline__ void pixel_shuffle_sync(int threads) {
  asm volatile("bar.sync 1, %0;" ::"r"(threads) : "memory");
}
// Registers go from warps that copy to warps that multiply.
template <int kCount, bool kMore>
__device__ __forceinline__ void pixel_shuffle_set_registers() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  if constexpr (kMore) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
  } else {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
  }
#endif
}
__device__ __forceinline__ void pixel_shuffle_wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

__device__ __forceinline__ uint32_t pixel_shuffle_load(uint32_t address) {
  uint32_t word;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(address) : "memory");
  return word;
}
__device__ __forceinline__ void pixel_shuffle_load(uint32_t (&word)[4], uint32_t address) {
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])
               : "r"(address)
               : "memory");
}
__device__ __forceinline__ int64_t pixel_shuffle_load_place(uint32_t address) {
  int64_t place;
  asm volatile("ld.shared.b64 %0, [%1];" : "=l"(place) : "r"(address) : "memory");
  return place;
}
__device__ __forceinline__ void pixel_shuffle_keep(uint32_t address, int64_t place) {
  asm volatile("st.shared.b64 [%0], %1;" ::"r"(address), "l"(place) : "memory");
}
__device__ __forceinline__ void pixel_shuffle_keep(uint32_t address, uint32_t word) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(word) : "memory");
}
// Four matrices of 8 rows of 16 bytes; transposed: of 16-bit elements.
template <bool kTransposed>
__device__ __forceinline__ void pixel_shuffle_matrices(uint32_t& a, uint32_t& b, uint32_t& c, uint32_t& d,
                                                       uint32_t address) {
  if constexpr (kTransposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a), "=r"(b), "=r"(c), "=r"(d)
                 : "r"(address)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a), "=r"(b), "=r"(c), "=r"(d)
                 : "r"(address)
                 : "memory");
  }
}

#endif

}  // namespace fastconvt::cuda
