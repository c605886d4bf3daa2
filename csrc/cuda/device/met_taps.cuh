// Which taps of an input position meet outputs that exist, for kernels that gather what positions see: a bit for each
// tap along each axis, at most 32 of them.
#pragma once

#include <cstdint>

#include "fast_divide.h"

namespace fastconvt::cuda {

struct MetAxis {
  FastDivide in;
  int out, kernel, stride, padding, dilation;
};

// Of a tap: how far its output is from that of the first one, and its place along each axis.
struct MetTap {
  int offset;
  unsigned char at[4];
};

// By a block of kThreads; the caller synchronises.
template <int kThreads>
__device__ __forceinline__ void fill_taps(const MetAxis (&axes)[3], int count, MetTap* taps) {
  for (int t = threadIdx.x; t < count; t += kThreads) {
    const int t2 = t % axes[2].kernel, rest = t / axes[2].kernel;
    const int t1 = rest % axes[1].kernel, t0 = rest / axes[1].kernel;
    taps[t].offset =
        (t0 * axes[0].dilation * axes[1].out + t1 * axes[1].dilation) * axes[2].out + t2 * axes[2].dilation;
    taps[t].at[0] = static_cast<unsigned char>(t0), taps[t].at[1] = static_cast<unsigned char>(t1);
    taps[t].at[2] = static_cast<unsigned char>(t2);
  }
}

struct MetTaps {
  int first[3];  // the output of the first tap along each axis, which may not exist
  uint32_t meets[3];

  __device__ __forceinline__ bool meet(const MetTap& tap) const {
    return (meets[0] >> tap.at[0] & meets[1] >> tap.at[1] & meets[2] >> tap.at[2] & 1) != 0;
  }
};

// Of an input position of the whole batch, which becomes the batch entry; none where it does not exist.
__device__ __forceinline__ MetTaps find_met_taps(const MetAxis (&axes)[3], int& position, bool exists) {
  MetTaps found;
#pragma unroll
  for (int a = 2; a >= 0; --a) {
    const MetAxis& axis = axes[a];
    int q = position;
    position = axis.in(q);
    found.first[a] = q * axis.stride - axis.padding;
    found.meets[a] = 0;
    for (int t = 0; t < axis.kernel; ++t) {
      const int o = found.first[a] + t * axis.dilation;
      if (exists && o >= 0 && o < axis.out) found.meets[a] |= 1u << t;
    }
  }
  return found;
}

}  // namespace fastconvt::cuda
