// The weights of a chunk of output channels, in the order of the products' left operands.
//
// Rows (output channel, tap) have an order, neighbours in memory side by side: as the weight is (contiguous), or taps
// outside of channels (channels_last). A lane of a product's sums has kRun rows of this order one after the other.
#pragma once

#include "device/tf32.cuh"
#include "pixel_shuffle_async.cuh"
#include "pixel_shuffle_params.cuh"

namespace fastconvt::cuda {

template <typename T_, PixelShufflePrecision precision, bool channels_last, bool streamed>
struct PixelShuffleTraits {
  using T = T_;
  static constexpr PixelShufflePrecision kPrecision = precision;
  static constexpr bool kChannelsLast = channels_last;
  static constexpr bool kStreamed = streamed;  // weights come with the inputs, stage by stage
  static constexpr bool kSplit = precision == PixelShufflePrecision::kFloat32;
  static constexpr int kSize = sizeof(T);
  static constexpr int kStepChannels = 32 / kSize;
  static constexpr int kTilesM = kPixelShuffleTilesM;
  static constexpr int kTilesN = kSplit ? 4 : 8;
  static constexpr int kPositions = 8 * kTilesN;               // of a warp
  static constexpr int kRun = channels_last ? 16 / kSize : 4;  // rows in order that a lane has
  static constexpr int kGroup = kRun / 2;                      // of 16-row tiles that make such runs
};

// What the sums of a channel begin with.
template <typename T>
struct PixelShuffleEpilogue {
  const T* bias;  // (out_channels), or null

  __device__ float channel_term(int channel) const {
    return bias != nullptr ? to_accumulator(__ldg(bias + channel)) : 0.f;
  }
};

// Where a row of the order lies among the left operands.
template <class Traits>
struct PixelShuffleRow {
  int tile, row, half;  // of a tile's 16 rows, `row` is in its lanes' registers number `half`

  __device__ explicit PixelShuffleRow(int order) {
    constexpr int kRun = Traits::kRun;
    const int in_run = order % kRun;
    row = order / kRun % 8, half = in_run % 2;
    tile = order / (8 * kRun) * Traits::kGroup + in_run / 2;
  }

  // Bytes to its first term.
  __device__ int offset() const { return tile * 512 + row * 64 + half * 4; }
};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800

// Rounded to nearest, as the products' unit only truncates; inf and NaN stay.
__device__ __forceinline__ uint32_t pixel_shuffle_round(uint32_t x) {
  return (x & 0x7f800000u) == 0x7f800000u ? x : (x + 0x1000u) & 0xffffe000u;
}

template <class Traits>
class PixelShuffleWeights {
  using T = typename Traits::T;

 public:
  // Of the block's chunk.
  __device__ explicit PixelShuffleWeights(const PixelShuffleParams& params) : p(params) {
    int chunk = blockIdx.x;
    p.by_chunks(chunk);
    const int group = p.by_chunks_of_group(chunk), first = chunk * p.tile.channels;
    exist = min(p.tile.channels, p.group_out - first) * p.taps;
    const int64_t channel = static_cast<int64_t>(group) * p.group_in;
    source = static_cast<const T*>(p.weight) + (channel * p.group_out + first) * p.taps;
  }

  // Steps as they are in memory, by the threads that copy.
  __device__ void copy(uint32_t raw, int first, int steps) const {
    pixel_shuffle_with_bytes<Traits::kSize>(p.weight_copy, [&](auto bytes) {
      copy_rows<decltype(bytes)::value>(raw, first * Traits::kStepChannels, steps * Traits::kStepChannels);
    });
  }

  // Steps from `first` on to left operands, by the warps that multiply; `raw` are steps as copied. Left operands lie by
  // step, tile and lane.
  __device__ void arrange(uint32_t packed, uint32_t raw, int first, int steps) const {
    constexpr int kColumns = Traits::kSize == 2 ? 2 : 1;  // of 8 rows of the product, that are loaded together
    constexpr int kBatch = Traits::kStreamed ? 1 : 2;     // loads at a time
    const int lane = threadIdx.x % 32, row = lane / 4, quad = lane % 4;
    const int loads = p.tile.tiles_m * 2 / kColumns, step_bytes = p.tile.tiles_m * 512;
    raw += Traits::kSize == 2 ? lane % 16 * p.tile.weight_pitch + lane / 16 * 16 : quad * p.tile.weight_pitch + row * 4;
#pragma unroll 1
    for (int load = threadIdx.x / 32; load < loads; load += kBatch * p.tile.warps) {
      uint32_t to[kBatch][kColumns];
#pragma unroll
      for (int b = 0; b < kBatch; ++b)
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
          const PixelShuffleRow<Traits> place(order(((load + b * p.tile.warps) * kColumns + c) * 8 + row));
          to[b][c] = packed + place.offset() + quad * 16;
        }
      uint32_t from = raw + load * 32;
#pragma unroll 1
      for (int step = first; step < first + steps; ++step) {
        uint32_t word[kBatch][kColumns][2];
#pragma unroll
        for (int b = 0; b < kBatch; ++b) {
          if (load + b * p.tile.warps < loads) load_words(word[b], from + b * p.tile.warps * 32);
        }
#pragma unroll
        for (int b = 0; b < kBatch; ++b)
#pragma unroll
          for (int c = 0; c < kColumns; ++c) {
            if (load + b * p.tile.warps >= loads) continue;
            const uint32_t at = to[b][c] + step * step_bytes;
            pixel_shuffle_keep(at, word[b][c][0]);
            pixel_shuffle_keep(at + 8, word[b][c][1]);
          }
        from += Traits::kStepChannels * p.tile.weight_pitch;
      }
    }
  }

 private:
  template <int kColumns>
  __device__ __forceinline__ void load_words(uint32_t (&word)[kColumns][2], uint32_t from) const {
    if constexpr (Traits::kSize == 2) {
      pixel_shuffle_matrices<true>(word[0][0], word[0][1], word[1][0], word[1][1], from);
    } else {
      word[0][0] = pixel_shuffle_load(from), word[0][1] = pixel_shuffle_load(from + 4 * p.tile.weight_pitch);
      if constexpr (!Traits::kSplit) {
        word[0][0] = pixel_shuffle_round(word[0][0]), word[0][1] = pixel_shuffle_round(word[0][1]);
      }
    }
  }

  // Rows of input channels, zeros where there are none.
  template <int kBytes>
  __device__ void copy_rows(uint32_t raw, int first, int channels) const {
    constexpr int kElements = kBytes / Traits::kSize;
    const int columns = p.tile.tiles_m * 16 / kElements;
    const int64_t pitch = static_cast<int64_t>(p.group_out) * p.taps;
    const T* const from = source + first * pitch;
    PixelShuffleShare share(p.weight_columns, channels);
    for (; share.column < columns; share.column += kPixelShuffleProducers) {
      const int column = share.column * kElements;
      share.copy<kBytes>(raw + share.row * p.tile.weight_pitch + share.column * kBytes, p.tile.weight_pitch,
                         from + share.row * pitch + column, pitch * Traits::kSize,
                         column < exist ? p.group_in - first : 0, source);
    }
  }

  // Of a row of the weight.
  __device__ int order(int row) const {
    if (!Traits::kChannelsLast || row >= p.tile.channels * p.taps) return row;
    int tap = row;
    const int channel = p.by_taps(tap);
    return tap * p.tile.channels + channel;
  }

  const PixelShuffleParams& p;
  int exist;
  const T* source;
};

#endif

}  // namespace fastconvt::cuda
