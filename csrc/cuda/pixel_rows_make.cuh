// Rows of pixels: the warps that multiply.
#pragma once

#include "pixel_rows_params.cuh"

namespace fastconvt::cuda {

// Where the weight of an input and an output channel stands among those of a tap, in elements. A quad loads 16 bytes of
// neighbouring input channels, for both halves of a unit; a lane's two rows are neighbouring output channels.
template <typename T>
__device__ inline int pixel_rows_weight_place(int unit_pitch, int block_pitch, int in, int out) {
  constexpr int kUnit = kPixelRowsUnitBytes / sizeof(T), kQuad = kUnit / 4, kPerWord = 4 / sizeof(T);
  const int unit = in / kUnit, quad = in % kUnit / kQuad, of_quad = in % kQuad;
  const int half = of_quad / (kQuad / 2), word = of_quad / kPerWord % 2 * 2 + out % 2;
  const int lane = out % kPixelRowsChannels / 2 * 4 + quad;
  const int left = out / kPixelRowsChannels * block_pitch + unit * unit_pitch + half * 32 + lane;
  return (left * 4 + word) * kPerWord + of_quad % kPerWord;
}

// Weights as the lanes need them, the bias, rows of it, and what of the staged outputs is constant.
template <class Role>
__device__ void stage_pixel_rows_channels(const Role& role) {
  using Traits = typename Role::Of;
  using T = typename Traits::Element;
  constexpr int kKernel = Traits::kKernel, kUnitLanes = kKernel * 64;
  const PixelRowsParams& p = role.p;
  const int block_lanes = p.tile.units * kUnitLanes, lanes = p.height_kernel * p.tile.blocks * block_lanes;
  for (int i = threadIdx.x; i < lanes; i += Traits::kThreads) role.weights()[i] = MmaLeft<float>{};
  __syncthreads();
  const T* const weight = static_cast<const T*>(p.weight);
  const int rows = p.in_channels * p.group_out * p.height_kernel;
#pragma unroll 4
  for (int i = threadIdx.x; i < rows; i += Traits::kThreads) {
    int height_tap = i;
    int out = p.by_height_kernel(height_tap);
    const int in = p.by_group_out(out);
    int in_of_group = in;
    out += p.by_group_in(in_of_group) * p.group_out;
    T* const to = reinterpret_cast<T*>(role.weights() + height_tap * p.tile.blocks * block_lanes) +
                  pixel_rows_weight_place<T>(kUnitLanes, block_lanes, in, out);
#pragma unroll
    for (int tap = 0; tap < kKernel; ++tap) {
      const T value = __ldg(weight + i * kKernel + tap);
      if constexpr (sizeof(T) == 4 && !Traits::kSplit) {
        to[tap * (64 * 4)] = __uint_as_float(to_tf32(value));
      } else {
        to[tap * static_cast<int>(64 * 16 / sizeof(T))] = value;
      }
    }
  }
  const BiasEpilogue<T> epilogue{static_cast<const T*>(p.bias)};
  const auto term = [&](int c) { return c < p.out_channels ? epilogue.channel_term(c) : 0.f; };
  for (int c = threadIdx.x; c < p.tile.blocks * kPixelRowsChannels; c += Traits::kThreads) role.terms()[c] = term(c);
  // Pixels of constants from shared memory's own sectors on, so that they go on wherever pixels begin there.
  const int period = p.tile.constant_pixels * p.out_channels;
  T* const constants = role.constants() - p.skew;
  for (int i = threadIdx.x; i < period + kPixelRowsSector / static_cast<int>(sizeof(T)); i += Traits::kThreads) {
    constants[i] = from_accumulator<T>(p.rectify(term((i + p.out_channels - p.skew) % p.out_channels)));
  }
  __syncthreads();
  const int vectors = p.tile.output_bytes * p.tile.stages / 16, stage_vectors = p.tile.output_bytes / 16;
  const uint4* const from = reinterpret_cast<const uint4*>(constants);
  uint4* const to = reinterpret_cast<uint4*>(role.outputs(0) - p.skew);
#pragma unroll 4
  for (int i = threadIdx.x; i < vectors; i += Traits::kThreads)
    to[i] = from[i % stage_vectors % (period / Traits::kVector)];
}

// One output from global memory, without the bias: only taps and inputs that exist are multiplied. In float64, since
// large finite products must not overflow on the way.
template <class Traits>
__device__ double pixel_rows_sum_by_definition(const PixelRowsParams& p, const PixelRowsItem& item, int phase,
                                               int channel, int o) {
  using T = typename Traits::Element;
  const int taps = p.height_kernel * Traits::kKernel;
  const int group = channel / p.group_out, first = group * p.group_in;
  const T* const weight = static_cast<const T*>(p.weight) + (channel - group * p.group_out) * taps;
  const T* const input = static_cast<const T*>(p.input) + item.batch * p.in.batch;
  double sum = 0;
  int y = item.base - p.phase[phase].back;
  for (int tap = p.phase[phase].first_tap; tap < p.height_kernel; tap += p.tap_step, y -= p.back_step) {
    if (y < 0 || y >= p.in_height) continue;
    for (int t = 0; t < Traits::kKernel; ++t) {
      const int x = o + p.padding - t * Traits::kDilation;
      if (x < 0 || x % Traits::kStride != 0 || x / Traits::kStride >= p.in_width) continue;
      const T* const pixel = input + y * p.in.axis[1] + x / Traits::kStride * p.in.axis[2];
#pragma unroll 1
      for (int c = first; c < first + p.group_in; ++c) {
        const T w = weight[c * p.group_out * taps + tap * Traits::kKernel + t];
        sum = fma(static_cast<double>(to_accumulator(pixel[c])), static_cast<double>(to_accumulator(w)), sum);
      }
    }
  }
  return sum;
}

// 16 channels, from `channel` on, of a strip that starts `begin` bases behind the segment.
template <class Traits>
__device__ __noinline__ void stage_pixel_rows_by_definition(const PixelRowsParams& p, PixelRowsItem item, int phase,
                                                            int channel, int begin, const float* terms,
                                                            typename Traits::Element* stage) {
  using T = typename Traits::Element;
  const int positions = Traits::kBases * Traits::kStride;
#pragma unroll 1
  for (int i = threadIdx.x % 32; i < positions * kPixelRowsChannels; i += 32) {
    const int c = channel + i % kPixelRowsChannels, position = begin * Traits::kStride + i / kPixelRowsChannels;
    const int o = item.column * Traits::kStride - p.padding + position;
    if (c >= p.out_channels || o < 0 || o >= p.out_width) continue;
    const double sum = pixel_rows_sum_by_definition<Traits>(p, item, phase, c, o) + terms[c];
    stage[position * p.out_channels + c] = from_accumulator<T>(p.rectify(static_cast<float>(sum)));
  }
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

// A warp has 16 output channels of some strips.
template <class Traits>
class PixelRowsMaker : PixelRowsRole<Traits> {
  using Role = PixelRowsRole<Traits>;
  using T = typename Traits::Element;
  using Sums = float[Traits::kKinds][Traits::kTiles][4];  // of the phases with taps
  using Role::lane, Role::p;
  static constexpr int kStride = Traits::kStride;
  static constexpr int kKinds = Traits::kKinds;
  static constexpr int kTiles = Traits::kTiles;
  static constexpr int kStrips = Traits::kStrips;
  static constexpr int kReach = Traits::kReach;
  static constexpr int kKernel = Traits::kKernel;
  static constexpr int kWindow = kReach + kTiles;
  static constexpr bool kWide = sizeof(T) == 4;
  using Window = uint32_t[kWindow][4];  // a unit of the lane's column: bases -kReach .. kTiles - 1

  const int row, quad;
  int block;                 // of output channels
  int begin;                 // the warp's first base of a segment
  int first_unit, end_unit;  // of input channels that the block's groups have

 public:
  __device__ PixelRowsMaker(const PixelRowsParams& p, unsigned char* shared)
      : Role(p, shared), row(threadIdx.x % 32 / 4), quad(threadIdx.x % 4) {
    const int warp = threadIdx.x / 32;
    block = warp % p.tile.blocks;
    begin = warp / p.tile.blocks * kStrips * Traits::kBases;
    constexpr int kUnit = kPixelRowsUnitBytes / sizeof(T);
    const int channel = block * kPixelRowsChannels, last = min(p.out_channels, channel + kPixelRowsChannels) - 1;
    first_unit = channel / p.group_out * p.group_in / kUnit;
    end_unit = min(p.tile.units, (last / p.group_out * p.group_in + p.group_in - 1) / kUnit + 1);
  }

  __device__ void run() const {
    RowsRing buffers(p.tile.buffers), stages(p.tile.stages);
    for (int index = blockIdx.x; index < p.items; index += gridDim.x, buffers.advance()) {
      const PixelRowsItem item(p, index);
      wait_at(this->full(buffers.at), buffers.parity);
      const uint32_t* const inputs =
          this->inputs(buffers.at) + (begin + pixel_rows_base<kTiles>(row) + kReach) * p.tile.row_pitch + 4 * quad;
#pragma unroll 1
      for (int phase = 0; phase < p.height_stride; ++phase) {
        if (this->tapless(phase) || !this->has_output(this->output_y(item.base, phase))) continue;
        make_row(item, phase, inputs, stages);
        stages.advance();
      }
      __syncwarp();
      if (lane == 0) arrive_at(this->empty(buffers.at));
    }
  }

 private:
  __device__ void make_row(const PixelRowsItem& item, int phase, const uint32_t* inputs, const RowsRing& stages) const {
    const float* const terms = this->terms() + block * kPixelRowsChannels + 2 * row;
    Sums sum[kStrips];
    add_taps(item, phase, inputs, terms, sum);
    if (!stages.fresh) wait_at(this->free(stages.at), stages.parity ^ 1);
    T* const stage = this->outputs(stages.at);
#pragma unroll
    for (int strip = 0; strip < kStrips; ++strip) {
      const int first = begin + strip * Traits::kBases;
      if (are_right(sum[strip])) {
        const float both[2] = {terms[0], terms[1]};
        add_infinite_terms(both, sum[strip]);
        p.rectify(sum[strip]);
        stage_outputs(stage, first, sum[strip]);
      } else {
        stage_pixel_rows_by_definition<Traits>(p, item, phase, block * kPixelRowsChannels, first, this->terms(), stage);
      }
    }
    fence_shared_writes();
    __syncwarp();
    if (lane == 0) arrive_at(this->staged(stages.at));
  }

  static __device__ bool are_right(const Sums& sum) {
    if constexpr (Traits::kSplit) {
      return are_exact(sum);
    } else {
      return are_finite(sum);
    }
  }

  __device__ void add_taps(const PixelRowsItem& item, int phase, const uint32_t* inputs, const float* terms,
                           Sums (&sum)[kStrips]) const {
    const float start[2] = {is_finite(terms[0]) ? terms[0] : 0.f, is_finite(terms[1]) ? terms[1] : 0.f};
#pragma unroll
    for (int strip = 0; strip < kStrips; ++strip)
#pragma unroll
      for (int r = 0; r < kKinds; ++r)
#pragma unroll
        for (int j = 0; j < kTiles; ++j)
#pragma unroll
          for (int i = 0; i < 4; ++i) sum[strip][r][j][i] = start[i / 2];
    const int unit_lanes = kKernel * 64;
    int back = p.phase[phase].back;
    for (int tap = p.phase[phase].first_tap; tap < p.height_kernel; tap += p.tap_step, back += p.back_step) {
      if (!this->has_input(item.base - back)) continue;
      const uint32_t* input =
          inputs + (p.tile.span - 1 - back) * this->input_row_words() + first_unit * (kPixelRowsUnitBytes / 4);
      const MmaLeft<float>* weight =
          this->weights() + ((tap * p.tile.blocks + block) * p.tile.units + first_unit) * unit_lanes + lane;
#pragma unroll 1
      for (int unit = first_unit; unit < end_unit; ++unit) {
        add_unit(input, weight, sum);
        input += kPixelRowsUnitBytes / 4;
        weight += unit_lanes;
      }
    }
  }

  __device__ void add_unit(const uint32_t* input, const MmaLeft<float>* weight, Sums (&sum)[kStrips]) const {
    Window window[kStrips];
#pragma unroll
    for (int strip = 0; strip < kStrips; ++strip)
#pragma unroll
      for (int j = 0; j < kWindow; ++j) {
        const auto four = *reinterpret_cast<const Pack<uint32_t, 4>*>(input + (strip * Traits::kBases + j - kReach) *
                                                                                  p.tile.row_pitch);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          window[strip][j][i] = kWide && !Traits::kSplit ? to_tf32(__uint_as_float(four.value[i])) : four.value[i];
        }
      }
    if constexpr (Traits::kSplit) {
      add_split(window[0], weight, sum[0]);
    } else {
#pragma unroll
      for (int t = 0; t < kKernel; ++t)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const MmaLeft<float> left = weight[(2 * t + half) * 32];
#pragma unroll
          for (int strip = 0; strip < kStrips; ++strip) multiply_tap(t, half, left, window[strip], sum[strip]);
        }
    }
  }

  static __device__ __forceinline__ void multiply_tap(int t, int half, const MmaLeft<float>& left, const Window& window,
                                                      Sums& sum) {
    const int kind = Traits::kind_of(t * Traits::kDilation % kStride);
    const int at = kReach - t * Traits::kDilation / kStride;
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
      const uint32_t right = window[at + j][2 * half], next_right = window[at + j][2 * half + 1];
      if constexpr (kWide) {
        multiply_add(sum[kind][j], left, right, next_right);
      } else {
        const MmaLeft<T> low{{left.word[0], left.word[1]}}, high{{left.word[2], left.word[3]}};
        multiply_add_two(sum[kind][j], low, high, right, next_right);
      }
    }
  }

  // float32 by three products of TF32 terms, the small ones first, into sums of their own: the unit truncates where it
  // adds.
  static __device__ void add_split(Window& window, const MmaLeft<float>* weight, Sums& sum) {
    Window low;
#pragma unroll
    for (int j = 0; j < kWindow; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) split(window[j][i], low[j][i]);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      Sums part = {};
      MmaLeft<float> left[kKernel];
#pragma unroll
      for (int t = 0; t < kKernel; ++t) {
        MmaLeft<float> rest;
        left[t] = weight[(2 * t + half) * 32];
#pragma unroll
        for (int i = 0; i < 4; ++i) split(left[t].word[i], rest.word[i]);
        multiply_tap(t, half, rest, window, part);
        multiply_tap(t, half, left[t], low, part);
      }
#pragma unroll
      for (int t = 0; t < kKernel; ++t) multiply_tap(t, half, left[t], window, part);
#pragma unroll
      for (int r = 0; r < kKinds; ++r)
#pragma unroll
        for (int j = 0; j < kTiles; ++j)
#pragma unroll
          for (int i = 0; i < 4; ++i) sum[r][j][i] += part[r][j][i];
    }
  }
  static __device__ __forceinline__ void split(uint32_t& word, uint32_t& rest) {
    float terms[2];
    split_tf32_rounded(__uint_as_float(word), terms[0], terms[1]);
    word = __float_as_uint(terms[0]);
    rest = __float_as_uint(terms[1]);
  }

  // Of a strip that starts `first` bases behind the segment.
  __device__ void stage_outputs(T* stage, int first, const Sums& sum) const {
    const int channel = block * kPixelRowsChannels + 2 * row;
    if (channel >= p.out_channels) return;
    if (p.skew % 2 == 0) {
      stage_pairs<true>(stage + channel, first, sum);
    } else {
      stage_pairs<false>(stage + channel, first, sum);
    }
  }

  template <bool kAligned>
  __device__ void stage_pairs(T* stage, int first, const Sums& sum) const {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      T* at = stage + (first + pixel_rows_base<kTiles>(2 * quad + e)) * kStride * p.out_channels;
#pragma unroll
      for (int j = 0; j < kTiles; ++j)
#pragma unroll
        for (int r = 0; r < kStride; ++r, at += p.out_channels) {
          if (!Traits::has_taps(r)) continue;
          const float (&of)[4] = sum[Traits::kind_of(r)][j];
          if constexpr (kAligned && kWide) {
            *reinterpret_cast<Pack<float, 2>*>(at) = Pack<float, 2>{{of[e], of[2 + e]}};
          } else if constexpr (kAligned) {
            *reinterpret_cast<uint32_t*>(at) = rounded_pair(T{}, of[e], of[2 + e]);
          } else {
            at[0] = from_accumulator<T>(of[e]);
            at[1] = from_accumulator<T>(of[2 + e]);
          }
        }
    }
  }
};

#endif

}  // namespace fastconvt::cuda
