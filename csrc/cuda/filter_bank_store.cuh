// The filter bank's outputs, and those that are not finite by the definition.
#pragma once

#include "filter_bank_params.cuh"

namespace fastconvt::cuda {

// An output without the bias: only taps and inputs that exist are multiplied, in float64, since large finite products
// must not overflow on the way.
template <typename T>
__device__ __noinline__ float filter_bank_by_definition(const FilterBankParams& p, int item, int group, int channel,
                                                        int base, int phase) {
  const T* const input =
      static_cast<const T*>(p.input) + item * p.in.batch + static_cast<int64_t>(group) * p.group_in * p.in.channel;
  const T* const weight = static_cast<const T*>(p.weight) +
                          static_cast<int64_t>(group) * p.group_in * p.weight_channel +
                          static_cast<int64_t>(channel) * p.kernel;
  double sum = 0;
#pragma unroll 1
  for (int tap = phase, position = base; tap < p.kernel && position >= 0; tap += p.stride, --position) {
    if (position >= p.length) continue;
#pragma unroll 4
    for (int c = 0; c < p.group_in; ++c) {
      sum = fma(static_cast<double>(to_accumulator(input[position * p.in.axis[2] + c * p.in.channel])),
                static_cast<double>(to_accumulator(weight[c * p.weight_channel + tap])), sum);
    }
  }
  return static_cast<float>(sum);
}

// A lane's sums: two rows by two neighbouring columns of every eight.
template <class Traits>
class FilterBankOutputs {
  using T = typename Traits::Element;
  using Two = std::conditional_t<sizeof(T) == 4, float2, uint32_t>;

  const FilterBankParams& p;
  const FilterBankBlock& block;
  int channel[2], phase[2];
  bool exists[2];
  float term[2];
  T* row[2];

 public:
  // first_row: of the warp, in the group.
  __device__ FilterBankOutputs(const FilterBankParams& p, const FilterBankBlock& block, int first_row, int lane)
      : p(p), block(block) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int index = first_row + lane / 4 * 2 + i;
      exists[i] = index < p.rows;
      phase[i] = exists[i] ? index : 0;
      channel[i] = p.by_stride(phase[i]);
      const int64_t of_all = static_cast<int64_t>(block.group) * p.group_out + channel[i];
      term[i] = p.bias == nullptr ? 0.f : to_accumulator(__ldg(static_cast<const T*>(p.bias) + of_all));
      row[i] = static_cast<T*>(p.output) + of_all * p.out.channel;
    }
  }

  // Of columns 0 and 1 at `column` of the block: the first row's, then the second's.
  __device__ __forceinline__ void store(const float (&sum)[4], int column) const {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const FilterBankPlace at(p, block.column + column + c);
      const int base = p.first_base + at.base;
      const int64_t item = at.item * p.out.batch;
      float value[2];
      bool inside[2];
      int64_t output[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        output[i] = static_cast<int64_t>(base) * p.stride + phase[i] - p.padding;
        inside[i] = exists[i] && at.item < p.batch && at.base < p.bases &&
                    static_cast<uint64_t>(output[i]) < static_cast<uint64_t>(p.outputs);
        float exact = sum[i * 2 + c];
        // Missing factors are zeros, which only finite ones leave without effect, and rests of float32 may be NaN: both
        // show in a sum that is not finite. Rests of tiny numbers may be lost.
        if (inside[i] && (!is_finite(exact) || (Traits::kThree && exact != 0 && fabsf(exact) < 7.9e-31f))) {
          exact = filter_bank_by_definition<T>(p, at.item, block.group, channel[i], base, phase[i]);
        }
        value[i] = exact + term[i];
      }
      p.rectify(value);
      const Pack<T, 2> two = rounded<T>(value);
      if (p.store_pairs) {
        if (inside[0]) *reinterpret_cast<Pack<T, 2>*>(row[0] + item + output[0]) = two;
      } else {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if (inside[i]) row[i][item + output[i] * p.out.axis[2]] = two.value[i];
        }
      }
    }
  }
};

}  // namespace fastconvt::cuda
