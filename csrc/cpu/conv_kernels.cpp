// The convolution's kernels, compiled for each instruction set. Whatever stands under a target pragma has internal
// linkage and uses no template of the standard library: its instances would be linked for the other sets too.
#include <cstdint>

#include "conv_plan.h"
#include "half.h"
#include "target.h"

#ifdef FASTCONVT_X86
#include <immintrin.h>
#endif

namespace fastconvt::cpu::conv {

namespace portable {
namespace {
constexpr int kVectorBytes = 16;
constexpr int kRegisters = 15;
constexpr int kMaxBlock = 4;
#if defined(__SSE2__)
inline void stream_vector(float* to, __m128 v) { _mm_stream_ps(to, v); }
inline void stream_vector(double* to, __m128d v) { _mm_stream_pd(to, v); }
inline void stream_end() { _mm_sfence(); }
#else
template <class T, class V>
inline void stream_vector(T* to, V v) {
  __builtin_memcpy(to, &v, sizeof(v));
}
inline void stream_end() {}
#endif
template <class V>
inline void store_half(Half* to, V v) {
  for (int i = 0; i < int(sizeof(V) / sizeof(float)); ++i) from_accumulator(v[i], to + i);
}
#include "conv_kernel.h"
}  // namespace
}  // namespace portable

const IsaShape kPortableShape = {portable::kVectorBytes, portable::kMaxBlock};
void run_portable(const ConvPlan& plan, int64_t begin, int64_t end) { portable::run(plan, begin, end); }
void activate_portable(const Problem& problem, void* values, int64_t count) {
  portable::activate_any(problem, values, count);
}

#ifdef FASTCONVT_X86

FASTCONVT_TARGET_BEGIN(FASTCONVT_AVX2)
namespace avx2 {
namespace {
constexpr int kVectorBytes = 32;
constexpr int kRegisters = 16;
constexpr int kMaxBlock = 6;
inline void stream_vector(float* to, __m256 v) { _mm256_stream_ps(to, v); }
inline void stream_vector(double* to, __m256d v) { _mm256_stream_pd(to, v); }
inline void stream_end() { _mm_sfence(); }
inline void store_half(Half* to, __m256 v) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}
#include "conv_kernel.h"
}  // namespace
}  // namespace avx2
void run_avx2(const ConvPlan& plan, int64_t begin, int64_t end) { avx2::run(plan, begin, end); }
void activate_avx2(const Problem& problem, void* values, int64_t count) { avx2::activate_any(problem, values, count); }
FASTCONVT_TARGET_END

FASTCONVT_TARGET_BEGIN(FASTCONVT_AVX512)
namespace avx512 {
namespace {
constexpr int kVectorBytes = 64;
constexpr int kRegisters = 31;
constexpr int kMaxBlock = 8;
inline void stream_vector(float* to, __m512 v) { _mm512_stream_ps(to, v); }
inline void stream_vector(double* to, __m512d v) { _mm512_stream_pd(to, v); }
inline void stream_end() { _mm_sfence(); }
inline void store_half(Half* to, __m512 v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_maskz_cvtps_ph(0xffff, v, _MM_FROUND_TO_NEAREST_INT));
}
#include "conv_kernel.h"
}  // namespace
}  // namespace avx512
void run_avx512(const ConvPlan& plan, int64_t begin, int64_t end) { avx512::run(plan, begin, end); }
void activate_avx512(const Problem& problem, void* values, int64_t count) {
  avx512::activate_any(problem, values, count);
}
FASTCONVT_TARGET_END

const IsaShape kAvx2Shape = {avx2::kVectorBytes, avx2::kMaxBlock};
const IsaShape kAvx512Shape = {avx512::kVectorBytes, avx512::kMaxBlock};

#endif

}  // namespace fastconvt::cpu::conv
