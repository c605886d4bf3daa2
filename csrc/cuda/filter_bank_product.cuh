// The filter bank's products: 64 rows, from registers, by kColumns columns, from shared memory, by 32 bytes of
// channels.
#pragma once

#include "device/wgmma.cuh"
#include "filter_bank_params.cuh"

namespace fastconvt::cuda {

// The nearest TF32 number.
__device__ __forceinline__ uint32_t filter_bank_round(uint32_t x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(x) : "f"(__uint_as_float(x)));
#endif
  return x;
}
// The nearest TF32 number, and what it leaves. Inf and NaN leave NaN in one of the two.
__device__ __forceinline__ uint32_t filter_bank_split(uint32_t x, uint32_t& rest) {
  const uint32_t high = (x + 0x1000u) & 0xffffe000u;
  rest = __float_as_uint(__uint_as_float(x) - __uint_as_float(high));
  return high;
}

// The right operand: columns 16 bytes apart, 16 bytes of channels `pitch` bytes apart.
__device__ __forceinline__ uint64_t filter_bank_columns(uint32_t address, int pitch) {
  return static_cast<uint64_t>((address & 0x3ffff) >> 4) | static_cast<uint64_t>(pitch >> 4) << 16 | uint64_t{8} << 32;
}

#define FILTER_BANK_SUM4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define FILTER_BANK_SUM20(i)                                                                       \
  FILTER_BANK_SUM4(i), FILTER_BANK_SUM4(i + 4), FILTER_BANK_SUM4(i + 8), FILTER_BANK_SUM4(i + 12), \
      FILTER_BANK_SUM4(i + 16)
#define FILTER_BANK_SUM40 FILTER_BANK_SUM20(0), FILTER_BANK_SUM20(20)
#define FILTER_BANK_SUM80 FILTER_BANK_SUM40, FILTER_BANK_SUM20(40), FILTER_BANK_SUM20(60)
#define FILTER_BANK_REGISTERS40                                            \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19," \
  "%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39"
#define FILTER_BANK_REGISTERS80                                                       \
  FILTER_BANK_REGISTERS40                                                             \
  ",%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59," \
  "%60,%61,%62,%63,%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"
#define FILTER_BANK_PRODUCT(shape, types, registers, sums, operands, scale, tail)                                      \
  asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, " scale ", 0;\nwgmma.mma_async.sync.aligned." shape ".f32." types \
               " {" registers "}, " operands ", add, 1, 1" tail ";\n}"                                                 \
               : sums                                                                                                  \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(columns), "r"(add))
#define FILTER_BANK_PRODUCTS(k, types, tail)                                                                      \
  if constexpr (kColumns == 80) {                                                                                 \
    FILTER_BANK_PRODUCT("m64n80" k, types, FILTER_BANK_REGISTERS40, FILTER_BANK_SUM40, "{%40,%41,%42,%43}, %44",  \
                        "%45", tail);                                                                             \
  } else {                                                                                                        \
    FILTER_BANK_PRODUCT("m64n160" k, types, FILTER_BANK_REGISTERS80, FILTER_BANK_SUM80, "{%80,%81,%82,%83}, %84", \
                        "%85", tail);                                                                             \
  }

// d = a * columns, added to d if `add`; in flight until wgmma_wait().
template <typename T, int kColumns>
__device__ __forceinline__ void filter_bank_multiply(float (&d)[kColumns / 2], const uint32_t (&a)[4], uint64_t columns,
                                                     int add) {
  static_assert(kColumns == 80 || kColumns == 160);
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  if constexpr (sizeof(T) == 4) {
    FILTER_BANK_PRODUCTS("k8", "tf32.tf32", "")
  } else if constexpr (std::is_same_v<T, __half>) {
    FILTER_BANK_PRODUCTS("k16", "f16.f16", ", 0")
  } else {
    FILTER_BANK_PRODUCTS("k16", "bf16.bf16", ", 0")
  }
#endif
}

}  // namespace fastconvt::cuda
