// Transposed convolution of channels_last tensors by whole pixels on tensor cores, one block a multiprocessor
// (csrc/core/pixel_rows.h).
//
// Warps have roles. A feeder loads segments of input rows, ahead. Makers make a segment of an output row, all of its
// channels, into shared memory, where phases without taps stand from the beginning. A storer copies it from there,
// which is one run in memory. Rows of constants, which phases of the height without taps are, it stores while the
// makers are at work. Segments are dealt to the blocks in turn, so that blocks write next to each other.
#pragma once

#include "pixel_rows_make.cuh"
#include "pixel_rows_move.cuh"

namespace fastconvt::cuda {

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1) pixel_rows_kernel(const __grid_constant__ PixelRowsParams p) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) unsigned char pixel_rows_shared[];
  unsigned char* const shared = pixel_rows_shared;
  const PixelRowsRole<Traits> role(p, shared);
  const int thread = static_cast<int>(threadIdx.x);
  if (thread < kPixelRowsRing) {
    init_barrier(role.full(thread), 32);
    init_barrier(role.empty(thread), Traits::kMakers);
    init_barrier(role.staged(thread), Traits::kMakers);
    init_barrier(role.free(thread), 1);
  }
  // Channels that do not exist are never loaded.
  for (int i = thread; i < p.tile.input_bytes * p.tile.buffers / 16; i += Traits::kThreads) {
    reinterpret_cast<uint4*>(shared + p.tile.inputs)[i] = uint4{0, 0, 0, 0};
  }
  fence_new_barriers();
  stage_pixel_rows_channels(role);
  fence_shared_writes();
  __syncthreads();
  if (thread < 32 * Traits::kMakers) {
    PixelRowsMaker<Traits>(p, shared).run();
  } else if (thread < 32 * (Traits::kMakers + 1)) {
    PixelRowsStorer<Traits>(p, shared).run();
  } else {
    PixelRowsFeeder<Traits>(p, shared).run();
  }
#endif
}

}  // namespace fastconvt::cuda
