// Rows of elements to places that tensor copies can read.
#pragma once

#include "device/dependent_launch.cuh"

namespace fastconvt::cuda {

struct ShuffleGemmPackParams {
  const void* source;
  void* target;
  int rows, inner;             // in all; of the inner dimension
  int64_t length;              // vectors of a row
  int64_t outer_pitch, pitch;  // in the target, in vectors
  int64_t segments;            // of 64 vectors, of a row
};

inline constexpr int kShuffleGemmPackRows = 4;  // segments of a warp, so that loads are in flight

// A warp at a time copies some segments. Row (outer, inner) is the next one in the source; in the target inner rows are
// far apart.
template <typename Vector>
__global__ void __launch_bounds__(256) shuffle_gemm_pack_kernel(const __grid_constant__ ShuffleGemmPackParams p) {
  let_next_grid_begin();
  constexpr int kLoads = 2 * kShuffleGemmPackRows;
  const int64_t warp = (static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x) / 32;
  const int lane = threadIdx.x % 32;
  Vector value[kLoads];
  Vector* to[kLoads];
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const int64_t segment = warp * kShuffleGemmPackRows + i / 2, row = segment / p.segments;
    const int64_t at = (segment - row * p.segments) * 64 + i % 2 * 32 + lane;
    to[i] = nullptr;
    if (row >= p.rows || at >= p.length) continue;
    const int64_t outer = row / p.inner, inner = row - outer * p.inner;
    value[i] = __ldg(static_cast<const Vector*>(p.source) + row * p.length + at);
    to[i] = static_cast<Vector*>(p.target) + outer * p.outer_pitch + inner * p.pitch + at;
  }
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    if (to[i] != nullptr) *to[i] = value[i];
  }
}

}  // namespace fastconvt::cuda
