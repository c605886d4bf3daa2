// The row family on tensor cores: output rows in shared memory and on their way from there.
#pragma once

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
  const float* const terms;  // the bias
  const int row, quad;

 public:
  // An output row of a unit, for the block's first channel: outputs [begin, end), counted from origin, which is phase 0
  // of the segment's first base.
  struct Row {
    T* origin;
    int first;  // what position 0 is along the last axis; may be negative
    int begin, end;
    bool constant;
  };

  __device__ RowsMmaOutputs(const RowsMmaParams& p, T* outputs, const float* terms)
      : p(p), outputs(outputs), terms(terms), row(threadIdx.x % 32 / 4), quad(threadIdx.x % 4) {}

  // Whether the unit has a row of that phase of the height, of constants or not as asked for.
  __device__ bool find(const Unit& unit, int phase, bool constant, Row& at) const {
    const int y = unit.base * p.height_stride + phase - p.height_padding;
    if (y < 0 || y >= p.out_height || (p.phase[phase].first_tap < 0) != constant) return false;
    at.first = unit.column * kStride - p.padding;
    at.origin = unit.output + y * p.out.axis[1] + at.first * p.out.axis[2];
    at.begin = max(0, -at.first);
    at.end = min(p.tile.columns * kStride, p.out_width - at.first);
    at.constant = constant;
    return true;
  }

  // Where the channels of a position are staged. A gap after every run keeps banks apart.
  __device__ T* place(int position) const {
    return outputs + position * kRowsMmaChannels + position / Traits::kRun * 8;
  }

  __device__ void stage_outputs(int strip, const Sums& sum) const {
    const auto value = [&](int half, int i) {
      const int base = i / kStride;
      return from_accumulator<T>(sum[i % kStride][base % kTiles][2 * half + base / kTiles]);
    };
    T* const target = place(strip * kRowsMmaColumns * kStride + quad * Traits::kRun) + rows_mma_channel(row, 0);
#pragma unroll
    for (int i = 0; i < Traits::kRun; ++i) {
      *reinterpret_cast<Pack<T, 2>*>(target + i * kRowsMmaChannels) = Pack<T, 2>{{value(0, i), value(1, i)}};
    }
  }

  // 16 bytes a thread.
  __device__ void store_row(const Unit& unit, const Row& at) const {
    constexpr int kPieces = kRowsMmaChannels / kVector;
    const int channel = threadIdx.x % kPieces * kVector, channels = unit.channels - channel;
    if (channels <= 0) return;
    Vector values;
#pragma unroll
    for (int j = 0; j < kVector; ++j) values.value[j] = from_accumulator<T>(p.rectify(terms[channel + j]));
    for (int i = at.begin + threadIdx.x / kPieces; i < at.end; i += blockDim.x / kPieces) {
      if (!at.constant) values = *reinterpret_cast<const Vector*>(place(i) + channel);
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

  __device__ void store_constant_rows(const Unit& unit) const {
#pragma unroll 1
    for (int phase = 0; phase < p.height_stride; ++phase) {
      Row at;
      if (find(unit, phase, true, at)) store_row(unit, at);
    }
  }
};

}  // namespace fastconvt::cuda
