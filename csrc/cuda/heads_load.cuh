// The head family's input on its way to the tensor cores: every lane loads what it will multiply, straight to
// registers, a group of steps ahead, over the ends of march steps and work items. So nobody waits for anybody.
#pragma once

#include "heads_params.cuh"
#include "heads_product.cuh"

namespace fastconvt::cuda {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800

// kPlanes: four positions of each channel are one aligned vector. kAhead: steps of a group.
template <typename T, bool kPlanes, int kAhead>
class HeadsLoader {
  static constexpr int kLaneChannels = 8 / sizeof(T);
  static constexpr int kStepChannels = 4 * kLaneChannels;

  const HeadsParams& p;
  const int channel;  // of the lane's, in a step
  const int group;
  // The group of steps that is loaded next.
  int item;
  int rows = 0;      // of the march, that are left in the item, this one included
  int left = 0;      // channels of the row, from the lane's first one of the group on
  int existing = 0;  // positions of the quad
  const T* source = nullptr;
  uint32_t raw[kAhead][8];

 public:
  __device__ HeadsLoader(const HeadsParams& p, int group)
      : p(p), channel(threadIdx.x % 4 * kLaneChannels), group(group), item(blockIdx.x - gridDim.x) {}

  // The group of steps that is in registers is about to be used: loads go on with the one after it.
  __device__ __forceinline__ void advance() {
    left -= kAhead * kStepChannels;
    source += kAhead * kStepChannels * p.in.channel;
    if (left + channel > 0) return;
    source += p.in.axis[p.march] - (p.group_in - channel - left) * p.in.channel;
    left = p.group_in - channel;
    if (--rows <= 0) find_item();  // also at the very first
  }

  // Step i of the group.
  __device__ __forceinline__ HeadsRight step(int i) const {
    HeadsRight right;
    if constexpr (kPlanes) {
      right.template from_planes<T>(raw[i]);
    } else {
#pragma unroll
      for (int j = 0; j < 8; ++j) right.word[j % 2][j / 2] = raw[i][j];
    }
    return right;
  }

  // Its place is loaded anew: once it has been used, so that the same registers take it.
  __device__ __forceinline__ void request(int i) {
    const int channels = left - i * kStepChannels;
    const T* const at = source + i * kStepChannels * p.in.channel;
    if constexpr (kPlanes) {
#pragma unroll
      for (int c = 0; c < kLaneChannels; ++c) {
        heads_load_vector<4 * sizeof(T)>(raw[i] + c * sizeof(T), at + c * p.in.channel, existing > 0 && c < channels);
      }
    } else if (p.pixel_vectors) {
#pragma unroll
      for (int t = 0; t < 4; ++t) {
        heads_load_vector<8>(raw[i] + 2 * t, at + t * p.in.axis[2], t < existing && channels > 0);
      }
    } else {
      request_elements(i, at, channels);
    }
  }

 private:
  __device__ __forceinline__ void find_item() {
    rows = 0, existing = 0, left = p.group_in - channel;
    while (rows == 0 && item + static_cast<int>(gridDim.x) < p.items) {
      item += gridDim.x;
      HeadsItem at;
      at.find(p, item);
      const int begin = max(0, at.first);
      rows = max(0, min(p.march_in, at.end) - begin);
      const HeadsQuad quad(p, threadIdx.x / 4 % 8 + threadIdx.x / 32 * 8);
      const int n = at.batch + quad.batch, y = p.of_mid.read_begin(at.mid) + quad.row;
      const int x = p.of_width.read_begin(at.width) + quad.column;
      const bool exists =
          quad.exists(p) && n < p.batch && y < p.of_mid.read_end(at.mid) && x < p.of_width.read_end(at.width);
      existing = exists ? min(4, p.of_width.in - x) : 0;
      source = static_cast<const T*>(p.input) + (static_cast<int64_t>(group) * p.group_in + channel) * p.in.channel;
      if (exists) {
        source += n * p.in.batch + begin * p.in.axis[p.march] + y * p.in.axis[p.mid] + x * p.in.axis[2];
      }
    }
    if (rows == 0) existing = 0;
  }

  // Where memory has no aligned vectors.
  __device__ __forceinline__ void request_elements(int i, const T* at, int channels) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const int t = j / 2, c = j % 2 * (kLaneChannels / 2);
      const T* const from = at + t * p.in.axis[2] + c * p.in.channel;
      if constexpr (sizeof(T) == 4) {
        raw[i][j] = t < existing && c < channels ? __ldg(reinterpret_cast<const uint32_t*>(from)) : 0u;
      } else {
        const unsigned short* const low = reinterpret_cast<const unsigned short*>(from);
        uint32_t word = t < existing && c < channels ? __ldg(low) : 0u;
        if (t < existing && c + 1 < channels) word |= static_cast<uint32_t>(__ldg(low + p.in.channel)) << 16;
        raw[i][j] = word;
      }
    }
  }
};

#endif

}  // namespace fastconvt::cuda
