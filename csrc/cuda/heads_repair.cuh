// The head family's outputs that are not finite, by the definition.
#pragma once

#include "heads_params.cuh"
#include "heads_product.cuh"

namespace fastconvt::cuda {

// One output from global memory, without the bias, by the definition: only taps and inputs that exist are multiplied.
// In float64, since large finite products must not overflow on the way.
template <typename T, class Params>
__device__ __noinline__ double heads_sum_by_definition(const Params& p, int n, int group, int channel, int o0, int o1,
                                                       int o2) {
  const int o[3] = {o0, o1, o2};
  const T* const input = static_cast<const T*>(p.input) + n * p.in.batch + group * p.group_in * p.in.channel;
  const T* const weight =
      static_cast<const T*>(p.weight) + (static_cast<int64_t>(group) * p.group_in * p.channels + channel) * p.taps;
  double sum = 0;
#pragma unroll 1
  for (int tap = 0; tap < p.taps; ++tap) {
    int64_t offset = 0;
    bool exists = true;
    int rest = tap;
#pragma unroll
    for (int a = 2; a >= 0; --a) {
      const int t = rest % p.axis[a].kernel;
      rest /= p.axis[a].kernel;
      const int at = o[a] + p.axis[a].padding - t * p.axis[a].dilation;
      exists = exists && at >= 0 && at % p.axis[a].stride == 0 && at / p.axis[a].stride < p.axis[a].in;
      offset += at / p.axis[a].stride * p.in.axis[a];
    }
    if (!exists) continue;
#pragma unroll 1
    for (int c = 0; c < p.group_in; ++c) {
      const T value = input[offset + c * p.in.channel], w = weight[static_cast<int64_t>(c) * p.channels * p.taps + tap];
      sum = fma(static_cast<double>(to_accumulator(value)), static_cast<double>(to_accumulator(w)), sum);
    }
  }
  return sum;
}

// Makes the outputs of an item that are not finite again, by the definition.
template <typename T>
__device__ __noinline__ void heads_repair(const HeadsParams& p, const HeadsItem item, int group) {
  const int width_begin = p.of_width.tile_begin(item.width) * p.of_width.stride;
  const int widths = min(p.of_width.own_end(item.width) * p.of_width.stride, p.of_width.out) - width_begin;
  const int mid_begin = max(p.of_mid.own_begin(item.mid) * p.of_mid.stride - p.of_mid.padding, 0);
  const int mids = min(p.of_mid.own_end(item.mid) * p.of_mid.stride - p.of_mid.padding, p.of_mid.out) - mid_begin;
  const int batches = min(p.box_batch, p.batch - item.batch);
  for (int march = 0; march < p.march_out; ++march) {
    // The step that emits this coordinate.
    bool own = false;
    for (int i = 0; i < p.events; ++i) {
      const int rest = march - p.event[i].shift;
      if (!p.event[i].emits || rest % p.march_stride != 0) continue;
      const int step = rest / p.march_stride;
      own = step >= item.begin && step < item.end;
    }
    if (!own) continue;
    for (int64_t i = threadIdx.x; i < static_cast<int64_t>(batches) * p.channels * mids * widths; i += blockDim.x) {
      int64_t rest = i;
      const int width = width_begin + static_cast<int>(rest % widths);
      rest /= widths;
      const int mid = mid_begin + static_cast<int>(rest % mids);
      rest /= mids;
      const int channel = static_cast<int>(rest % p.channels);
      const int n = item.batch + static_cast<int>(rest / p.channels);
      T* const place = static_cast<T*>(p.output) + n * p.out.batch +
                       (static_cast<int64_t>(group) * p.channels + channel) * p.out.channel +
                       march * p.out.axis[p.march] + mid * p.out.axis[p.mid] + width * p.out.axis[2];
      if (p.rectify.shows_finite(to_accumulator(*place))) continue;
      double sum = heads_sum_by_definition<T>(p, n, group, channel, p.march == 0 ? march : mid,
                                              p.march == 0 ? mid : march, width);
      if (p.bias != nullptr) sum += to_accumulator(static_cast<const T*>(p.bias)[group * p.channels + channel]);
      *place = from_accumulator<T>(p.rectify(static_cast<float>(sum)));
    }
  }
}

}  // namespace fastconvt::cuda
