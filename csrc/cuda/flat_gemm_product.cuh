// The flat GEMM's products: 64 output channels by 128 cells by 8 input channels, both operands in shared memory.
#pragma once

#include "device/wgmma.cuh"
#include "flat_gemm_item.cuh"

namespace fastconvt::cuda {

using FlatGemmSums = float[16][4];

// Lines of 64 bytes, swizzled; groups of eight lines follow each other.
__device__ __forceinline__ uint64_t line_operand(uint32_t address) {
  return static_cast<uint64_t>((address & 0x3ffff) >> 4) | uint64_t{1} << 16 | uint64_t{512 >> 4} << 32 |
         uint64_t{2} << 62;
}

#define FASTCONVT_FLAT4(d, i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define FASTCONVT_FLAT16(d, i) \
  FASTCONVT_FLAT4(d, i), FASTCONVT_FLAT4(d, i + 1), FASTCONVT_FLAT4(d, i + 2), FASTCONVT_FLAT4(d, i + 3)

// d = d * keep + weights * cells, in flight until wgmma_wait().
template <bool kKeep = true>
__device__ __forceinline__ void start_product(FlatGemmSums& d, uint64_t weights, uint64_t cells) {
#ifdef FASTCONVT_WGMMA
  asm volatile(
      "{\n.reg .pred keep;\nsetp.ne.b32 keep, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k8.f32.tf32.tf32 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
      "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,"
      "%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}, %64, %65, keep, 1, 1;\n}"
      : FASTCONVT_FLAT16(d, 0), FASTCONVT_FLAT16(d, 4), FASTCONVT_FLAT16(d, 8), FASTCONVT_FLAT16(d, 12)
      : "l"(weights), "l"(cells), "n"(kKeep ? 1 : 0));
#endif
}

// Descriptors count in 16 bytes: 4 a position, 256 a tap.

// sum += one tap of a chunk: two products.
__device__ __forceinline__ void add_tap(FlatGemmSums& sum, uint64_t weights, uint64_t cells) {
  start_product(sum, weights, cells);
  start_product(sum, weights + 2, cells + 2);
}

// The stage's taps of one unit, TF32. A tap is a group of products.
__device__ __forceinline__ void add_unit(FlatGemmSums& sum, const FlatGemmTap* tap, int taps, uint64_t weights,
                                         uint64_t cells) {
#pragma unroll 1
  for (int i = 0; i < taps; ++i, weights += kFlatGemmTapBytes >> 4) {
    const uint64_t of_tap = cells + tap[i].offset * 4;
    wgmma_fence();
    add_tap(sum, weights, of_tap);
    wgmma_commit();
  }
}

// The same for float32 by three products, the small ones first. The unit truncates where it adds: sums of 32 products
// at most, then float32.
__device__ __forceinline__ void add_unit_three(FlatGemmSums& sum, const FlatGemmTap* tap, int taps, uint64_t weights,
                                               uint64_t cells, int rest) {
  constexpr int kRest = kFlatGemmTapBytes >> 4, kTap = 2 * kRest;
#pragma unroll 1
  for (int i = 0; i < taps; i += 2, weights += 2 * kTap) {
    FlatGemmSums part;
    const bool both = i + 1 < taps;
    const uint64_t a = cells + tap[i].offset * 4, b = cells + tap[both ? i + 1 : i].offset * 4;
    wgmma_fence();
    start_product<false>(part, weights + kRest, a);
    start_product(part, weights + kRest + 2, a + 2);
    start_product(part, weights, a + rest);
    start_product(part, weights + 2, a + 2 + rest);
    if (both) {
      add_tap(part, weights + kTap + kRest, b);
      add_tap(part, weights + kTap, b + rest);
      add_tap(part, weights + kTap, b);
    }
    add_tap(part, weights, a);
    wgmma_commit();
    wgmma_wait<0>();
#pragma unroll
    for (int j = 0; j < 16; ++j)
#pragma unroll
      for (int q = 0; q < 4; ++q) sum[j][q] += part[j][q];
  }
}

// The same for sums of 64 products: fewer float32 sums, which long sums of equal terms need.
__device__ __forceinline__ void add_unit_chains(FlatGemmSums& sum, const FlatGemmTap* tap, int taps, uint64_t weights,
                                                uint64_t cells, int rest) {
  constexpr int kRest = kFlatGemmTapBytes >> 4, kTap = 2 * kRest;
#pragma unroll 1
  for (int i = 0; i < taps; i += kFlatGemmChain, weights += kFlatGemmChain * kTap) {
    FlatGemmSums part;
    const int count = min(kFlatGemmChain, taps - i);
    const uint64_t first = cells + tap[i].offset * 4;
    wgmma_fence();
    start_product<false>(part, weights + kRest, first);
    start_product(part, weights + kRest + 2, first + 2);
    add_tap(part, weights, first + rest);
#pragma unroll 1
    for (int j = 1; j < count; ++j) {
      const uint64_t of_tap = cells + tap[i + j].offset * 4, w = weights + j * kTap;
      add_tap(part, w + kRest, of_tap);
      add_tap(part, w, of_tap + rest);
    }
#pragma unroll 1
    for (int j = 0; j < count; ++j) add_tap(part, weights + j * kTap, cells + tap[i + j].offset * 4);
    wgmma_commit();
    wgmma_wait<0>();
#pragma unroll
    for (int j = 0; j < 16; ++j)
#pragma unroll
      for (int q = 0; q < 4; ++q) sum[j][q] += part[j][q];
  }
}

}  // namespace fastconvt::cuda
