// Asynchronous products of two 16-bit operands in shared memory, 64 rows by up to 256 columns (compute capability
// 9.0a). The right operand has its columns innermost, the left one its rows (kRowsInner) or channels.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace fastconvt::cuda {

#if defined(__CUDA_ARCH__) && defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define FASTCONVT_SHUFFLE_GEMM 1
#endif

// The lower half of an operand in lines of 128 bytes, swizzled; `inner` is the distance of 64 elements along the
// innermost dimension. Further places add their distance / 16. The upper half is always the same.
__device__ __forceinline__ uint32_t swizzled_operand(uint32_t address, int inner) {
  return (address & 0x3ffff) >> 4 | static_cast<uint32_t>(inner >> 4) << 16;
}

inline constexpr uint64_t kSwizzledOperand = (uint64_t{1024 >> 4} | uint64_t{1} << 30) << 32;

#define FASTCONVT_OUT1(i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define FASTCONVT_OUT4(i) FASTCONVT_OUT1(i), FASTCONVT_OUT1(i + 1), FASTCONVT_OUT1(i + 2), FASTCONVT_OUT1(i + 3)
#define FASTCONVT_OUT8(i) FASTCONVT_OUT4(i), FASTCONVT_OUT4(i + 4)
#define FASTCONVT_OUT16(i) FASTCONVT_OUT8(i), FASTCONVT_OUT8(i + 8)
#define FASTCONVT_OUT32(i) FASTCONVT_OUT16(i), FASTCONVT_OUT16(i + 16)
#define FASTCONVT_NAMES32                                                                                              \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30," \
  "%31"
#define FASTCONVT_NAMES64                                                                                          \
  FASTCONVT_NAMES32                                                                                                \
  ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%" \
  "59,%60,%61,%62,%63"
#define FASTCONVT_NAMES128                                                                                         \
  FASTCONVT_NAMES64                                                                                                \
  ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%" \
  "91,%92,%93,%94,%95"                                                                                             \
  ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116,%117,%"   \
  "118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define FASTCONVT_SWIZZLED(shape, types, names, sums, a, b, add, trans)                                              \
  asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, " add ", 0;\nwgmma.mma_async.sync.aligned." shape ".f32." types \
               " {" names "}, " a ", " b ", add, 1, 1, " trans ", 1;\n}"                                             \
               : sums                                                                                                \
               : "l"(rows), "l"(columns), "r"(sum), "n"(kRowsInner ? 1 : 0))
#define FASTCONVT_SWIZZLEDS(types)                                                                                   \
  if constexpr (kColumns == 64) {                                                                                    \
    FASTCONVT_SWIZZLED("m64n64k16", types, FASTCONVT_NAMES32, FASTCONVT_OUT8(0), "%32", "%33", "%34", "%35");        \
  } else if constexpr (kColumns == 128) {                                                                            \
    FASTCONVT_SWIZZLED("m64n128k16", types, FASTCONVT_NAMES64, FASTCONVT_OUT16(0), "%64", "%65", "%66", "%67");      \
  } else {                                                                                                           \
    static_assert(kColumns == 256);                                                                                  \
    FASTCONVT_SWIZZLED("m64n256k16", types, FASTCONVT_NAMES128, FASTCONVT_OUT32(0), "%128", "%129", "%130", "%131"); \
  }

// d = rows * columns, plus d if `sum` is not 0; in flight until wgmma_wait().
template <typename T, bool kRowsInner, int kColumns>
__device__ __forceinline__ void start_swizzled_product(float (&d)[kColumns / 8][4], uint32_t low_rows,
                                                       uint32_t low_columns, int sum) {
#ifdef FASTCONVT_SHUFFLE_GEMM
  const uint64_t rows = kSwizzledOperand | low_rows, columns = kSwizzledOperand | low_columns;
  if constexpr (std::is_same_v<T, __half>) {
    FASTCONVT_SWIZZLEDS("f16.f16")
  } else {
    FASTCONVT_SWIZZLEDS("bf16.bf16")
  }
#endif
}

}  // namespace fastconvt::cuda
