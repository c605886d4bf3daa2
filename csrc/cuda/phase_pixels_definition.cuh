// What has no finite sum is made again by the definition.
#pragma once

#include "phase_pixels_item.cuh"

namespace fastconvt::cuda {

// One sum by the definition, in float64: only taps and inputs that exist are multiplied.
template <typename T>
__device__ __noinline__ T phase_pixels_definition(const PhasePixelsParams& p, int64_t place) {
  int64_t rest = place, o[3];
  const int64_t n = rest / p.out.batch;
  rest -= n * p.out.batch;
#pragma unroll
  for (int a = 0; a < 3; ++a) {
    o[a] = rest / p.out.axis[a];
    rest -= o[a] * p.out.axis[a];
  }
  const int64_t channel = rest;
  const int64_t group = channel / p.group_out;
  const T* const input = static_cast<const T*>(p.input) + n * p.in.batch + group * p.group_in * p.in.channel;
  const T* const weight = static_cast<const T*>(p.weight) + group * p.group_in * p.group_out * p.taps +
                          (channel - group * p.group_out) * p.weight_column;
  double sum = p.bias == nullptr ? 0 : double(to_accumulator(static_cast<const T*>(p.bias)[channel]));
#pragma unroll 1
  for (int tap = 0; tap < p.taps; ++tap) {
    int64_t offset = 0;
    bool exists = true;
    int of_rest = tap;
#pragma unroll
    for (int a = 2; a >= 0; --a) {
      const int t = of_rest % p.axis[a].kernel;
      of_rest /= p.axis[a].kernel;
      const int64_t at = o[a] + p.axis[a].padding - static_cast<int64_t>(t) * p.axis[a].dilation;
      exists = exists && at >= 0 && at % p.axis[a].stride == 0 && at / p.axis[a].stride < p.axis[a].in;
      offset += at / p.axis[a].stride * p.in.axis[a];
    }
    if (!exists) continue;
#pragma unroll 1
    for (int c = 0; c < p.group_in; ++c) {
      sum =
          fma(double(to_accumulator(input[offset + c * p.in.channel])),
              double(to_accumulator(weight[static_cast<int64_t>(c) * p.group_out * p.taps + tap * p.weight_tap])), sum);
    }
  }
  return from_accumulator<T>(p.rectify(static_cast<float>(sum)));
}

}  // namespace fastconvt::cuda
