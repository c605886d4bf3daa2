// A ring of stages in shared memory: first, unless streamed, the chunk's weights as they are in memory, then tiles of
// positions by input channels. Four warps do nothing but copy; barriers tell when a stage is there and when it is free.
#pragma once

#include "pixel_shuffle_weights.cuh"

namespace fastconvt::cuda {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800

template <class Traits>
class PixelShuffleFeed {
  using T = typename Traits::T;

 public:
  __device__ PixelShuffleFeed(const PixelShuffleParams& params, uint32_t shared)
      : p(params), ring(shared + params.tile.ring), barriers(shared + params.tile.barriers) {}

  // The barriers, by one thread of the block.
  static __device__ void init(const PixelShuffleParams& p, uint32_t shared) {
#pragma unroll 1
    for (int i = 0; i < p.tile.stages; ++i) {
      mbarrier_init(shared + p.tile.barriers + 16 * i, kPixelShuffleProducers);
      mbarrier_init(shared + p.tile.barriers + 16 * i + 8, p.tile.warps);
    }
  }

  // Everything, by the threads that copy.
  __device__ void copy_all() {
    int chunk = blockIdx.x;
    const int first_tile = p.by_chunks(chunk), tile_step = gridDim.x / p.chunks;
    const int64_t channel = static_cast<int64_t>(p.by_chunks_of_group(chunk)) * p.group_in;
    source = static_cast<const T*>(p.input) + channel * (Traits::kChannelsLast ? 1 : p.positions);
    const PixelShuffleWeights<Traits> weights(p);
    if constexpr (!Traits::kStreamed) {
      for (int first = 0; first < p.tile.steps; first += p.tile.weight_steps) {
        weights.copy(begin_stage(), first, min(p.tile.weight_steps, p.tile.steps - first));
        end_stage(p.weight_copy);
      }
    }
    const int tile_parts = (p.tile.steps + p.tile.stage_steps - 1) / p.tile.stage_steps;
    const PixelShuffleShare share(p.input_columns, rows());
    for (int tile = first_tile; tile < p.tiles; tile += tile_step) {
      find_tile(share, tile, share.column);
      for (int part = 0; part < tile_parts; ++part) {
        const uint32_t stage = begin_stage();
        pixel_shuffle_with_bytes<Traits::kSize>(
            p.input_copy, [&](auto bytes) { copy_part<decltype(bytes)::value>(share, tile, part, stage); });
        if constexpr (Traits::kStreamed) {
          const int first = part * p.tile.stage_steps;
          weights.copy(stage + p.tile.stage_weights, first, min(p.tile.stage_steps, p.tile.steps - first));
        }
        end_stage(Traits::kStreamed ? min(p.input_copy, p.weight_copy) : p.input_copy);
      }
    }
    pixel_shuffle_wait_for_copies();
  }

  // The oldest stage that was copied, once it is there.
  __device__ uint32_t wait() const {
    mbarrier_wait(barriers + 16 * stage, parity);
    return ring + stage * p.tile.stage_bytes;
  }
  // The one after it.
  __device__ uint32_t wait_for_next() const {
    const bool wraps = stage + 1 == p.tile.stages;
    const int next = wraps ? 0 : stage + 1;
    mbarrier_wait(barriers + 16 * next, wraps ? parity ^ 1 : parity);
    return ring + next * p.tile.stage_bytes;
  }
  // The warp has done with it.
  __device__ void release() {
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(barriers + 16 * stage + 8);
    next_stage();
  }

 private:
  __device__ void next_stage() {
    if (++stage == p.tile.stages) stage = 0, parity ^= 1;
  }
  __device__ uint32_t begin_stage() const {
    mbarrier_wait(barriers + 16 * stage + 8, parity ^ 1);
    return ring + stage * p.tile.stage_bytes;
  }
  __device__ void end_stage(int copied) {
    if (Traits::kSize == 2 && copied == 2) {  // single elements of 16 bits are stored
      pixel_shuffle_wait_for_copies();
      mbarrier_arrive(barriers + 16 * stage);
    } else {
      mbarrier_arrive_after_copies(barriers + 16 * stage);
    }
    next_stage();
  }

  // Of a stage: channels, or, channels_last, positions.
  __device__ int rows() const {
    return Traits::kChannelsLast ? p.tile.positions : p.tile.stage_steps * Traits::kStepChannels;
  }
  __device__ int64_t pitch() const { return Traits::kChannelsLast ? p.input_pixel : p.positions; }

  // Where the thread's rows of a tile begin. A tile may reach over several samples, a copy does not.
  __device__ void find_tile(const PixelShuffleShare& share, int tile, int column) {
    int at = tile * p.tile.positions;
    if constexpr (Traits::kChannelsLast) {
      exist = p.total - at;
      from = source + static_cast<int64_t>(at + share.row) * pitch() + column * (p.input_copy / Traits::kSize);
    } else {
      at += column * (p.input_copy / Traits::kSize);
      exist = at < p.total ? p.group_in : 0;
      const int sample = p.by_positions(at);
      from = source + sample * p.input_batch + share.row * pitch() + at;
    }
  }

  // Where the thread's first copy goes, `byte` of its row.
  __device__ int place(const PixelShuffleShare& share, int byte) const { return share.row * p.tile.input_pitch + byte; }

  template <int kBytes>
  __device__ __forceinline__ void copy_part(const PixelShuffleShare& share, int tile, int part, uint32_t stage) {
    const int channel = part * p.tile.stage_steps * Traits::kStepChannels;
    constexpr int kElements = kBytes / Traits::kSize;
    uint32_t to = stage + place(share, share.column * kBytes);
    for (int column = share.column; column < p.input_columns; column += kPixelShuffleProducers) {
      if (p.input_columns > kPixelShuffleProducers) {
        find_tile(share, tile, column);
        from += channel * (Traits::kChannelsLast ? 1 : pitch());
      }
      const int left =
          Traits::kChannelsLast ? (channel + column * kElements < p.group_in ? exist : 0) : exist - channel;
      share.template copy<kBytes>(to, p.tile.input_pitch, from, pitch() * Traits::kSize, left, source);
      to += kPixelShuffleProducers * kBytes;
    }
    from += p.tile.stage_steps * Traits::kStepChannels * (Traits::kChannelsLast ? 1 : pitch());
  }

  const PixelShuffleParams& p;
  const uint32_t ring, barriers;
  const T* source;
  const T* from;
  int exist;
  int stage = 0, parity = 0;  // of who copies, or of a warp that multiplies
};

#endif

}  // namespace fastconvt::cuda
