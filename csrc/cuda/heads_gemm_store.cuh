// The heads GEMM's outputs: from sums in shared memory, and those that are not finite by the definition.
#pragma once

#include "device/numeric.cuh"
#include "heads_gemm_params.cuh"

namespace fastconvt::cuda {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// One output without the bias, by the definition: only taps and inputs that exist are multiplied. In float64, since
// large finite products must not overflow on the way.
__device__ __noinline__ double heads_gemm_by_definition(const HeadsGemmParams& p, int channel, int o0, int o1, int o2) {
  const HeadsGemmBlock block(p);
  const float* const input = block.input(p);
  const float* const weight = block.weight(p) + channel * p.weight_out;
  const int o[3] = {o0, o1, o2};
  double sum = 0;
#pragma unroll 1
  for (int tap = 0; tap < p.taps; ++tap) {
    int64_t offset = 0;
    bool exists = true;
    int rest = tap;
#pragma unroll 1
    for (int a = 2; a >= 0; --a) {
      const HeadsGemmAxis& axis = p.axis[a];
      const int at = o[a] + axis.padding - rest % axis.kernel;
      rest /= axis.kernel;
      exists = exists && at >= 0 && at % 2 == 0 && at / 2 < axis.in;
      offset += at / 2 * p.in.axis[a];
    }
    if (!exists) continue;
#pragma unroll 1
    for (int c = 0; c < p.group_in; ++c) {
      sum = fma(static_cast<double>(input[offset + c * p.in.channel]),
                static_cast<double>(weight[static_cast<int64_t>(c) * p.weight_channel + tap * p.weight_tap]), sum);
    }
  }
  return sum;
}

// Inputs and weights that do not exist are zeros, which only finite factors leave without effect, and leading bits of
// what is infinite or huge are NaN: both show in a sum that is not finite. Rests of tiny products are lost.
__device__ __forceinline__ bool heads_gemm_is_exact(float sum) {
  return is_finite(sum) && (sum == 0 || fabsf(sum) >= 7.9e-31f);
}

// A warp stores lines along the width; an output is the sum of two columns in neighbouring rows.
template <class Traits>
__device__ __forceinline__ void heads_gemm_store(const HeadsGemmParams& p, const float* sums, int warp, int lane) {
  constexpr int kDepths = 2 * Traits::kDepth, kHeights = 2 * Traits::kHeight, kPitch = Traits::kSumPitch;
  const HeadsGemmBlock block(p);
  int first[3];
#pragma unroll
  for (int a = 0; a < 3; ++a) first[a] = p.axis[a].first_output + 2 * block.cell[a];
  const int end = min(2 * p.axis[2].step, p.axis[2].out - first[2]);
#pragma unroll 1
  for (int line = warp; line < p.group_out * kDepths * kHeights; line += Traits::kMakers / 32) {
    const int channel = line / (kDepths * kHeights), depth = line / kHeights % kDepths, height = line % kHeights;
    const int o0 = first[0] + depth, o1 = first[1] + height;
    if (o0 < 0 || o0 >= p.axis[0].out || o1 < 0 || o1 >= p.axis[1].out) continue;
    const int out_channel = block.group * p.group_out + channel;
    const float term = p.bias == nullptr ? 0.f : __ldg(p.bias + out_channel);
    const float* const from = sums + (depth / 2 * Traits::kHeight + height / 2) * Traits::kLine * kPitch + channel * 8 +
                              depth % 2 * 4 + height % 2 * 2;
    float* const to = p.output + block.n * p.out.batch + out_channel * p.out.channel + o0 * p.out.axis[0] +
                      o1 * p.out.axis[1] + first[2] * p.out.axis[2];
#pragma unroll 1
    for (int i = max(-first[2], 0) + lane; i < end; i += 32) {
      const float* const at = from + i / 2 * kPitch + i % 2;
      float value = at[0] + at[kPitch + Traits::kColumns / 2];
      if (heads_gemm_is_exact(value)) {
        value += term;
      } else {
        value = static_cast<float>(heads_gemm_by_definition(p, channel, o0, o1, first[2] + i) + term);
      }
      to[i * p.out.axis[2]] = p.rectify(value);
    }
  }
}

#endif

}  // namespace fastconvt::cuda
