// Asynchronous products of the shuffle GEMM over planes (compute capability 9.0a): 64 rows, innermost in memory and
// swizzled, by up to 216 columns, innermost too, in blocks of 8 by 8 elements.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "device/wgmma.cuh"

namespace fastconvt::cuda {

// 64 rows in lines of 128 bytes, a channel each, swizzled; 16 channels are kRowsStep further.
__device__ __forceinline__ uint64_t swizzled_rows(uint32_t address) {
  return static_cast<uint64_t>(address >> 4) | uint64_t{8192 >> 4} << 16 | uint64_t{1024 >> 4} << 32 |
         uint64_t{1} << 62;
}
// Blocks of eight channels by eight columns are 128 bytes; `pitch` is the distance of blocks along the columns.
__device__ __forceinline__ uint64_t blocked_columns(uint32_t address, int pitch) {
  return static_cast<uint64_t>(address >> 4) | uint64_t{128 >> 4} << 16 | static_cast<uint64_t>(pitch >> 4) << 32;
}
// From 16 channels to the next ones.
inline constexpr int kPlanesRowsStep = 16 * 128 >> 4, kPlanesColumnsStep = 2 * 128 >> 4;

#define FASTCONVT_PLANES_SUM4(i) FASTCONVT_SUM1(i), FASTCONVT_SUM1(i + 1), FASTCONVT_SUM1(i + 2), FASTCONVT_SUM1(i + 3)
#define FASTCONVT_PLANES_SUM14 FASTCONVT_SUM8, FASTCONVT_PLANES_SUM4(8), FASTCONVT_SUM1(12), FASTCONVT_SUM1(13)
#define FASTCONVT_PLANES_SUM25 FASTCONVT_SUM16, FASTCONVT_PLANES_SUM4(16), FASTCONVT_PLANES_SUM4(20), FASTCONVT_SUM1(24)
#define FASTCONVT_PLANES_SUM27 FASTCONVT_PLANES_SUM25, FASTCONVT_SUM1(25), FASTCONVT_SUM1(26)
#define FASTCONVT_PLANES_REGS56                                                           \
  FASTCONVT_REGS32                                                                        \
  ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52," \
  "%53,%54,%55"
#define FASTCONVT_PLANES_REGS100                                                                  \
  FASTCONVT_REGS64                                                                                \
  ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86," \
  "%87,%88,%89,%90,%91,%92,%93,%94,%95,%96,%97,%98,%99"
#define FASTCONVT_PLANES_REGS108 FASTCONVT_PLANES_REGS100 ",%100,%101,%102,%103,%104,%105,%106,%107"
#define FASTCONVT_PLANES(shape, types, names, sums, a, b, add)                                                       \
  asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, " add ", 0;\nwgmma.mma_async.sync.aligned." shape ".f32." types \
               " {" names "}, " a ", " b ", add, 1, 1, 1, 1;\n}"                                                     \
               : sums                                                                                                \
               : "l"(rows), "l"(columns), "r"(sum))
#define FASTCONVT_PLANES_ALL(types)                                                                                  \
  if constexpr (kColumns == 112) {                                                                                   \
    FASTCONVT_PLANES("m64n112k16", types, FASTCONVT_PLANES_REGS56, FASTCONVT_PLANES_SUM14, "%56", "%57", "%58");     \
  } else if constexpr (kColumns == 200) {                                                                            \
    FASTCONVT_PLANES("m64n200k16", types, FASTCONVT_PLANES_REGS100, FASTCONVT_PLANES_SUM25, "%100", "%101", "%102"); \
  } else {                                                                                                           \
    static_assert(kColumns == 216);                                                                                  \
    FASTCONVT_PLANES("m64n216k16", types, FASTCONVT_PLANES_REGS108, FASTCONVT_PLANES_SUM27, "%108", "%109", "%110"); \
  }

// d = rows * columns, plus d if `sum` is not 0; in flight until wgmma_wait().
template <typename T, int kColumns>
__device__ __forceinline__ void start_planes_product(float (&d)[kColumns / 8][4], uint64_t rows, uint64_t columns,
                                                     int sum) {
#ifdef FASTCONVT_WGMMA
  if constexpr (std::is_same_v<T, __half>) {
    FASTCONVT_PLANES_ALL("f16.f16")
  } else {
    FASTCONVT_PLANES_ALL("bf16.bf16")
  }
#endif
}

}  // namespace fastconvt::cuda
