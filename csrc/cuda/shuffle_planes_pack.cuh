// The shuffle GEMM over planes: weights as copies bring them to shared memory, 64 rows by 64 input channels at a time,
// lines of rows, swizzled; of every 16 rows the even ones first, so that a thread has both of a pair of taps,
// and with kernels of 2 x 2 those of the channels' upper taps before the lower ones', for other banks.
#pragma once

#include "device/dependent_launch.cuh"
#include "shuffle_planes_params.h"

namespace fastconvt::cuda {

inline constexpr int kPlanesPackThreads = 256;

__device__ __forceinline__ uint4 pick_halves(const uint4& low, const uint4& high, uint32_t selector) {
  return {__byte_perm(low.x, low.y, selector), __byte_perm(low.z, low.w, selector),
          __byte_perm(high.x, high.y, selector), __byte_perm(high.z, high.w, selector)};
}

// A thread packs 16 rows of a channel; zeros where they do not exist. `blocks`: of 16 rows, a multiple of 4.
__global__ void __launch_bounds__(kPlanesPackThreads)
    pack_planes_weights(const uint4* weight, uint4* packed, FastDivide blocks, int channels, int chunks, int rows,
                        bool upper_first, int count) {
  let_next_grid_begin();
  const int i = blockIdx.x * kPlanesPackThreads + threadIdx.x;
  if (i >= count) return;
  int block = i;
  const int channel = blocks(block), line = channel % 64;
  uint4 low{}, high{};
  if (channel < channels) {
    const uint4* const from = weight + (static_cast<int64_t>(channel) * rows + block * 16) / 8;
    if (block * 16 < rows) low = __ldg(from);
    if (block * 16 + 8 < rows) high = __ldg(from + 1);
  }
  if (upper_first) {
    const uint4 l = low, h = high;
    low = {l.x, l.z, h.x, h.z}, high = {l.y, l.w, h.y, h.w};
  }
  uint4* const to = packed + (static_cast<int64_t>(block / 4) * chunks + channel / 64) * 512 + line * 8;
  const int unit = block % 4 * 2;
  to[unit ^ line % 8] = pick_halves(low, high, 0x5410);
  to[(unit + 1) ^ line % 8] = pick_halves(low, high, 0x7632);
}

}  // namespace fastconvt::cuda
