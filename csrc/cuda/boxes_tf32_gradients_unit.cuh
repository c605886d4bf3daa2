// Units of positions, stages and elements by the definition.
#pragma once

#include "../core/boxes_tf32_gradients.h"
#include "boxes_tf32_gradients_params.h"
#include "device/numeric.cuh"
#include "tf32_gradient_product.cuh"

namespace fastconvt::cuda {

struct BoxesBarriers {
  uint32_t base;
  int stages, stage_bytes;
  __device__ __forceinline__ uint32_t full(int stage) const { return base + stage * 8; }
  __device__ __forceinline__ uint32_t empty(int stage) const { return full(kBoxesMaxStages + stage); }
  // Offsets of terms in a copy, for each phase.
  __device__ __forceinline__ uint32_t table() const { return base + 256; }
  __device__ __forceinline__ uint32_t stage(int stage) const { return base + kBoxesHeader + stage * stage_bytes; }
  __device__ __forceinline__ void initialize() const {
    for (int i = 0; i < stages; ++i) {
      mbarrier_init(full(i), 1);
      mbarrier_init(empty(i), 8);
    }
    fence_shared_writes();
  }
};

// The first position of a unit: width, height, depth, batch entry; beyond the batch if there is no such unit.
struct BoxesPlace {
  int at[4];

  FASTCONVT_HOST_DEVICE BoxesPlace(const BoxesTf32Params& p, const BoxesUnitParams& u, int index) {
    int rest = index < u.count ? index : 0;
    for (int a = 0; a < 3; ++a) {
      const int next = u.tiles[a](rest);
      at[a] = rest * u.box[a].divisor, rest = next;
    }
    at[3] = index < u.count ? rest * u.box[3].divisor : p.size[3];
  }
  // Where the output begins that a copy begins with.
  FASTCONVT_HOST_DEVICE int output(const BoxesTf32Params& p, int a) const {
    return at[a] * p.stride[a] - p.padding[a] - (a == 0 ? p.lead : 0);
  }
};

// Bytes from the first of the neighbouring units to what a position sees first.
FASTCONVT_HOST_DEVICE uint32_t offset_of_position(const BoxesUnitParams& u, int position) {
  const int unit = position / u.positions;
  int rest = position - unit * u.positions, offset = unit * u.pitch;
  for (int a = 0; a < 4; ++a) {
    const int next = u.box[a](rest);
    offset += rest * u.offset[a], rest = next;
  }
  return offset;
}
FASTCONVT_HOST_DEVICE int offset_of_tap(const BoxesTf32Params& p, int channel_bytes, const int (&tap_bytes)[3],
                                        int channel, int tap) {
  int row = p.by_width(tap);
  const int plane = p.by_height(row);
  return channel * channel_bytes + tap * tap_bytes[0] + row * tap_bytes[1] + plane * tap_bytes[2] + p.lead * 4;
}

// The first element of a position's channels; null if there is no such position.
__device__ __forceinline__ float* boxes_input_place(const BoxesTf32Params& p, const BoxesPlace& place, int inside,
                                                    float* base) {
  int64_t offset = 0, pitch = 1;
  bool exists = true;
#pragma unroll
  for (int a = 0; a < 4; ++a) {
    const int next = p.input.box[a](inside), at = place.at[a] + inside;
    exists = exists && at < p.size[a];
    if (a == 3) pitch = static_cast<int64_t>(p.image) * p.in_channels;
    offset += at * pitch, pitch *= p.size[a];
    inside = next;
  }
  return exists ? base + offset : nullptr;
}

// Elements by the definition, where infinity and NaN meet only what they should.
static __device__ __noinline__ float boxes_input_gradient_at(const BoxesTf32Params& p, int64_t element) {
  int64_t rest = element;
  int at[3];
  for (int a = 2; a >= 0; --a) {
    const int64_t next = rest / p.axis[a].in;
    at[a] = static_cast<int>(rest - next * p.axis[a].in), rest = next;
  }
  const int64_t n = rest / p.in_channels, channel = rest - n * p.in_channels;
  const float* const weight = p.weight_tensor + channel * p.inner;
  const float* const grad = p.grad_output + n * p.out.batch;
  const int width = p.axis[2].kernel, height = p.axis[1].kernel;
  double sum = 0;
  for (int tap = 0; tap < p.taps; ++tap) {
    const int t[3] = {tap / width / height, tap / width % height, tap % width};
    int64_t offset = 0;
    bool exists = true;
    for (int a = 0; a < 3; ++a) {
      const int64_t o = static_cast<int64_t>(at[a]) * p.axis[a].stride + t[a] * p.axis[a].dilation - p.axis[a].padding;
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

static __device__ __noinline__ float boxes_weight_gradient_at(const BoxesTf32Params& p, int64_t element) {
  const int64_t channel = element / p.inner;
  const int term = static_cast<int>(element - channel * p.inner), out_channel = term / p.taps;
  const int tap = term - out_channel * p.taps, width = p.axis[2].kernel, height = p.axis[1].kernel;
  const int t[3] = {tap / width / height, tap / width % height, tap % width};
  double sum = 0;
  for (int64_t n = 0; n < p.batch; ++n) {
    const float* const grad = p.grad_output + n * p.out.batch + out_channel * p.out.channel;
    const float* const input = p.input_tensor + n * p.in.batch + channel * p.in.channel;
    for (int64_t z = 0; z < p.axis[0].in; ++z) {
      const int64_t at_z = z * p.axis[0].stride + t[0] * p.axis[0].dilation - p.axis[0].padding;
      if (at_z < 0 || at_z >= p.axis[0].out) continue;
      for (int64_t y = 0; y < p.axis[1].in; ++y) {
        const int64_t at_y = y * p.axis[1].stride + t[1] * p.axis[1].dilation - p.axis[1].padding;
        if (at_y < 0 || at_y >= p.axis[1].out) continue;
        const float* const gradients = grad + at_z * p.out.axis[0] + at_y * p.out.axis[1];
        const float* const inputs = input + z * p.in.axis[0] + y * p.in.axis[1];
        for (int64_t x = 0; x < p.axis[2].in; ++x) {
          const int64_t at_x = x * p.axis[2].stride + t[2] * p.axis[2].dilation - p.axis[2].padding;
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
