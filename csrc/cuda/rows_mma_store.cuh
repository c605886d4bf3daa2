// The row family on tensor cores: output rows in shared memory and on their way from there.
#pragma once

#include "device/bulk.cuh"
#include "rows_mma_stage.cuh"

namespace fastconvt::cuda {

template <class Traits>
class RowsMmaOutputs {
  using T = typename Traits::Element;
  using Unit = RowsMmaUnit<T>;
  using Vector = Pack<T, Traits::kVector>;
  using Sums = typename Traits::Sums;
  static constexpr int kStride = Traits::kStride;
  static constexpr int kTiles = Traits::kTiles;
  static constexpr int kVector = Traits::kVector;

  const RowsMmaParams& p;
  T* const outputs;
  const T* const constants;
  const float* const terms;  // the bias
  const int warp, lane, row, quad;

 public:
  // An output row of a unit, for the block's first channel: outputs [begin, end), counted from origin, which is phase 0
  // of the segment's first base. Where a row of constants and another one meet, the boundary moves to the end of a
  // line.
  struct Row {
    T* origin;
    int first;  // what position 0 is along the last axis; may be negative
    int begin, end;
    bool constant;
    bool joined_before, joined_after;
  };

  __device__ RowsMmaOutputs(const RowsMmaParams& p, T* outputs, const T* constants, const float* terms)
      : p(p),
        outputs(outputs),
        constants(constants),
        terms(terms),
        warp(threadIdx.x / 32),
        lane(threadIdx.x % 32),
        row(threadIdx.x % 32 / 4),
        quad(threadIdx.x % 4) {}

  // Whether the unit has a row of that phase of the height, of constants or not as asked for.
  __device__ bool find(const Unit& unit, int phase, bool constant, Row& at) const {
    const int y = unit.base * p.height_stride + phase - p.height_padding;
    if (y < 0 || y >= p.out_height || tapless(phase) != constant) return false;
    at.first = unit.column * kStride - p.padding;
    at.origin = unit.output + y * p.out.axis[1] + at.first * p.out.axis[2];
    at.begin = max(0, -at.first);
    at.end = min(p.tile.columns * kStride, p.out_width - at.first);
    at.constant = constant;
    at.joined_before =
        p.whole_lines && y > 0 && at.first <= 0 && tapless(phase == 0 ? p.height_stride - 1 : phase - 1) != constant;
    at.joined_after = p.whole_lines && y + 1 < p.out_height && at.first + at.end == p.out_width &&
                      tapless(phase + 1 == p.height_stride ? 0 : phase + 1) != constant;
    return true;
  }

  // Where an output is staged.
  __device__ T* place(const Row& at, int channel, int position) const {
    return p.channels_last ? staged_pixel(position) + channel : staged_outputs(at, channel) + position;
  }

  __device__ void stage_outputs(const Unit& unit, const Row& at, int strip, const Sums& sum) const {
    const int first = strip * kRowsMmaColumns * kStride + quad * Traits::kRun;
    const auto value = [&](int half, int i) {
      const int base = i / kStride;
      return from_accumulator<T>(sum[i % kStride][base % kTiles][2 * half + base / kTiles]);
    };
    if (p.channels_last) {
      T* const target = staged_pixel(first) + 2 * row;
#pragma unroll
      for (int i = 0; i < Traits::kRun; ++i) {
        *reinterpret_cast<Pack<T, 2>*>(target + i * kRowsMmaChannels) = Pack<T, 2>{{value(0, i), value(1, i)}};
      }
      return;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      T* const target = staged_outputs(at, row + 8 * half) + first;
      if (row + 8 * half >= unit.channels) continue;
      if (reinterpret_cast<uintptr_t>(target) % (2 * sizeof(T)) == 0) {
#pragma unroll
        for (int i = 0; i < Traits::kRun; i += 2) {
          *reinterpret_cast<Pack<T, 2>*>(target + i) = Pack<T, 2>{{value(half, i), value(half, i + 1)}};
        }
      } else {
#pragma unroll
        for (int i = 0; i < Traits::kRun; ++i) target[i] = value(half, i);
      }
    }
  }

  // What the lane has beyond either end of the row becomes the constant, as of a row without taps.
  __device__ void clear_outside(const Row& at, int strip, Sums& sum) const {
    const int first = strip * kRowsMmaColumns * kStride + quad * Traits::kRun;
    if (first >= at.begin && first + Traits::kRun <= at.end) return;
#pragma unroll
    for (int i = 0; i < Traits::kRun; ++i) {
      const bool outside = first + i < at.begin || first + i >= at.end;
      const int base = i / kStride;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float& of = sum[i % kStride][base % kTiles][2 * half + base / kTiles];
        of = outside ? terms[rows_mma_channel(p, row, half)] : of;
      }
    }
  }

  // Before and after all positions constants are staged, for lines that neighbouring rows complete. A row that stands
  // up to a vector further on or back has left outputs there.
  __device__ void stage_guards(const Unit& unit, const Row& at, int strip) const {
    const bool before = strip == 0 && quad == 0;
    if (p.channels_last || (!before && (strip + 1 != p.tile.columns / kRowsMmaColumns || quad != 3))) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int channel = row + 8 * half;
      if (channel >= unit.channels) continue;
      T* const target = staged_outputs(at, channel) + (before ? -kVector : p.tile.columns * kStride);
      const T constant = from_accumulator<T>(terms[channel]);
#pragma unroll
      for (int i = 0; i < kVector; ++i) target[i] = constant;
    }
  }

  __device__ void store_row(const Unit& unit, const Row& at) const {
    if (p.channels_last) return store_pixels(unit, at);
    if (at.joined_before && at.joined_after) {  // no ends: a lane a channel
      const int channel = warp + lane * p.tile.warps;
      if (channel < unit.channels) copy_row(at, row_range(at, channel), channel);
      return;
    }
#pragma unroll 1
    for (int i = threadIdx.x; i < unit.channels * 16; i += blockDim.x) {  // 16 threads a channel
      const Range range = row_range(at, i / 16);
      if (i % 16 == 0) copy_row(at, range, i / 16);
      store_ends(at, range, i / 16);
    }
  }

  __device__ void store_constant_rows(const Unit& unit) const {
#pragma unroll 1
    for (int phase = 0; phase < p.height_stride; ++phase) {
      Row at;
      if (find(unit, phase, true, at)) store_row(unit, at);
    }
    close_group();
  }

  // Copies to global memory, in groups of a thread's copies. Waits until their sources, but for the last group's or
  // none, may be overwritten.
  static __device__ void close_group() {
#if __CUDA_ARCH__ >= 900
    commit_bulk();
#endif
  }
  static __device__ void wait_for_groups(bool but_one) {
#if __CUDA_ARCH__ >= 900
    if (but_one) {
      asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");
    } else {
      wait_for_bulk_reads();
    }
#endif
  }
  // Makes what this thread has written to shared memory visible to copies that are issued after a barrier.
  static __device__ void fence() {
#if __CUDA_ARCH__ >= 900
    fence_before_bulk();
#endif
  }

 private:
  // Of a channel: [begin, end) are stored, of these [copy_begin, copy_end) as 16-byte vectors.
  struct Range {
    int begin, copy_begin, copy_end, end;
  };

  __device__ bool tapless(int phase) const { return p.phase[phase].first_tap < 0; }

  // Where position 0 of a channel is staged: 16-byte vectors in memory are vectors in shared memory.
  __device__ T* staged_outputs(const Row& at, int channel) const {
    // Pairs of channels are one vector apart where that keeps banks apart (16 bits: the pitch does).
    const int skew = sizeof(T) == 4 ? (channel >> 1 & 1) * kVector : 0;
    return outputs + channel * p.tile.output_pitch + skew + Traits::kLine + (excess(at, channel, 0) & (kVector - 1));
  }
  // Elements from the start of a line to a position of a channel.
  __device__ int excess(const Row& at, int channel, int position) const {
    const unsigned index = static_cast<unsigned>(reinterpret_cast<uintptr_t>(at.origin) / sizeof(T));
    return (index + channel * static_cast<unsigned>(p.out.channel) + position) & (Traits::kLine - 1);
  }
  // Channels last: where the channels of a position are staged. A gap after every run keeps banks apart.
  __device__ T* staged_pixel(int position) const {
    return outputs + position * kRowsMmaChannels + position / Traits::kRun * 8;
  }

  // Joined ends are ends of lines: constants give way, other rows are filled up.
  __device__ Range row_range(const Row& at, int channel) const {
    constexpr int kLine = Traits::kLine;
    const int before = excess(at, channel, at.begin), after = excess(at, channel, at.end);
    Range range{at.begin, at.begin + (-before & (kVector - 1)), at.end - (after & (kVector - 1)), at.end};
    if (at.joined_before) {
      range.begin = range.copy_begin = at.begin + (at.constant ? -before & (kLine - 1) : -before);
    }
    if (at.joined_after) {
      range.end = range.copy_end = at.end + (at.constant ? -after : -after & (kLine - 1));
    }
    if (range.copy_begin > range.copy_end) range.copy_begin = range.copy_end = range.end;
    return range;
  }

  static __device__ void copy(T* target, const T* source, int count) {
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(target),
                 "r"(shared_address(source)), "r"(count * static_cast<int>(sizeof(T)))
                 : "memory");
#endif
  }

  __device__ void copy_row(const Row& at, const Range& range, int channel) const {
    T* const origin = at.origin + channel * p.out.channel;
    if (!at.constant && range.copy_begin < range.copy_end) {
      copy(origin + range.copy_begin, staged_outputs(at, channel) + range.copy_begin,
           range.copy_end - range.copy_begin);
    }
    if (!at.constant) return;
    const int piece = p.tile.constant_bytes / sizeof(T);
    const T* const source = constants + (p.bias == nullptr ? 0 : channel * piece);
#pragma unroll 1
    for (int i = range.copy_begin; i < range.copy_end; i += piece) {
      copy(origin + i, source, min(piece, range.copy_end - i));
    }
  }

  // What copies leave out at the ends, less than a vector each, by 16 threads.
  __device__ void store_ends(const Row& at, const Range& range, int channel) const {
    static_assert(kVector <= 8);
    const bool tail = threadIdx.x & 8;
    const int i = (tail ? range.copy_end : range.begin) + threadIdx.x % 8;
    if (i >= (tail ? range.end : range.copy_begin)) return;
    at.origin[channel * p.out.channel + i] =
        at.constant ? from_accumulator<T>(terms[channel]) : staged_outputs(at, channel)[i];
  }

  // Channels last: the outputs of a row in this unit's segment, 16 bytes a thread.
  __device__ void store_pixels(const Unit& unit, const Row& at) const {
    constexpr int kPieces = kRowsMmaChannels / kVector;
    const int channel = threadIdx.x % kPieces * kVector, channels = unit.channels - channel;
    if (channels <= 0) return;
    Vector values;
#pragma unroll
    for (int j = 0; j < kVector; ++j) values.value[j] = from_accumulator<T>(terms[channel + j]);
    for (int i = at.begin + threadIdx.x / kPieces; i < at.end; i += blockDim.x / kPieces) {
      if (!at.constant) values = *reinterpret_cast<const Vector*>(staged_pixel(i) + channel);
      T* const target = at.origin + i * p.out.axis[2] + channel;
      if (p.vector_output && channels >= kVector) {
        __stcs(reinterpret_cast<uint4*>(target), *reinterpret_cast<const uint4*>(&values));
      } else {
#pragma unroll
        for (int j = 0; j < kVector; ++j) {
          if (j < channels) target[j] = values.value[j];
        }
      }
    }
  }
};

}  // namespace fastconvt::cuda
