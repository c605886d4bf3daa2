// Rows of elements to places that tensor copies can read.
#pragma once

#include "device/dependent_launch.cuh"
#include "device/fast_divide.h"

namespace fastconvt::cuda {

struct ShuffleGemmPackParams {
  const void* source;
  void* target;
  int rows;                    // in all
  FastDivide inner;            // of the inner dimension
  int64_t length;              // vectors of a row
  int64_t outer_pitch, pitch;  // in the target, in vectors
  FastDivide segments;         // of 64 vectors, of a row
};

inline constexpr int kShuffleGemmPackRows = 4;  // segments of a warp, so that loads are in flight

// A warp at a time copies some segments. Row (outer, inner) is the next one in the source; in the target inner rows are
// far apart.
template <typename Vector>
__global__ void __launch_bounds__(256) shuffle_gemm_pack_kernel(const __grid_constant__ ShuffleGemmPackParams p) {
  let_next_grid_begin();
  constexpr int kLoads = 2 * kShuffleGemmPackRows;
  const int warp = static_cast<int>(blockIdx.x) * 8 + static_cast<int>(threadIdx.x) / 32;
  const int lane = threadIdx.x % 32;
  Vector value[kLoads];
  Vector* to[kLoads];
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    int segment = warp * kShuffleGemmPackRows + i / 2;
    const int row = p.segments(segment);
    const int64_t at = static_cast<int64_t>(segment) * 64 + i % 2 * 32 + lane;
    to[i] = nullptr;
    if (row >= p.rows || at >= p.length) continue;
    int inner = row;
    const int outer = p.inner(inner);
    value[i] = __ldg(static_cast<const Vector*>(p.source) + row * p.length + at);
    to[i] = static_cast<Vector*>(p.target) + outer * p.outer_pitch + inner * p.pitch + at;
  }
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    if (to[i] != nullptr) *to[i] = value[i];
  }
}

}  // namespace fastconvt::cuda
