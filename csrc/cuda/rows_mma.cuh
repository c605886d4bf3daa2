// Transposed convolution by whole output rows on tensor cores, for few channels a group (csrc/core/rows_mma.h).
//
// A unit of work is one base of the height: the output rows of all its phases, which are neighbours in memory, for 16
// output channels. Rows of phases without taps are constants and are stored first. For the others a warp owns 32 bases
// of the last axis. MMA tile j has the bases 4 * column + j: a lane loads the inputs of four tiles at once, and ends
// with the outputs of 8 neighbouring bases, all phases, of two channels. They go through shared memory to stores of
// whole 128-byte lines: the constants of a neighbouring row complete the ends of a row.
#pragma once

#include "rows_mma_stage.cuh"

namespace fastconvt::cuda {

// One output from global memory, without the bias: only taps and inputs that exist are multiplied. Output o of the last
// axis, `phase` of the height. In float64, since large finite products must not overflow on the way.
template <class Traits>
__device__ __noinline__ double sum_by_definition(const RowsMmaParams& p,
                                                 const RowsMmaUnit<typename Traits::Element> unit, int phase,
                                                 int channel, int o) {
  using T = typename Traits::Element;
  const int64_t taps = static_cast<int64_t>(p.height_kernel) * Traits::kKernel;
  const int group = unit.block / p.tile.channel_blocks;
  channel += (unit.block - group * p.tile.channel_blocks) * kRowsMmaChannels;
  const T* const weight =
      static_cast<const T*>(p.weight) + taps * (static_cast<int64_t>(group) * p.in_channels * p.out_channels + channel);
  double sum = 0;
  int y = unit.base - p.phase[phase].back;
  for (int tap = p.phase[phase].first_tap; tap < p.height_kernel; tap += p.tap_step, y -= p.back_step) {
    const T* const source = unit.input_row(p, y);
    if (source == nullptr) continue;
    for (int t = 0; t < Traits::kKernel; ++t) {
      const int x = o + p.padding - t * Traits::kDilation;
      if (x < 0 || x % Traits::kStride != 0 || x / Traits::kStride >= p.in_width) continue;
#pragma unroll 1
      for (int c = 0; c < p.in_channels; ++c) {
        const T value = source[c * p.in.channel + (x / Traits::kStride - unit.column) * p.in.axis[2]];
        const T w = weight[c * p.out_channels * taps + tap * Traits::kKernel + t];
        sum = fma(static_cast<double>(to_accumulator(value)), static_cast<double>(to_accumulator(w)), sum);
      }
    }
  }
  return sum;
}

template <class Traits>
class RowsMmaKernel {
  using T = typename Traits::Element;
  using Unit = RowsMmaUnit<T>;
  using Vector = Pack<T, Traits::kVector>;
  static constexpr int kStride = Traits::kStride;
  static constexpr int kTiles = Traits::kTiles;
  static constexpr int kVector = Traits::kVector;
  static constexpr int kRights = sizeof(T) / 2;    // words of a right operand
  static constexpr int kWordRows = 2 * sizeof(T);  // of a step
  static constexpr int kWindow = Traits::kReach + kTiles;

  const RowsMmaParams& p;
  float* const terms;  // the bias
  MmaLeft<T>* const weights;
  uint32_t* const inputs;
  T* const outputs;
  T* const constants;
  const int warp, lane, row, quad;
  int slot;  // of the unit's base among the staged input rows

  // An output row of a unit. Where a row of constants and another one meet, the boundary moves to the end of a line.
  struct Row {
    T* origin;  // phase 0 of the segment's first base, in the block's first channel
    bool constant;
    bool joined_before, joined_after;
  };
  // Outputs of one channel of a row, counted from its origin: [begin, end) are stored, of these [core_begin, core_end)
  // in whole 16-byte vectors of the row's own outputs.
  struct Range {
    T* origin;
    int begin, core_begin, core_end, end;
  };

 public:
  __device__ RowsMmaKernel(const RowsMmaParams& p, unsigned char* shared)
      : p(p),
        terms(reinterpret_cast<float*>(shared)),
        weights(reinterpret_cast<MmaLeft<T>*>(shared + kRowsMmaChannels * sizeof(float))),
        inputs(reinterpret_cast<uint32_t*>(shared + p.tile.inputs)),
        outputs(reinterpret_cast<T*>(shared + p.tile.outputs)),
        constants(reinterpret_cast<T*>(shared + p.tile.constants)),
        warp(threadIdx.x / 32),
        lane(threadIdx.x % 32),
        row(threadIdx.x % 32 / 4),
        quad(threadIdx.x % 4) {}

  __device__ void run() {
    int staged_block = -1;
    Unit unit;
    unit.start(p, blockIdx.x);
    RowsMmaInputRow<T> ahead(p);
    ahead.load(p, unit, unit.base);
    if (!p.with_halo) clear_halos();
    while (unit.item < p.items) {
      if (unit.fresh) {
        if (unit.block != staged_block) wait_for_groups(false);
        __syncthreads();  // everyone has done with the inputs, weights and constants before
        if (unit.block != staged_block) {
          stage_channels<Traits>(p, unit.block, weights, terms, constants);
          fence();
        }
        staged_block = unit.block;
        slot = 0;
        stage_earlier_rows(unit);
      }
      ahead.store(p, staged_row(0));
      load_next(unit, ahead);
      __syncthreads();  // inputs, weights and constants are staged
      store_constant_rows(unit);
      make_rows(unit);
      unit.advance(p);
      if (++slot > p.tile.span) slot = 0;
    }
    wait_for_groups(false);
  }

 private:
  __device__ void load_next(Unit unit, RowsMmaInputRow<T>& ahead) const {
    unit.advance(p);
    ahead.load(p, unit, unit.base);
  }

  // The input row `back` rows before the unit's base.
  __device__ uint32_t* staged_row(int back) const {
    const int of = slot - back + (slot < back ? p.tile.span + 1 : 0);
    return inputs + of * (p.tile.steps * kWordRows * p.tile.row_pitch);
  }

  __device__ void clear_halos() const {
    for (int i = threadIdx.x; i < (p.tile.span + 1) * p.tile.steps * kWordRows; i += blockDim.x) {
      for (int j = 0; j < p.tile.halo; ++j) inputs[i * p.tile.row_pitch + j] = 0;
    }
  }

  // All rows that the unit reads but the last.
  __device__ void stage_earlier_rows(const Unit& unit) const {
#pragma unroll 1
    for (int back = p.tile.span - 1; back > 0; --back) {
      RowsMmaInputRow<T> earlier(p);
      earlier.load(p, unit, unit.base - back);
      earlier.store(p, staged_row(back));
    }
  }

  __device__ bool tapless(int phase) const { return p.phase[phase].first_tap < 0; }
  __device__ bool output_row(const Unit& unit, int phase, bool constant, Row& at) const {
    const int y = unit.base * p.height_stride + phase - p.height_padding;
    if (y < 0 || y >= p.out_height || tapless(phase) != constant) return false;
    at.origin = unit.output + y * p.out.axis[1] + first_output(unit) * p.out.axis[2];
    at.constant = constant;
    at.joined_before = p.whole_lines && y > 0 && tapless(phase == 0 ? p.height_stride - 1 : phase - 1) != constant;
    at.joined_after =
        p.whole_lines && y + 1 < p.out_height && tapless(phase + 1 == p.height_stride ? 0 : phase + 1) != constant;
    return true;
  }
  __device__ int first_output(const Unit& unit) const { return unit.column * kStride - p.padding; }

  __device__ void make_rows(const Unit& unit) {
    bool first = true;
#pragma unroll 1
    for (int phase = 0; phase < p.height_stride; ++phase) {
      Row at;
      if (!output_row(unit, phase, false, at)) continue;
#pragma unroll 1
      for (int strip = warp * Traits::kStrips; strip < (warp + 1) * Traits::kStrips; ++strip) {
        float sum[kStride][kTiles][4];
        add_taps(unit, phase, strip, sum);
        if (strip == warp * Traits::kStrips) {
          wait_for_groups(first);
          first = false;
          __syncthreads();  // the row before is copied, or stored
        }
        if (are_finite(sum)) {
          add_infinite_terms(sum);
          stage_outputs(unit, at, strip, sum);
        } else {
          stage_by_definition(unit, at, phase, strip);
        }
      }
      fence();
      __syncthreads();
      store_row(unit, at);
      close_group();
    }
  }

  __device__ void add_taps(const Unit& unit, int phase, int strip, float (&sum)[kStride][kTiles][4]) const {
    const float term[2] = {terms[rows_mma_channel(p, row, 0)], terms[rows_mma_channel(p, row, 1)]};
#pragma unroll
    for (int r = 0; r < kStride; ++r)
#pragma unroll
      for (int j = 0; j < kTiles; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[r][j][i] = is_finite(term[i / 2]) ? term[i / 2] : 0.f;
    const int column = quad * p.tile.row_pitch + p.tile.halo + strip * kRowsMmaColumns + row * kTiles;
    int back = p.phase[phase].back;
    for (int tap = p.phase[phase].first_tap; tap < p.height_kernel; tap += p.tap_step, back += p.back_step) {
      if (static_cast<unsigned>(unit.base - back) >= static_cast<unsigned>(p.in_height)) continue;
      const uint32_t* input = staged_row(back) + column;
      const MmaLeft<T>* weight = weights + tap * p.tile.steps * Traits::kKernel * 32 + lane;
#pragma unroll 1
      for (int step = 0; step < p.tile.steps; ++step) {
        add_step(input, weight, sum);
        input += kWordRows * p.tile.row_pitch;
        weight += Traits::kKernel * 32;
      }
    }
  }

  __device__ void add_step(const uint32_t* input, const MmaLeft<T>* weight, float (&sum)[kStride][kTiles][4]) const {
    // Bases -kReach .. kTiles - 1, counted from the lane's first.
    constexpr int kReach = Traits::kReach;
    uint32_t window[kRights][kWindow];
#pragma unroll
    for (int i = 0; i < kRights; ++i, input += 4 * p.tile.row_pitch) {
      const auto own = *reinterpret_cast<const Pack<uint32_t, kTiles>*>(input);
#pragma unroll
      for (int j = 0; j < kTiles; ++j) window[i][kReach + j] = own.value[j];
#pragma unroll
      for (int j = 1; j <= kReach; ++j) window[i][kReach - j] = input[-j];
    }
#pragma unroll
    for (int t = 0; t < Traits::kKernel; ++t) {
      const MmaLeft<T> left = weight[t * 32];
      const int r = t * Traits::kDilation % kStride, at = kReach - t * Traits::kDilation / kStride;
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
        if constexpr (kRights == 2) {
          multiply_add(sum[r][j], left, window[0][at + j], window[1][at + j]);
        } else {
          multiply_add(sum[r][j], left, window[0][at + j]);
        }
      }
    }
  }

  static __device__ bool is_finite(float x) { return x - x == 0.f; }

  // A bias that is not finite stays out of the sums, where it would look like a wrong one.
  __device__ void add_infinite_terms(float (&sum)[kStride][kTiles][4]) const {
    const float term[2] = {terms[rows_mma_channel(p, row, 0)], terms[rows_mma_channel(p, row, 1)]};
    if (__all_sync(~0u, is_finite(term[0]) && is_finite(term[1]))) return;
#pragma unroll
    for (int r = 0; r < kStride; ++r)
#pragma unroll
      for (int j = 0; j < kTiles; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[r][j][i] += is_finite(term[i / 2]) ? 0.f : term[i / 2];
  }

  // Inputs that do not exist are zeros, which only finite weights leave without effect, and TF32 may round to inf: both
  // show in a sum that is not finite.
  static __device__ bool are_finite(const float (&sum)[kStride][kTiles][4]) {
    float probe[4] = {};
#pragma unroll
    for (int r = 0; r < kStride; ++r)
#pragma unroll
      for (int j = 0; j < kTiles; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) probe[i] = fmaf(sum[r][j][i], 0.f, probe[i]);
    return __all_sync(~0u, (probe[0] + probe[1]) + (probe[2] + probe[3]) == 0.f);
  }

  // Elements from the last address that is a multiple of `alignment` elements.
  static __device__ int misalignment(const T* at, int alignment) {
    return static_cast<int>(reinterpret_cast<uintptr_t>(at) / sizeof(T)) & (alignment - 1);
  }

  // Where position 0 of a channel is staged: 16-byte vectors in memory are vectors in shared memory.
  __device__ T* staged_outputs(const Row& at, int channel) const {
    const int shift = (misalignment(at.origin, kVector) + channel * static_cast<int>(p.out.channel)) & (kVector - 1);
    // Pairs of channels are one vector apart where that keeps banks apart (16 bits: the pitch does).
    const int skew = sizeof(T) == 4 ? (channel >> 1 & 1) * kVector : 0;
    return outputs + channel * p.tile.output_pitch + skew + Traits::kLine + shift;
  }
  // Channels last: where the channels of a position are staged. A gap after every run keeps banks apart.
  __device__ T* staged_pixel(int position) const {
    return outputs + position * kRowsMmaChannels + position / Traits::kRun * 8;
  }

  __device__ void stage_outputs(const Unit& unit, const Row& at, int strip,
                                const float (&sum)[kStride][kTiles][4]) const {
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

  __device__ void stage_by_definition(const Unit& unit, const Row& at, int phase, int strip) const {
    constexpr int kPositions = kRowsMmaColumns * kStride;
#pragma unroll 1
    for (int i = lane; i < unit.channels * kPositions; i += 32) {
      const int channel = i / kPositions, position = i % kPositions + strip * kPositions;
      const int o = first_output(unit) + position;
      if (o < 0 || o >= p.out_width) continue;
      const double sum = sum_by_definition<Traits>(p, unit, phase, channel, o) + terms[channel];
      *(p.channels_last ? staged_pixel(position) + channel : staged_outputs(at, channel) + position) =
          from_accumulator<T>(static_cast<float>(sum));
    }
  }

  // What the block stores of a channel's row. Joined ends are ends of lines: constants give way, other rows are filled
  // up.
  __device__ Range row_range(const Unit& unit, const Row& at, int channel) const {
    constexpr int kLine = Traits::kLine;
    const int first = first_output(unit), width = p.tile.columns * kStride;
    Range range;
    range.origin = at.origin + channel * p.out.channel;
    range.begin = max(0, -first);
    range.end = min(width, p.out_width - first);
    const bool joined_before = at.joined_before && first + range.begin == 0;
    const bool joined_after = at.joined_after && first + range.end == p.out_width;
    const int before = misalignment(range.origin + range.begin, kLine);
    const int after = misalignment(range.origin + range.end, kLine);
    range.core_begin = range.begin + (-before & ((joined_before ? kLine : kVector) - 1));
    range.core_end = range.end - (after & ((joined_after ? kLine : kVector) - 1));
    if (joined_before) range.begin = at.constant ? range.core_begin : range.begin - before;
    if (joined_after) range.end = at.constant ? range.core_end : range.core_end + (after > 0 ? kLine : 0);
    if (range.core_begin > range.core_end) range.core_begin = range.core_end = range.end;
    return range;
  }

  // Copies to global memory, in groups of a thread's copies. Waits until their sources, but for the last group's or
  // none, may be overwritten.
  static __device__ void close_group() {
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
#endif
  }
  static __device__ void wait_for_groups(bool but_one) {
#if __CUDA_ARCH__ >= 900
    if (but_one) {
      asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");
    } else {
      asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
    }
#endif
  }
  // Makes what this thread has written to shared memory visible to copies that are issued after a barrier.
  static __device__ void fence() {
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
  }
  static __device__ void copy(T* target, const T* source, int count) {
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(target),
                 "r"(static_cast<uint32_t>(__cvta_generic_to_shared(source))), "r"(count * static_cast<int>(sizeof(T)))
                 : "memory");
#endif
  }

  __device__ void copy_core(const Row& at, const Range& range, int channel) const {
    if (!at.constant && range.core_begin < range.core_end) {
      copy(range.origin + range.core_begin, staged_outputs(at, channel) + range.core_begin,
           range.core_end - range.core_begin);
    }
    if (!at.constant) return;
    const int piece = p.tile.constant_bytes / sizeof(T);
    const T* const source = constants + (p.bias == nullptr ? 0 : channel * piece);
#pragma unroll 1
    for (int i = range.core_begin; i < range.core_end; i += piece) {
      copy(range.origin + i, source, min(piece, range.core_end - i));
    }
  }

  // What a core leaves out at one end, by 8 threads: a line that is filled up with constants, 16 bytes a thread, or
  // less than a vector, an element a thread.
  __device__ void store_end(const Unit& unit, const Row& at, const Range& range, int channel) const {
    static_assert(Traits::kLine / kVector == 8 && kVector <= 8);
    const int j = threadIdx.x % 8;
    const bool tail = threadIdx.x & 8;
    const int begin = tail ? range.core_end : range.begin, end = tail ? range.end : range.core_begin;
    if (begin >= end) return;
    const T* const staged = staged_outputs(at, channel);
    const T constant = from_accumulator<T>(terms[channel]);
    if (end - begin < kVector) {
      if (begin + j < end) range.origin[begin + j] = at.constant ? constant : staged[begin + j];
      return;
    }
    const int position = begin + j * kVector;
    const int first = -first_output(unit), last = p.out_width + first;
    Vector values = *reinterpret_cast<const Vector*>(staged + position);
#pragma unroll
    for (int e = 0; e < kVector; ++e) {
      if (position + e < first || position + e >= last) values.value[e] = constant;
    }
    __stcs(reinterpret_cast<uint4*>(range.origin + position), *reinterpret_cast<const uint4*>(&values));
  }

  // Channels last: the outputs of a row in this unit's segment, 16 bytes a thread.
  __device__ void store_pixels(const Unit& unit, const Row& at) const {
    constexpr int kPieces = kRowsMmaChannels / kVector;
    const int first = first_output(unit), width = p.tile.columns * kStride;
    const int end = min(width, p.out_width - first);
    const int channel = threadIdx.x % kPieces * kVector, channels = unit.channels - channel;
    if (channels <= 0) return;
    Vector values;
#pragma unroll
    for (int j = 0; j < kVector; ++j) values.value[j] = from_accumulator<T>(terms[channel + j]);
    for (int i = max(0, -first) + threadIdx.x / kPieces; i < end; i += blockDim.x / kPieces) {
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

  __device__ void store_row(const Unit& unit, const Row& at) const {
    if (p.channels_last) return store_pixels(unit, at);
    // 16 threads a channel.
#pragma unroll 1
    for (int i = threadIdx.x; i < unit.channels * 16; i += blockDim.x) {
      const Range range = row_range(unit, at, i / 16);
      if (i % 16 == 0) copy_core(at, range, i / 16);
      store_end(unit, at, range, i / 16);
    }
  }

  __device__ void store_constant_rows(const Unit& unit) const {
#pragma unroll 1
    for (int phase = 0; phase < p.height_stride; ++phase) {
      Row at;
      if (output_row(unit, phase, true, at)) store_row(unit, at);
    }
    close_group();
  }
};

template <class Traits>
__global__ void __launch_bounds__(Traits::kMaxThreads, Traits::kMinBlocks)
    rows_mma_kernel(const __grid_constant__ RowsMmaParams p) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  extern __shared__ __align__(16) unsigned char shared[];
  RowsMmaKernel<Traits>(p, shared).run();
#endif
}

}  // namespace fastconvt::cuda
