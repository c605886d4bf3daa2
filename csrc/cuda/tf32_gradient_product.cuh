// Copies and products of TF32 gradients whose left operand comes through registers (compute capability 9.0a; empty
// elsewhere).
#pragma once

#include "device/shared_address.cuh"
#include "device/tensor_copy.cuh"
#include "gradient_gemm_product.cuh"

namespace fastconvt::cuda {

// The bias's gradient by the definition, in float64.
template <typename Params>
static __device__ __noinline__ float tf32_bias_gradient_at(const Params& p, int channel) {
  double sum = 0;
  for (int64_t n = 0; n < p.batch; ++n) {
    const float* const grad = p.grad_output + n * p.out.batch + channel * p.out.channel;
    for (int64_t i = 0; i < p.out.channel; ++i) sum += static_cast<double>(grad[i]);
  }
  return static_cast<float>(sum);
}

// Stores without a branch, which the compiler makes of an if.
__device__ __forceinline__ void store_if(bool exists, float* to, float x) {
  asm volatile("{\n.reg .pred exists;\nsetp.ne.s32 exists, %0, 0;\n@exists st.global.f32 [%1], %2;\n}" ::"r"(
                   static_cast<int>(exists)),
               "l"(to), "f"(x)
               : "memory");
}
__device__ __forceinline__ void store_if(bool exists, float* to, float2 x) {
  asm volatile("{\n.reg .pred exists;\nsetp.ne.s32 exists, %0, 0;\n@exists st.global.v2.f32 [%1], {%2, %3};\n}" ::"r"(
                   static_cast<int>(exists)),
               "l"(to), "f"(x.x), "f"(x.y)
               : "memory");
}

__device__ __forceinline__ uint32_t load_word(uint32_t address) {
  uint32_t word;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(address) : "memory");
  return word;
}
__device__ __forceinline__ void load_pair(uint32_t address, uint32_t& first, uint32_t& second) {
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(first), "=r"(second) : "r"(address) : "memory");
}

#define FASTCONVT_TF32_PRODUCT(shape, regs, sums, a0, a1, a2, a3, b)                                                \
  asm volatile("wgmma.mma_async.sync.aligned." shape ".f32.tf32.tf32 {" regs "}, {" a0 "," a1 "," a2 "," a3 "}, " b \
               ", 1, 1, 1;"                                                                                         \
               : sums                                                                                               \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(columns))
// What a warpgroup sums: so many times 64 rows.
template <int kTiles>
constexpr int kTf32Rows = kTiles == 32 ? 1 : 2;

// d += a * columns: 64 rows, of registers, by kTiles times 8 columns, which lie in shared memory with their inner
// dimension innermost; 8 terms.
template <int kTiles>
__device__ __forceinline__ void start_tf32_product(float (&d)[kTiles][4], const uint32_t (&a)[4], uint64_t columns) {
#ifdef FASTCONVT_GRADIENT_GEMM
  if constexpr (kTiles == 8) {
    FASTCONVT_TF32_PRODUCT("m64n64k8", FASTCONVT_REGS32, FASTCONVT_SUM8, "%32", "%33", "%34", "%35", "%36");
  } else if constexpr (kTiles == 16) {
    FASTCONVT_TF32_PRODUCT("m64n128k8", FASTCONVT_REGS64, FASTCONVT_SUM16, "%64", "%65", "%66", "%67", "%68");
  } else {
    static_assert(kTiles == 32);
    FASTCONVT_TF32_PRODUCT("m64n256k8", FASTCONVT_R128, FASTCONVT_D32(0), "%128", "%129", "%130", "%131", "%132");
  }
#endif
}

}  // namespace fastconvt::cuda
