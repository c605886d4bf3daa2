// Tensor copies (compute capability 9.0; empty below): to shared memory, counted by a barrier, and from it, in the bulk
// group that the thread commits next.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace fastconvt::cuda {

// A box of a tensor of three to five axes, from its first corner on, the innermost axis first. What lies outside is
// zeros.
__device__ __forceinline__ void load_box(uint32_t target, const CUtensorMap* map, int at0, int at1, int at2, int at3,
                                         int at4, uint32_t barrier) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5, "
      "%6}], [%7];" ::"r"(target),
      "l"(map), "r"(at0), "r"(at1), "r"(at2), "r"(at3), "r"(at4), "r"(barrier)
      : "memory");
#endif
}
__device__ __forceinline__ void load_box(uint32_t target, const CUtensorMap* map, int at0, int at1, int at2, int at3,
                                         uint32_t barrier) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], "
      "[%6];" ::"r"(target),
      "l"(map), "r"(at0), "r"(at1), "r"(at2), "r"(at3), "r"(barrier)
      : "memory");
#endif
}
__device__ __forceinline__ void load_box(uint32_t target, const CUtensorMap* map, int at0, int at1, int at2,
                                         uint32_t barrier) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], "
      "[%5];" ::"r"(target),
      "l"(map), "r"(at0), "r"(at1), "r"(at2), "r"(barrier)
      : "memory");
#endif
}
__device__ __forceinline__ void load_box(uint32_t target, const CUtensorMap* map, const int (&at)[5],
                                         uint32_t barrier) {
  load_box(target, map, at[0], at[1], at[2], at[3], at[4], barrier);
}
__device__ __forceinline__ void load_box(uint32_t target, const CUtensorMap* map, const int (&at)[4],
                                         uint32_t barrier) {
  load_box(target, map, at[0], at[1], at[2], at[3], barrier);
}
// A box of a matrix (lines, terms).
__device__ __forceinline__ void load_lines(uint32_t target, const CUtensorMap* map, int term, int line,
                                           uint32_t barrier) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], "
      "[%4];" ::"r"(target),
      "l"(map), "r"(term), "r"(line), "r"(barrier)
      : "memory");
#endif
}
// A box of a tensor of four or five axes; what lies outside is left out, but no corner may be negative.
__device__ __forceinline__ void store_box(const CUtensorMap* map, uint32_t source, int at0, int at1, int at2, int at3) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3, %4}], [%5];" ::"l"(map),
               "r"(at0), "r"(at1), "r"(at2), "r"(at3), "r"(source)
               : "memory");
#endif
}
__device__ __forceinline__ void store_box(const CUtensorMap* map, uint32_t source, int at0, int at1, int at2, int at3,
                                          int at4) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.tensor.5d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3, %4, %5}], [%6];" ::"l"(map),
      "r"(at0), "r"(at1), "r"(at2), "r"(at3), "r"(at4), "r"(source)
      : "memory");
#endif
}

}  // namespace fastconvt::cuda
