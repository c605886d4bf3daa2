// The persistent row family: the warps that load inputs.
#pragma once

#include "rows_persistent_role.cuh"

namespace fastconvt::cuda {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

// The warps that load inputs, as they stand in memory: an item ahead of those that multiply.
template <class Traits>
class RowsPersistentFeeder : RowsPersistentRole<Traits> {
  using Role = RowsPersistentRole<Traits>;
  using T = typename Traits::Element;
  using Item = RowsPersistentItem<T>;
  using Role::p;
  static constexpr int kThreads = 32 * kRowsPersistentFeeders;
  const int thread;

 public:
  __device__ RowsPersistentFeeder(const RowsPersistentParams& p, unsigned char* shared, int thread)
      : Role(p, shared), thread(thread) {}

  __device__ void run() const {
    // Blocks get to where they arrive only much later; were this too late, they would not wait for one another.
    if (p.arrivals != nullptr && blockIdx.x == 0 && thread == 0) *static_cast<volatile unsigned*>(p.arrivals) = 0;
    bool patient = true;
    int k = 0;
    for (int index = blockIdx.x; index < p.items; index += gridDim.x, ++k) {
      const Item item(p, index);
      const auto chunk = this->chunk_of(k);
      if (k >> p.tile.buffer_bits > 0) wait_at(chunk.empty, chunk.parity ^ 1);
      if (k >= 2 && p.arrivals != nullptr) wait_for_blocks(k - 1, patient);
      if (p.granule == 16) {
        load<16>(item, chunk.inputs);
      } else if (p.granule == 8) {
        load<8>(item, chunk.inputs);
      } else if (p.granule == 4) {
        load<4>(item, chunk.inputs);
      } else {
        load<2>(item, chunk.inputs);
      }
      if (thread == 0) {
        *chunk.item = item;
        arrive_at(chunk.full);
      }
      if (p.granule == 2) {
        arrive_at(chunk.full);
      } else {
        arrive_after_copies(chunk.full);
      }
    }
    // Others wait for as many arrivals as they have items.
    if (p.arrivals != nullptr && thread == 0 && k >= 2 && k * gridDim.x < p.items) atomicAdd(p.arrivals, 1u);
    asm volatile("cp.async.wait_all;" ::: "memory");
  }

 private:
  // All blocks read at the same time, and write in between: memory that turns around all the time is slower. But blocks
  // that do not run, since something else does, hold others up only once, and not for long.
  __device__ void wait_for_blocks(int round, bool& patient) const {
    constexpr int kPolls = 64;
    if (thread == 0) {
      atomicAdd(p.arrivals, 1u);
      int polls = 0;
#pragma unroll 1
      while (patient && *static_cast<volatile unsigned*>(p.arrivals) < round * gridDim.x) {
        if (++polls == kPolls) patient = false;
      }
    }
    sync_named(2, kThreads);
  }

  template <int bytes>
  __device__ void load(const Item& item, T* target) const {
    constexpr int kCount = bytes < static_cast<int>(sizeof(T)) ? 1 : bytes / static_cast<int>(sizeof(T));
    // Where a row is one segment, what is outside of it is cleared once.
    const int first = item.column - p.tile.shift - kRowsPersistentHalo;
    const int halo = p.tile.segments == 1 ? -min(0, first) / kCount : 0;
    const int columns = p.tile.columns + p.tile.shift + kRowsPersistentHalo;
    const int end = p.tile.segments == 1 ? min(columns, p.in_width - first) : columns;
    const int channels = p.in_channels, pitch = p.tile.row_pitch;
    const int64_t stride = p.in.channel;
    int y = item.base - (p.tile.span - 1);
#pragma unroll 1
    for (int rows = item.count + p.tile.span - 1; rows > 0; --rows, ++y) {
      if (has_input_row(p, y)) {
        const T* const row = item.input + y * p.in.axis[1];
        if constexpr (bytes == 2) {
          load_elements(item, row, target);
        } else {
#pragma unroll 1
          for (int at = (halo + thread) * kCount; at < end; at += kThreads * kCount) {
            const int x = first + at;
            const bool exists = static_cast<unsigned>(x) < static_cast<unsigned>(p.in_width);
            const T* source = row + (exists ? x : 0);
            T* to = target + at;
#pragma unroll 8
            for (int channel = 0; channel < channels; ++channel) {
              copy_or_clear_async<bytes>(to, source, exists);
              source += stride;
              to += pitch;
            }
          }
        }
      }
      target += p.tile.steps * kRowsMmaStep * p.tile.row_pitch;
    }
  }

  // Rows of 16-bit elements that begin anywhere: many loads at a time hide how long they take.
  __device__ void load_elements(const Item& item, const T* source, T* target) const {
    constexpr int kChannels = 8, kColumns = 4;
    const int columns = p.tile.columns + kRowsPersistentHalo;
#pragma unroll 1
    for (int channel = 0; channel < p.in_channels; channel += kChannels) {
#pragma unroll 1
      for (int at = thread; at < columns; at += kThreads * kColumns) {
        const int x = item.column - kRowsPersistentHalo + at;
        T batch[kChannels][kColumns];
#pragma unroll
        for (int c = 0; c < kChannels; ++c)
#pragma unroll
          for (int i = 0; i < kColumns; ++i) {
            const bool exists = channel + c < p.in_channels &&
                                static_cast<unsigned>(x + i * kThreads) < static_cast<unsigned>(p.in_width);
            batch[c][i] = exists ? __ldg(source + c * p.in.channel + x + i * kThreads) : from_accumulator<T>(0.f);
          }
#pragma unroll
        for (int c = 0; c < kChannels; ++c)
#pragma unroll
          for (int i = 0; i < kColumns; ++i) {
            if (at + i * kThreads < columns) target[c * p.tile.row_pitch + at + i * kThreads] = batch[c][i];
          }
      }
      source += kChannels * p.in.channel;
      target += kChannels * p.tile.row_pitch;
    }
  }
};

#endif

}  // namespace fastconvt::cuda
