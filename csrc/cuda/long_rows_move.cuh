// Long rows: the warp that loads and the one that stores.
#pragma once

#include "long_rows_params.cuh"

namespace fastconvt::cuda {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

// Loads inputs as they stand in memory.
template <class Traits>
class LongRowsFeeder : LongRowsRole<Traits> {
  using Role = LongRowsRole<Traits>;
  using T = typename Traits::Element;
  using Role::lane, Role::p;
  static constexpr int kHalo = Traits::kHalo;

 public:
  __device__ LongRowsFeeder(const LongRowsParams& p, unsigned char* shared) : Role(p, shared) {}

  __device__ void run() const {
    RowsRing buffers(p.tile.buffers);
    for (int item = this->first_item; item < p.items; item += this->item_step, buffers.advance()) {
      if (!buffers.fresh) wait_at(this->empty(buffers.at), buffers.parity ^ 1);
      int tile = item;
      const T* source = static_cast<const T*>(p.input) + p.by_tiles(tile) * p.in.batch +
                        static_cast<int64_t>(this->first_block().group) * p.in_channels * p.in.channel;
      T* target = this->inputs(buffers.at);
      const int first = p.tile.base + tile * p.tile.advance - kHalo;
      for (int group = 0; group < p.tile.groups; ++group) {
        load_group(source, first, target);
        source += p.in_channels * p.in.channel;
        target += p.tile.steps * Traits::kStep * p.tile.row_pitch;
      }
      if (p.granule == 2) {
        arrive_at(this->full(buffers.at));
      } else {
        arrive_after_copies(this->full(buffers.at));
      }
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
  }

 private:
  __device__ void load_group(const T* source, int first, T* target) const {
    if (p.granule == 16) {
      load<16>(source, first, target);
    } else if (p.granule == 8) {
      load<8>(source, first, target);
    } else if (p.granule == 4) {
      load<4>(source, first, target);
    } else {
      load_elements(source, first, target);
    }
  }

  __device__ bool exists(int x) const { return static_cast<unsigned>(x) < static_cast<unsigned>(p.in_width); }

  // Column 0 of `target` is input `first`. The halo of all channels comes last.
  template <int bytes>
  __device__ void load(const T* source, int first, T* target) const {
    constexpr int kCount = bytes / sizeof(T), kHalos = kHalo / kCount;
#pragma unroll 1
    for (int at = kHalo + lane * kCount; at < kHalo + p.tile.columns; at += 32 * kCount) {
      const bool inside = exists(first + at);
      const T* from = source + (inside ? first + at : 0);
      T* to = target + at;
#pragma unroll 8
      for (int channel = 0; channel < p.in_channels; ++channel) {
        copy_or_clear_async<bytes>(to, from, inside);
        from += p.in.channel;
        to += p.tile.row_pitch;
      }
    }
#pragma unroll 1
    for (int i = lane; i < p.in_channels * kHalos; i += 32) {
      const int channel = i / kHalos, at = i % kHalos * kCount;
      const bool inside = exists(first + at);
      copy_or_clear_async<bytes>(target + channel * p.tile.row_pitch + at,
                                 source + channel * p.in.channel + (inside ? first + at : 0), inside);
    }
  }

  // Rows of 16-bit elements that begin anywhere: many loads at a time hide how long they take.
  __device__ void load_elements(const T* source, int first, T* target) const {
    constexpr int kChannels = 8, kColumns = 4;
    const int columns = p.tile.columns + kHalo;
#pragma unroll 1
    for (int channel = 0; channel < p.in_channels; channel += kChannels) {
#pragma unroll 1
      for (int at = lane; at < columns; at += 32 * kColumns) {
        T batch[kChannels][kColumns];
#pragma unroll
        for (int c = 0; c < kChannels; ++c)
#pragma unroll
          for (int i = 0; i < kColumns; ++i) {
            const int x = first + at + 32 * i;
            const bool is_there = channel + c < p.in_channels && exists(x);
            batch[c][i] = is_there ? __ldg(source + c * p.in.channel + x) : from_accumulator<T>(0.f);
          }
#pragma unroll
        for (int c = 0; c < kChannels; ++c)
#pragma unroll
          for (int i = 0; i < kColumns; ++i) {
            if (channel + c < p.in_channels && at + 32 * i < columns) {
              target[c * p.tile.row_pitch + at + 32 * i] = batch[c][i];
            }
          }
      }
      source += kChannels * p.in.channel;
      target += kChannels * p.tile.row_pitch;
    }
  }
};

// Stores: lane c has channel c of a channel block, lane c + 16 its other end.
template <class Traits>
class LongRowsStorer : LongRowsRole<Traits> {
  using Role = LongRowsRole<Traits>;
  using T = typename Traits::Element;
  using Role::lane, Role::p;
  static constexpr int kVector = Traits::kVector;

  const int channel;

 public:
  __device__ LongRowsStorer(const LongRowsParams& p, unsigned char* shared)
      : Role(p, shared), channel(threadIdx.x % kLongRowsChannels) {}

  __device__ void run() const {
    RowsRing stages(p.tile.stages);
    RowsReadStages read(this->free(0));
    for (int item = this->first_item; item < p.items; item += this->item_step) {
      int tile = item;
      const int batch = p.by_tiles(tile);
      LongRowsBlock block = this->first_block();
      for (int i = 0; i < p.tile.blocks; ++i, stages.advance()) {
        read.wait_for(this->staged(stages.at), stages.parity);
        store(block, batch, tile, this->outputs(stages.at));
        read.commit(stages.at);
        this->advance(block);
      }
    }
    read.finish();
  }

 private:
  // Positions of the tile that are stored begin and end at lines, or where the row does.
  __device__ void store(const LongRowsBlock& block, int batch, int tile, const T* stage) const {
    if (channel >= block.channels) return;
    const int first = this->first_output(tile), next = first + p.tile.advance * Traits::kStride;
    T* const row = this->channel_row(batch, block, channel);
    const uint32_t at = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(row) / sizeof(T));
    const auto line_from = [&](int o) {
      return min(p.out_width, o + (-long_rows_skew(at + static_cast<uint32_t>(o), p.tile.line) & (p.tile.line - 1)));
    };
    const int begin = tile == 0 ? 0 : line_from(first), end = tile + 1 == p.tile.tiles ? p.out_width : line_from(next);
    const T* const staged =
        stage + channel * p.tile.output_pitch + long_rows_skew(at + static_cast<uint32_t>(first), Traits::kSector);
    const auto vector_from = [&](int o) {
      return o + (-long_rows_skew(at + static_cast<uint32_t>(o), kVector) & (kVector - 1));
    };
    const int core_begin = min(end, vector_from(begin));
    const int core_end = max(core_begin, end - long_rows_skew(at + static_cast<uint32_t>(end), kVector));
    if (lane < kLongRowsChannels && core_begin < core_end) {
      asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(row + core_begin),
                   "r"(shared_address(staged + core_begin - first)),
                   "r"((core_end - core_begin) * static_cast<int>(sizeof(T)))
                   : "memory");
    }
    // What the core leaves out at the ends.
    const bool tail = lane >= kLongRowsChannels;
    const int stop = tail ? end : core_begin;
#pragma unroll 1
    for (int o = tail ? core_end : begin; o < stop; ++o) row[o] = staged[o - first];
  }
};

#endif

}  // namespace fastconvt::cuda
