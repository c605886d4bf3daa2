// Transposed convolution by whole output rows on tensor cores, for few channels a group, channels last
// (csrc/core/rows_mma.h).
//
// A unit of work is one base of the height: the output rows of all its phases, which are neighbours in memory, for 16
// output channels. Rows of phases without taps are constants and are stored first. For the others a warp owns 32 bases
// of the last axis. MMA tile j has the bases 4 * column + j: a lane loads the inputs of four tiles at once, and ends
// with the outputs of 8 neighbouring bases, all phases, of two channels. They go through shared memory to stores of the
// block's channels of a position.
#pragma once

#include "rows_mma_store.cuh"

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
  const int first = channel / p.group_out * p.group_in;  // input channel
  const T* const weight =
      static_cast<const T*>(p.weight) +
      ((static_cast<int64_t>(group) * p.in_channels + first) * p.group_out + channel % p.group_out) * taps;
  double sum = 0;
  int y = unit.base - p.phase[phase].back;
  for (int tap = p.phase[phase].first_tap; tap < p.height_kernel; tap += p.tap_step, y -= p.back_step) {
    const T* const source = unit.input_row(p, y);
    if (source == nullptr) continue;
    for (int t = 0; t < Traits::kKernel; ++t) {
      const int x = o + p.padding - t * Traits::kDilation;
      if (x < 0 || x % Traits::kStride != 0 || x / Traits::kStride >= p.in_width) continue;
#pragma unroll 1
      for (int c = 0; c < p.group_in; ++c) {
        const T value = source[first + c + (x / Traits::kStride - unit.column) * p.in.axis[2]];
        const T w = weight[c * p.group_out * taps + tap * Traits::kKernel + t];
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
  using Outputs = RowsMmaOutputs<Traits>;
  using Row = typename Outputs::Row;
  using Sums = typename Traits::Sums;
  static constexpr int kStride = Traits::kStride;
  static constexpr int kTiles = Traits::kTiles;
  static constexpr int kRights = sizeof(T) / 2;    // words of a right operand
  static constexpr int kWordRows = 2 * sizeof(T);  // of a step
  static constexpr int kWindow = Traits::kReach + kTiles;

  const RowsMmaParams& p;
  float* const terms;  // the bias
  MmaLeft<T>* const weights;
  uint32_t* const inputs;
  unsigned char* const cells;
  const int warp, lane, row, quad;
  const Outputs outputs;
  int slot;  // of the unit's base among the staged input rows

 public:
  __device__ RowsMmaKernel(const RowsMmaParams& p, unsigned char* shared)
      : p(p),
        terms(reinterpret_cast<float*>(shared)),
        weights(reinterpret_cast<MmaLeft<T>*>(shared + kRowsMmaChannels * sizeof(float))),
        inputs(reinterpret_cast<uint32_t*>(shared + p.tile.inputs)),
        cells(shared + p.tile.cells),
        warp(threadIdx.x / 32),
        lane(threadIdx.x % 32),
        row(threadIdx.x % 32 / 4),
        quad(threadIdx.x % 4),
        outputs(p, reinterpret_cast<T*>(shared + p.tile.outputs), terms) {}

  __device__ void run() {
    const RowsMmaInputRows<T> rows(cells);
    int staged_block = -1;
    Unit unit;
    unit.start(p, blockIdx.x);
    rows.request(p, unit, unit.base);
    if (!p.tile.with_halo) clear_halos();
    while (unit.item < p.items) {
      if (unit.fresh) {
        __syncthreads();  // everyone has done with the inputs, weights and bias before
        if (unit.block != staged_block) stage_channels<Traits>(p, unit.block, weights, terms);
        staged_block = unit.block;
        slot = 0;
#pragma unroll 1
        for (int back = p.tile.span - 1; back > 0; --back) rows.copy(p, unit, unit.base - back, staged_row(back));
      }
      rows.store(p, unit, unit.base, staged_row(0));
      request_next(rows, unit);
      __syncthreads();  // inputs, weights and bias are staged
      outputs.store_constant_rows(unit);
      make_rows(unit);
      unit.advance(p);
      if (++slot > p.tile.span) slot = 0;
    }
  }

 private:
  __device__ void request_next(const RowsMmaInputRows<T>& rows, Unit unit) const {
    unit.advance(p);
    rows.request(p, unit, unit.base);
  }

  // The input row `back` rows before the unit's base.
  __device__ uint32_t* staged_row(int back) const {
    const int of = slot - back + (slot < back ? p.tile.span + 1 : 0);
    return inputs + of * p.tile.row_words;
  }

  __device__ void clear_halos() const {
    for (int i = threadIdx.x; i < (p.tile.span + 1) * p.tile.steps * kWordRows; i += blockDim.x) {
      for (int j = 0; j < p.tile.halo; ++j) inputs[i * p.tile.row_pitch + j] = 0;
    }
  }

  __device__ void make_rows(const Unit& unit) {
#pragma unroll 1
    for (int phase = 0; phase < p.height_stride; ++phase) {
      Row at;
      if (!outputs.find(unit, phase, false, at)) continue;
#pragma unroll 1
      for (int strip = warp * Traits::kStrips; strip < (warp + 1) * Traits::kStrips; ++strip) {
        Sums sum;
        add_taps(unit, phase, strip, sum);
        if (strip == warp * Traits::kStrips) __syncthreads();  // the row before is stored
        if (are_finite(sum)) {
          const float bias[2] = {terms[rows_mma_channel(row, 0)], terms[rows_mma_channel(row, 1)]};
          add_infinite_terms(bias, sum);
          p.rectify(sum);
          outputs.stage_outputs(strip, sum);
        } else {
          stage_by_definition(unit, at, phase, strip);
        }
      }
      __syncthreads();
      outputs.store_row(unit, at);
    }
  }

  __device__ void add_taps(const Unit& unit, int phase, int strip, Sums& sum) const {
    float start[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float term = terms[rows_mma_channel(row, half)];
      start[half] = is_finite(term) ? term : 0.f;
    }
#pragma unroll
    for (int r = 0; r < kStride; ++r)
#pragma unroll
      for (int j = 0; j < kTiles; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[r][j][i] = start[i / 2];
    const int column = quad * p.tile.row_pitch + p.tile.halo + strip * kRowsMmaColumns + row * kTiles;
    int back = p.phase[phase].back;
    int of = slot - back + (slot < back ? p.tile.span + 1 : 0);
    for (int tap = p.phase[phase].first_tap; tap < p.height_kernel; tap += p.tap_step) {
      if (static_cast<unsigned>(unit.base - back) < static_cast<unsigned>(p.in_height)) {
        const uint32_t* input = inputs + of * p.tile.row_words + column;
        const MmaLeft<T>* weight = weights + tap * p.tile.tap_weights + lane;
#pragma unroll 1
        for (int step = 0; step < p.tile.steps; ++step) {
          add_step(input, weight, sum);
          input += kWordRows * p.tile.row_pitch;
          weight += Traits::kKernel * 32;
        }
      }
      back += p.back_step;
      of -= p.back_step;
      if (of < 0) of += p.tile.span + 1;
    }
  }

  __device__ void add_step(const uint32_t* input, const MmaLeft<T>* weight, Sums& sum) const {
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

  __device__ void stage_by_definition(const Unit& unit, const Row& at, int phase, int strip) const {
    constexpr int kPositions = kRowsMmaColumns * kStride;
#pragma unroll 1
    for (int i = lane; i < unit.channels * kPositions; i += 32) {
      const int channel = i / kPositions, position = i % kPositions + strip * kPositions;
      const bool exists = position >= at.begin && position < at.end;
      const double sum =
          (exists ? sum_by_definition<Traits>(p, unit, phase, channel, at.first + position) : 0.) + terms[channel];
      outputs.place(position)[channel] = from_accumulator<T>(p.rectify(static_cast<float>(sum)));
    }
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
