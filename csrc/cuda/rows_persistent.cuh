// Transposed convolution by whole output rows on tensor cores, one block a multiprocessor
// (csrc/core/rows_persistent.h).
//
// Warps have roles. Feeders load chunks of input rows as they stand in memory, a chunk ahead or more. Makers form
// teams: a team makes an output row of 16 channels, a warp of it a strip of bases, into shared memory. Storers copy
// rows from there, in whole 128-byte lines where a neighbouring row is of constants, which complete the ends of a row.
// Rows of constants alone, which phases of the height without taps are, they store while the makers are at work. Chunks
// are dealt to the blocks in turn, so that blocks write next to each other.
#pragma once

#include "rows_persistent_feed.cuh"
#include "rows_persistent_make.cuh"
#include "rows_persistent_store.cuh"

namespace fastconvt::cuda {

template <class Traits>
__global__ void __launch_bounds__(Traits::kMaxThreads, 1)
    rows_persistent_kernel(const __grid_constant__ RowsPersistentParams p) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  using T = typename Traits::Element;
  extern __shared__ __align__(128) unsigned char rows_persistent_shared[];
  unsigned char* const shared = rows_persistent_shared;
  uint64_t* const barriers = reinterpret_cast<uint64_t*>(shared + p.tile.barriers);
  const int makers = 32 * p.tile.team_warps * p.tile.teams;
  const int thread_index = static_cast<int>(threadIdx.x), stages = kRowsPersistentStages * p.tile.teams;
  if (thread_index < kRowsPersistentBuffers) {
    init_barrier(barriers + thread_index, 32 * kRowsPersistentFeeders + 1);
    init_barrier(barriers + kRowsPersistentBuffers + thread_index, makers / 32);
  }
  if (thread_index < stages) {
    init_barrier(barriers + 2 * kRowsPersistentBuffers + thread_index, p.tile.team_warps);
    init_barrier(barriers + 2 * kRowsPersistentBuffers + stages + thread_index, 1);
  }
  // What does not exist may never be loaded: channels, or, where a row is one segment, columns.
  for (int i = threadIdx.x; i < (p.tile.input_bytes << p.tile.buffer_bits) / 16; i += blockDim.x) {
    reinterpret_cast<uint4*>(shared + p.tile.inputs)[i] = uint4{0, 0, 0, 0};
  }
  fence_new_barriers();
  __syncthreads();
  const int thread = thread_index - makers;
  if (thread < 0) {
    RowsPersistentMaker<Traits>(p, shared).run();
  } else if (thread < 32 * kRowsPersistentStorers) {
    RowsPersistentStorer<Traits>(p, shared).run(thread / 32);
  } else {
    RowsPersistentFeeder<Traits>(p, shared, thread - 32 * kRowsPersistentStorers).run();
  }
#endif
}

}  // namespace fastconvt::cuda
