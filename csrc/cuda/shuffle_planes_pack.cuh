// The shuffle GEMM over planes: weights, (input channel, row), the even ones of every 16 rows first, so that a thread
// has both of a pair of taps.
#pragma once

#include "device/dependent_launch.cuh"
#include "shuffle_planes_params.h"

namespace fastconvt::cuda {

inline constexpr int kPlanesPackThreads = 256;

__device__ __forceinline__ uint4 pick_halves(const uint4& low, const uint4& high, uint32_t selector) {
  return {__byte_perm(low.x, low.y, selector), __byte_perm(low.z, low.w, selector),
          __byte_perm(high.x, high.y, selector), __byte_perm(high.z, high.w, selector)};
}

// A thread packs 16 rows of a channel; zeros where they do not exist. `blocks`: of 16 rows.
__global__ void __launch_bounds__(kPlanesPackThreads)
    pack_planes_weights(const uint4* weight, uint4* packed, FastDivide blocks, int rows, int count) {
  let_next_grid_begin();
  const int i = blockIdx.x * kPlanesPackThreads + threadIdx.x;
  if (i >= count) return;
  int block = i;
  const int channel = blocks(block);
  const uint4* const from = weight + (static_cast<int64_t>(channel) * rows + block * 16) / 8;
  const uint4 low = __ldg(from), high = block * 16 + 8 < rows ? __ldg(from + 1) : uint4{};
  packed[2 * static_cast<int64_t>(i)] = pick_halves(low, high, 0x5410);
  packed[2 * static_cast<int64_t>(i) + 1] = pick_halves(low, high, 0x7632);
}

}  // namespace fastconvt::cuda
