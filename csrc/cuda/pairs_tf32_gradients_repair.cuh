// Elements of the gradients of pairs by the definition, where infinity and NaN meet only what they should.
#pragma once

#include "device/numeric.cuh"
#include "pairs_tf32_gradients_product.cuh"

namespace fastconvt::cuda {

static __device__ __noinline__ float pairs_input_gradient_at(const PairsTf32Params& p, int n, int channel, int z, int y,
                                                             int x) {
  const float* const weight = p.weight + static_cast<int64_t>(channel) * p.inner;
  const float* const grad = p.grad_output + n * p.out.batch;
  const int at[3] = {z, y, x}, width = p.axis[2].kernel, height = p.axis[1].kernel;
  double sum = 0;
  for (int tap = 0; tap < p.taps; ++tap) {
    const int t[3] = {tap / width / height, tap / width % height, tap % width};
    int64_t offset = 0;
    bool exists = true;
    for (int a = 0; a < 3; ++a) {
      const int64_t o = static_cast<int64_t>(at[a]) * p.axis[a].stride + t[a] - p.axis[a].padding;
      exists = exists && o >= 0 && o < p.axis[a].out;
      offset += o * p.out.axis[a];
    }
    if (!exists) continue;
    for (int c = 0; c < p.out_channels; ++c) {
      sum += static_cast<double>(grad[c * p.out.channel + offset]) * static_cast<double>(weight[c * p.taps + tap]);
    }
  }
  return static_cast<float>(sum);
}

static __device__ __noinline__ float pairs_weight_gradient_at(const PairsTf32Params& p, int channel, int term) {
  const int out_channel = term / p.taps, tap = term - out_channel * p.taps;
  const int width = p.axis[2].kernel, height = p.axis[1].kernel;
  const int t[3] = {tap / width / height, tap / width % height, tap % width};
  double sum = 0;
  for (int64_t n = 0; n < p.batch; ++n) {
    const float* const grad = p.grad_output + n * p.out.batch + out_channel * p.out.channel;
    const float* const input = p.input + n * p.in.batch + channel * p.in.channel;
    for (int64_t z = 0; z < p.axis[0].in; ++z) {
      const int64_t at_z = z * p.axis[0].stride + t[0] - p.axis[0].padding;
      if (at_z < 0 || at_z >= p.axis[0].out) continue;
      for (int64_t y = 0; y < p.axis[1].in; ++y) {
        const int64_t at_y = y * p.axis[1].stride + t[1] - p.axis[1].padding;
        if (at_y < 0 || at_y >= p.axis[1].out) continue;
        const float* const gradients = grad + at_z * p.out.axis[0] + at_y * p.out.axis[1];
        const float* const inputs = input + z * p.in.axis[0] + y * p.in.axis[1];
        for (int64_t x = 0; x < p.axis[2].in; ++x) {
          const int64_t at_x = x * p.axis[2].stride + t[2] - p.axis[2].padding;
          if (at_x < 0 || at_x >= p.axis[2].out) continue;
          sum += static_cast<double>(gradients[at_x]) * static_cast<double>(inputs[x]);
        }
        if (sum != sum) return static_cast<float>(sum);  // NaN stays
      }
    }
  }
  return static_cast<float>(sum);
}

}  // namespace fastconvt::cuda
