// Epilogues: from accumulators in registers to stored values, in one rounding.
#pragma once

#include "device/numeric.cuh"

namespace fastconvt::cuda {

// value = accumulator + bias
template <typename T>
struct BiasEpilogue {
  using Acc = accumulator_t<T>;
  const T* bias;  // (out_channels), or null

  // What the channel adds to each of its accumulators: load once, use for all.
  __device__ Acc channel_term(int64_t channel) const {
    return bias != nullptr ? to_accumulator(__ldg(bias + channel)) : Acc{0};
  }
  __device__ T operator()(Acc accumulator, Acc term) const { return from_accumulator<T>(accumulator + term); }
};

}  // namespace fastconvt::cuda
