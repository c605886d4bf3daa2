// Long rows: the warps that multiply.
#pragma once

#include "long_rows_stage.cuh"

namespace fastconvt::cuda {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

// A warp has strips of bases that are neighbours. Column c of MMA tile j is base 4 * c + j of a strip, or, for 32-bit
// elements, base 4 * (c / 2) + 16 * (c % 2) + j: then four tiles and the taps that reach back share operands, and lanes
// that stage outputs at the same time do so in different banks.
template <class Traits>
class LongRowsMaker : LongRowsRole<Traits> {
  using Role = LongRowsRole<Traits>;
  using T = typename Traits::Element;
  using Sums = float[Traits::kKinds][Traits::kTiles][4];  // of the phases with taps
  using Role::lane, Role::p;
  static constexpr int kStride = Traits::kStride;
  static constexpr int kKinds = Traits::kKinds;
  static constexpr int kTiles = Traits::kTiles;
  static constexpr int kStrips = Traits::kStrips;
  static constexpr int kReach = Traits::kReach;
  static constexpr int kKernel = Traits::kKernel;
  static constexpr int kSteps = Traits::kSteps;
  static constexpr int kTerms = Traits::kSplit ? 2 : 1;
  static constexpr int kStepLanes = kKernel * kTerms * 32;
  static constexpr bool kWide = sizeof(T) == 4;
  static constexpr int kWindow = kReach + kTiles;
  // Right operands of a step, of the lane's column: bases -kReach .. kTiles - 1 of every strip; and what is left of
  // them.
  struct Window {
    uint32_t whole[kStrips][2][kWindow];
    uint32_t rest[Traits::kSplit ? 2 : 1][kWindow];
  };

  const int warp, row, quad;
  const int column;  // base of the strip where the lane's column of right operands begins

 public:
  __device__ LongRowsMaker(const LongRowsParams& p, unsigned char* shared)
      : Role(p, shared),
        warp(threadIdx.x / 32),
        row(threadIdx.x % 32 / 4),
        quad(threadIdx.x % 4),
        column(kWide ? row / 2 * 4 + row % 2 * 16 : row * 4) {}

  __device__ void run() const {
    RowsRing buffers(p.tile.buffers), stages(p.tile.stages);
    const LongRowsBlock first_block = this->first_block();
    const int step_pitch = Traits::kStep * p.tile.row_pitch;
    for (int item = this->first_item; item < p.items; item += this->item_step, buffers.advance()) {
      int tile = item;
      const int batch = p.by_tiles(tile), first = this->first_output(tile);
      LongRowsBlock block = first_block;
      const LongRowsLeft<T>* weight = this->weights() + lane;
      const float* terms = this->terms();
      wait_at(this->full(buffers.at), buffers.parity);
      const T* input = this->inputs(buffers.at) + Traits::kHalo + warp * kStrips * kLongRowsStrip + column;
      Window windows[kSteps > 0 ? kSteps : 1];
#pragma unroll
      for (int step = 0; step < kSteps; ++step) load(input + step * step_pitch, windows[step]);
#pragma unroll 1
      for (int i = 0; i < p.tile.blocks; ++i, stages.advance()) {
        Sums sum[kStrips];
        clear(terms, sum);
        if constexpr (kSteps > 0) {
#pragma unroll
          for (int step = 0; step < kSteps; ++step) add_step(windows[step], weight + step * kStepLanes, sum);
          weight += kSteps * kStepLanes;
        } else {
          const T* of_step = input;
#pragma unroll 1
          for (int step = 0; step < p.tile.steps; ++step, of_step += step_pitch, weight += kStepLanes) {
            load(of_step, windows[0]);
            add_step(windows[0], weight, sum);
          }
        }
        // Not before products have been made of what was loaded.
        if (i + 1 == (kSteps > 0 ? 1 : p.tile.blocks)) arrive(this->empty(buffers.at));
        if (!stages.fresh) wait_at(this->free(stages.at), stages.parity ^ 1);
        finish(batch, block, first, terms, this->outputs(stages.at), sum);
        fence_shared_writes();
        arrive(this->staged(stages.at));
        terms += kLongRowsChannels;
        if (this->advance(block)) input += p.tile.steps * step_pitch;
      }
    }
  }

 private:
  __device__ void arrive(uint64_t* barrier) const {
    __syncwarp();
    if (lane == 0) arrive_at(barrier);
  }

  __device__ void finish(int batch, const LongRowsBlock& block, int first, const float* terms, T* stage,
                         Sums (&sum)[kStrips]) const {
    const uint32_t origin = this->channel_origin(batch, block);
#pragma unroll
    for (int strip = 0; strip < kStrips; ++strip) {
      const int begin = (warp * kStrips + strip) * kLongRowsStrip * kStride;
      if (are_right(sum[strip])) {
        float both[2] = {terms[row], terms[row + 8]};
        add_infinite_terms(both, sum[strip]);
        p.rectify(both), p.rectify(sum[strip]);
        stage_outputs(origin + static_cast<uint32_t>(first), begin, both, stage, sum[strip]);
      } else {
        stage_long_rows_by_definition<Traits>(p, batch, block, origin, first, begin, terms, stage);
      }
    }
  }

  static __device__ bool are_right(const Sums& sum) {
    if constexpr (Traits::kSplit) {
      return are_exact(sum);
    } else {
      return are_finite(sum);
    }
  }

  __device__ void clear(const float* terms, Sums (&sum)[kStrips]) const {
    float start[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float term = terms[row + 8 * half];
      start[half] = is_finite(term) ? term : 0.f;
    }
#pragma unroll
    for (int strip = 0; strip < kStrips; ++strip)
#pragma unroll
      for (int r = 0; r < kKinds; ++r)
#pragma unroll
        for (int j = 0; j < kTiles; ++j)
#pragma unroll
          for (int i = 0; i < 4; ++i) sum[strip][r][j][i] = start[i / 2];
  }

  __device__ void load(const T* input, Window& window) const {
#pragma unroll
    for (int strip = 0; strip < kStrips; ++strip, input += kLongRowsStrip)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if constexpr (kWide) {
          load_values(input + (quad + 4 * i) * p.tile.row_pitch, window.whole[strip][i],
                      window.rest[Traits::kSplit ? i : 0]);
        } else {
          load_pairs(input + (2 * quad + 8 * i) * p.tile.row_pitch, window.whole[strip][i]);
        }
      }
  }

  static __device__ void load_values(const T* at, uint32_t (&whole)[kWindow], uint32_t (&rest)[kWindow]) {
    float values[4 + kTiles];
    const auto own = *reinterpret_cast<const Pack<float, 4>*>(at);
#pragma unroll
    for (int j = 0; j < kTiles; ++j) values[4 + j] = own.value[j];
    if constexpr (kReach > 2) {
      const auto before = *reinterpret_cast<const Pack<float, 4>*>(at - 4);
#pragma unroll
      for (int j = 0; j < 4; ++j) values[j] = before.value[j];
    } else if constexpr (kReach > 0) {
      const auto before = *reinterpret_cast<const Pack<float, 2>*>(at - 2);
      values[2] = before.value[0], values[3] = before.value[1];
    }
#pragma unroll
    for (int j = 0; j < kWindow; ++j) {
      const float value = values[4 - kReach + j];
      if constexpr (Traits::kSplit) {
        float terms[2];
        split_tf32_rounded(value, terms[0], terms[1]);
        whole[j] = __float_as_uint(terms[0]);
        rest[j] = __float_as_uint(terms[1]);
      } else {
        whole[j] = to_tf32(value);
      }
    }
  }

  // Of two channels, which stand a row apart.
  __device__ void load_pairs(const T* at, uint32_t (&whole)[kWindow]) const {
    uint32_t words[2][4];  // bases -4 .. 3
#pragma unroll
    for (int c = 0; c < 2; ++c, at += p.tile.row_pitch) {
      const auto own = *reinterpret_cast<const Pack<uint32_t, 2>*>(at);
      words[c][2] = own.value[0], words[c][3] = own.value[1];
      if constexpr (kReach > 2) {
        const auto before = *reinterpret_cast<const Pack<uint32_t, 2>*>(at - 4);
        words[c][0] = before.value[0], words[c][1] = before.value[1];
      } else if constexpr (kReach > 0) {
        words[c][1] = *reinterpret_cast<const uint32_t*>(at - 2);
      }
    }
#pragma unroll
    for (int j = 0; j < kWindow; ++j) {
      const int base = 4 - kReach + j;
      whole[j] = __byte_perm(words[0][base / 2], words[1][base / 2], base % 2 == 0 ? 0x5410 : 0x7632);
    }
  }

  static __device__ void add_step(const Window& window, const LongRowsLeft<T>* weight, Sums (&sum)[kStrips]) {
    if constexpr (Traits::kSplit) {
      add_split(window, weight, sum[0]);
    } else {
#pragma unroll
      for (int t = 0; t < kKernel; ++t) {
        const LongRowsLeft<T> left = weight[t * 32];
#pragma unroll
        for (int strip = 0; strip < kStrips; ++strip) multiply_tap(t, left, window.whole[strip], sum[strip]);
      }
    }
  }

  static __device__ __forceinline__ void multiply_tap(int t, const LongRowsLeft<T>& left,
                                                      const uint32_t (&right)[2][kWindow], Sums& sum) {
    const int kind = Traits::kind_of(t * Traits::kDilation % kStride);
    const int at = kReach - t * Traits::kDilation / kStride;
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
      if constexpr (kWide) {
        multiply_add(sum[kind][j], left.part[0], right[0][at + j], right[1][at + j]);
      } else {
        multiply_add_two(sum[kind][j], left.part[0], left.part[1], right[0][at + j], right[1][at + j]);
      }
    }
  }

  // float32 by three products of TF32 terms, the small ones first, into sums of their own: the unit truncates where it
  // adds.
  static __device__ void add_split(const Window& window, const LongRowsLeft<T>* weight, Sums& sum) {
    Sums part = {};
#pragma unroll
    for (int t = 0; t < kKernel; ++t) {
      multiply_tap(t, weight[2 * t * 32 + 32], window.whole[0], part);
      multiply_tap(t, weight[2 * t * 32], window.rest, part);
    }
#pragma unroll
    for (int t = 0; t < kKernel; ++t) multiply_tap(t, weight[2 * t * 32], window.whole[0], part);
#pragma unroll
    for (int r = 0; r < kKinds; ++r)
#pragma unroll
      for (int j = 0; j < kTiles; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[r][j][i] += part[r][j][i];
  }

  // Of a strip that begins at position `begin`; position 0 of channel 0 stands at `origin`.
  __device__ void stage_outputs(uint32_t origin, int begin, const float (&terms)[2], T* stage, const Sums& sum) const {
    const uint32_t pitch = static_cast<uint32_t>(p.out.channel);
    const int low_skew = long_rows_skew(origin + row * pitch, Traits::kSector);
    const int high_skew = long_rows_skew(origin + (row + 8) * pitch, Traits::kSector);
    T* const channel = stage + row * p.tile.output_pitch + begin + quad * (kWide ? 4 : 8) * kStride;
    T* const low = channel + low_skew;
    T* const high = channel + 8 * p.tile.output_pitch + high_skew;
    if constexpr (!kWide) {
      stage_words(low, low_skew % 2 != 0, 0, terms[0], sum);
      stage_words(high, high_skew % 2 != 0, 1, terms[1], sum);
    } else if (__all_sync(~0u, (low_skew | high_skew) % 4 == 0)) {
      stage_half<4>(low, 0, terms[0], sum);
      stage_half<4>(high, 1, terms[1], sum);
    } else if (__all_sync(~0u, (low_skew | high_skew) % 2 == 0)) {
      stage_half<2>(low, 0, terms[0], sum);
      stage_half<2>(high, 1, terms[1], sum);
    } else {
      stage_half<1>(low, 0, terms[0], sum);
      stage_half<1>(high, 1, terms[1], sum);
    }
  }

  // Output i of the lane's bases, which begin `first_base` of 4 bases further on.
  static __device__ __forceinline__ float output(int i, int half, float term, const Sums& sum) {
    const int r = i % kStride, base = i / kStride;
    return Traits::has_taps(r) ? sum[Traits::kind_of(r)][base % kTiles][2 * half + base / kTiles] : term;
  }

  template <int kCount>
  static __device__ void stage_half(T* target, int half, float term, const Sums& sum) {
#pragma unroll
    for (int run = 0; run < 2; ++run, target += 16 * kStride)
#pragma unroll
      for (int i = 0; i < 4 * kStride; i += kCount) {
        Pack<T, kCount> values;
#pragma unroll
        for (int e = 0; e < kCount; ++e) {
          values.value[e] = from_accumulator<T>(output(run * 4 * kStride + i + e, half, term, sum));
        }
        *reinterpret_cast<Pack<T, kCount>*>(target + i) = values;
      }
  }

  // 16-bit outputs in words; where the first one stands in the middle of a word, words pair it with what comes before.
  static __device__ void stage_words(T* target, bool odd, int half, float term, const Sums& sum) {
    constexpr int kWords = 4 * kStride;
    uint32_t words[kWords];
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      words[i] = rounded_pair(T{}, output(2 * i, half, term, sum), output(2 * i + 1, half, term, sum));
    }
    uint32_t* const to = reinterpret_cast<uint32_t*>(target - (odd ? 1 : 0));
    const uint32_t pick = odd ? 0x5432 : 0x7654;
#pragma unroll
    for (int i = 1; i < kWords; ++i) to[i] = __byte_perm(words[i - 1], words[i], pick);
    if (odd) {
      reinterpret_cast<uint16_t*>(target)[0] = static_cast<uint16_t>(words[0]);
      reinterpret_cast<uint16_t*>(target)[2 * kWords - 1] = static_cast<uint16_t>(words[kWords - 1] >> 16);
    } else {
      to[0] = words[0];
    }
  }
};

#endif

}  // namespace fastconvt::cuda
