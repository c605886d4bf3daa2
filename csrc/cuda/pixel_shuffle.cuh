// Transposed convolutions whose taps never overlap, on matrix units (compute capability 8.0): see
// core/pixel_shuffle.h. A block has a chunk of output channels for good, and walks over tiles of positions.
#pragma once

#include "pixel_shuffle_feed.cuh"
#include "pixel_shuffle_store.cuh"

namespace fastconvt::cuda {

inline constexpr int kPixelShuffleMaxThreads = 256 + kPixelShuffleProducers;

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
// The second group of four warps, one a scheduler, begins when the first one has multiplied its first tile: so one
// stores while the other multiplies.
class PixelShuffleStagger {
 public:
  __device__ explicit PixelShuffleStagger(const PixelShuffleParams& p) : pending(p.tile.staggered) {}
  __device__ void wait() {
    if (pending && threadIdx.x >= 128) {
      asm volatile("bar.sync 2, 256;" ::: "memory");
      pending = false;
    }
  }
  __device__ void pass() {
    if (pending) {
      asm volatile("bar.arrive 2, 256;" ::: "memory");
      pending = false;
    }
  }

 private:
  bool pending;
};
#endif

template <class Traits>
__global__ void __launch_bounds__(kPixelShuffleMaxThreads, 1)
    pixel_shuffle_kernel(const __grid_constant__ PixelShuffleParams p,
                         const PixelShuffleEpilogue<typename Traits::T> epilogue) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  extern __shared__ __align__(16) char pixel_shuffle_memory[];
  const uint32_t shared = shared_address(pixel_shuffle_memory);
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;  // known to be uniform
  if (threadIdx.x == 0) PixelShuffleFeed<Traits>::init(p, shared);
  __syncthreads();
  if (warp >= p.tile.warps) {
    pixel_shuffle_set_registers<Traits::kStreamed && Traits::kSize == 2 ? 56 : 40, false>();
    PixelShuffleFeed<Traits>(p, shared).copy_all();
    return;
  }
  pixel_shuffle_set_registers<Traits::kStreamed && Traits::kSize == 2 ? 224 : 232, true>();
  int chunk = blockIdx.x;
  const int stream = p.by_chunks(chunk), streams = gridDim.x / p.chunks;
  const int group = p.by_chunks_of_group(chunk);
  const PixelShuffleWeights<Traits> weights(p);
  PixelShuffleFeed<Traits> feed(p, shared);
  PixelShuffleStorer<Traits> storer(p, epilogue, shared);
  storer.find_rows(group, chunk);
  const int threads = p.tile.warps * 32, step_bytes = p.tile.tiles_m * 512;
  if constexpr (!Traits::kStreamed) {
#pragma unroll 1
    for (int first = 0; first < p.tile.steps; first += p.tile.weight_steps) {
      weights.arrange(shared, feed.wait(), first, min(p.tile.weight_steps, p.tile.steps - first));
      feed.release();
    }
  }
  pixel_shuffle_sync(threads);
  const int warp_m = warp % p.tile.warps_m, warp_n = warp / p.tile.warps_m;
  const int parts = (p.tile.steps + p.tile.stage_steps - 1) / p.tile.stage_steps;
  const PixelShuffleProduct<Traits> product(p, warp_n * Traits::kPositions, p.store == PixelShuffleStore::kQuads);
  PixelShuffleStagger stagger(p);
  typename PixelShuffleProduct<Traits>::Sums sum;
  typename PixelShuffleProduct<Traits>::Operands operands;
  uint32_t packed = shared;
#pragma unroll 1
  for (int tile = stream; tile < p.tiles; tile += streams) {
    const int first_position = tile * p.tile.positions + warp_n * Traits::kPositions;
    storer.find_places(first_position);
#pragma unroll 1
    for (int round = 0; round < p.tile.rounds; ++round) {
      const int first_tile = (round * p.tile.warps_m + warp_m) * Traits::kTilesM;
      const uint32_t left = first_tile * 512 + lane * 16;
      storer.start(first_tile, sum);
      stagger.wait();
#pragma unroll 1
      for (int part = 0; part < parts; ++part) {
        const uint32_t inputs = feed.wait();
        const int first_step = part * p.tile.stage_steps;
        const int steps = min(p.tile.stage_steps, p.tile.steps - first_step);
        if constexpr (Traits::kStreamed) {
          // Two buffers in turn: whoever packs the next stage but one has passed the barrier of the next one.
          packed = packed == shared ? shared + p.tile.stage_steps * step_bytes : shared;
          weights.arrange(packed, inputs + p.tile.stage_weights, 0, steps);
          pixel_shuffle_sync(threads);
        } else {
          packed = shared + first_step * step_bytes;
        }
        if constexpr (Traits::kSplit) {
          product.add_split(packed + left, inputs, steps, sum);
        } else {
          if (Traits::kStreamed || part == 0) product.load(packed + left, inputs, operands);
          product.add(packed + left, inputs, steps, operands, sum, [&] {
            if (!Traits::kStreamed && part + 1 < parts) {
              product.load(packed + left + p.tile.stage_steps * step_bytes, feed.wait_for_next(), operands);
            }
          });
        }
        if (round == p.tile.rounds - 1) feed.release();
      }
      stagger.pass();
      storer.store(first_tile, first_position, sum);
    }
  }
#endif
}

}  // namespace fastconvt::cuda
