// Compiling a stretch of code for an instruction set of its own, with gcc and with clang.
//
// Whatever stands between begin and end must have internal linkage and use no template of the standard library: its
// instances would be linked for the other instruction sets too.
#pragma once

#if defined(__x86_64__) && defined(__GNUC__)
#define FASTCONVT_X86 1

#define FASTCONVT_AVX2 "avx2,fma,f16c"
#define FASTCONVT_PRAGMA(text) _Pragma(#text)
#if defined(__clang__)
#define FASTCONVT_AVX512 "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"
#define FASTCONVT_TARGET_BEGIN(features) \
  FASTCONVT_PRAGMA(clang attribute push(__attribute__((target(features))), apply_to = function))
#define FASTCONVT_TARGET_END _Pragma("clang attribute pop")
#else
#define FASTCONVT_AVX512 "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,prefer-vector-width=512"
#define FASTCONVT_TARGET_BEGIN(features) _Pragma("GCC push_options") FASTCONVT_PRAGMA(GCC target(features))
#define FASTCONVT_TARGET_END _Pragma("GCC pop_options")
#endif

#endif
