// Transposed convolution along one long axis on tensor cores, one block a multiprocessor (csrc/core/long_rows.h).
//
// Warps have roles. A feeder loads stretches of all input channels as they stand in memory, ahead. Makers make 16
// output channels of a stretch at a time, a warp some strips of it, into shared memory. A storer copies them from
// there, in whole 128-byte lines: stretches overlap by as much as lines of different channels begin apart. Stretches
// are dealt to the blocks in turn, so that blocks write next to each other.
#pragma once

#include "long_rows_make.cuh"
#include "long_rows_move.cuh"

namespace fastconvt::cuda {

template <class Traits>
__global__ void __launch_bounds__(kLongRowsThreads, 1) long_rows_kernel(const __grid_constant__ LongRowsParams p) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) unsigned char long_rows_shared[];
  unsigned char* const shared = long_rows_shared;
  const LongRowsRole<Traits> role(p, shared);
  const int thread = static_cast<int>(threadIdx.x);
  if (thread < kLongRowsRing) {
    init_barrier(role.full(thread), 32);
    init_barrier(role.empty(thread), kLongRowsMakers);
    init_barrier(role.staged(thread), kLongRowsMakers);
    init_barrier(role.free(thread), 1);
  }
  // Channels that do not exist are never loaded.
  for (int i = thread; i < p.tile.input_bytes * p.tile.buffers / 16; i += kLongRowsThreads) {
    reinterpret_cast<uint4*>(shared + p.tile.inputs)[i] = uint4{0, 0, 0, 0};
  }
  fence_new_barriers();
  stage_long_rows_channels(role);
  __syncthreads();
  if (thread < 32 * kLongRowsMakers) {
    LongRowsMaker<Traits>(p, shared).run();
  } else if (thread < 32 * (kLongRowsMakers + 1)) {
    LongRowsStorer<Traits>(p, shared).run();
  } else {
    LongRowsFeeder<Traits>(p, shared).run();
  }
#endif
}

}  // namespace fastconvt::cuda
