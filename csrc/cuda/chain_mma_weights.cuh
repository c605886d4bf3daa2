// Weights as fragments of matrix products, scaled and rounded once a block.
#pragma once

#include "chain_mma_stage.cuh"

namespace fastconvt::cuda::chain_mma {

template <class Traits>
class Weights : public Stage<Traits> {
  using Base = Stage<Traits>;
  using Math = Log2Domain<float>;
  static constexpr int kColumns = Traits::kColumns;
  using Fragment = Pack<uint32_t, 2 * kColumns>;

 protected:
  using Base::list_places;
  using Base::p, Base::shared, Base::block, Base::state;
  using typename Base::Batch;
  using typename Base::T;

  __device__ Weights(const Params& p, unsigned char* memory, State& state) : Base(p, memory, state) {}

  // Once a block: weights, bias, tables.
  __device__ void prepare() {
    // Both arrive while weights do.
    if (p.bias != nullptr && block_thread() == 0) prefetch(p.bias);
    const T subtrahend = __ldg(static_cast<const T*>(p.subtrahend));
    if (block_thread() == 0) block.largest_weight = block.claimed = 0;
    if (team_thread() == 0) state.unsafe = 0;
    const int exponent = weight_exponent();
    const float weight_scale = Math::kLog2E * __int_as_float((127 - exponent) << 23);
    const int warp = block_thread() / 32, lane = threadIdx.x % 32;
    for (int i = warp; i < 2 * p.num_steps; i += block_threads() / 32) {
      const int step = i / 2, phase = i % 2, phases = p.step_phases[step];
      if (phases >> phase & 1) {
        pack_weights(step, phase, p.step_fragment[step] + Traits::kParts * (phase & phases), lane, weight_scale);
      }
    }
    for (int c = block_thread(); c < p.column_chunks * kColumns * 8; c += block_threads())
      shared.bias()[c] = bias_of(c);
    if (block_thread() == 0) {
      block.input_scale = __int_as_float((127 + exponent) << 23);
      block.subtrahend = to_accumulator(subtrahend);
    }
    __syncthreads();
  }

 private:
  // Such that the largest weight, times log2(e), is in [2^5, 2^6) after division by 2^exponent; 0 if that is no number.
  __device__ int weight_exponent() {
    constexpr int kLoads = 4;  // in flight
    float w[kLoads];
    const int stride = block_threads();
    const auto load = [&](int begin) {
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const int index = begin + i * stride;
        w[i] = index < p.weight_elements ? to_accumulator(__ldg(static_cast<const T*>(p.weight) + index)) : 0;
      }
    };
    load(block_thread());
    list_places();
    __syncthreads();
    int bits = 0;
    for (int begin = block_thread(); begin < p.weight_elements; begin += kLoads * stride) {
      if (begin != block_thread()) load(begin);
#pragma unroll
      for (int i = 0; i < kLoads; ++i) bits = max(bits, __float_as_int(fabsf(w[i] * Math::kLog2E)));
    }
    bits = __reduce_max_sync(kAllLanes, bits);
    if (threadIdx.x % 32 == 0) atomicMax(&block.largest_weight, bits);
    __syncthreads();
    bits = block.largest_weight;
    const int exponent = (bits >> 23) - 126 - kWeightExponent;
    return bits == 0 || bits >= 0x7f800000 ? 0 : max(-100, min(100, exponent));
  }

  // In the domain of log2; a channel that does not exist adds 2^-inf.
  __device__ float bias_of(int column) const {
    if (column >= p.out_channels) return -Math::infinity();
    return p.bias == nullptr ? 0 : to_accumulator(__ldg(static_cast<const T*>(p.bias) + column)) * Math::kLog2E;
  }

  __device__ void pack_weights(int step, int phase, int fragment, int lane, float scale) {
    const int row = lane % 4 * 2;  // of the inner dimension, in both granules
    const int cell = row / kBlock;
    for (int chunk = 0; chunk < p.column_chunks; ++chunk) {
      Fragment packed[Traits::kParts];
#pragma unroll
      for (int i = 0; i < 2 * kColumns; ++i) {
        const PackedGranule& granule = p.granule[step][i % 2];
        const int column = (chunk * kColumns + i / 2) * 8 + lane / 4;
        const int tap = granule.tap[phase][granule.pair ? cell : 0];
        float w[2], rest[2];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const int channel = granule.block * kBlock + row % kBlock + j;
          const bool exists = tap >= 0 && channel < p.in_channels && column < p.out_channels;
          const int index = (channel * p.out_channels + column) * p.kernel_positions + tap;
          w[j] = exists ? to_accumulator(__ldg(static_cast<const T*>(p.weight) + index)) * scale : 0;
          if constexpr (Traits::kSplit) {
            const float high = __half2float(__float2half_rn(w[j]));
            rest[j] = w[j] - high;
            w[j] = Traits::kRests ? high : granule.pair ? rest[j] : cell == 0 ? high : high * (1 / kSplitScale);
          }
          if (Traits::kPadBias && row + j == kBlock - 1 && p.step_phases[step] >> 2 != 0) {
            const float bias = bias_of(column), high = __half2float(__float2half_rn(bias));
            w[j] = i % 2 == 0 ? high : high == bias ? 0 : bias - high;
          }
        }
        packed[0].value[i] = pack(w[0], w[1]);
        if constexpr (Traits::kRests) packed[1].value[i] = pack(rest[0], rest[1]);
      }
#pragma unroll
      for (int part = 0; part < Traits::kParts; ++part) {
        shared.fragments()[(chunk * p.num_fragments + fragment + part) * 32 + lane] = packed[part];
      }
    }
  }
};

}  // namespace fastconvt::cuda::chain_mma
