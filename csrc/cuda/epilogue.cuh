// Epilogues: from accumulators in registers to stored values, in one rounding.
#pragma once

#include "../core/activation.h"
#include "device/numeric.cuh"
#include "rectifier.h"

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

// value = rectify(accumulator + bias)
template <typename T>
struct RectifiedEpilogue : BiasEpilogue<T> {
  Rectifier rectify;
  __device__ T operator()(float accumulator, float term) const {
    return from_accumulator<T>(rectify(accumulator + term));
  }
};

// Of a kernel that has an instance for either: branches inside its store would part what the compiler issues together.
template <typename T, bool kRectify>
__device__ __forceinline__ auto make_epilogue(const void* bias, const Rectifier& rectify) {
  const BiasEpilogue<T> plain{static_cast<const T*>(bias)};
  if constexpr (kRectify) {
    return RectifiedEpilogue<T>{plain, rectify};
  } else {
    return plain;
  }
}

// An activation of values in registers; the kind is the same for all threads, so that no warp diverges.
template <typename Acc>
struct Activator {
  Activation kind;
  Acc alpha;

  template <int kCount>
  __device__ void operator()(Acc (&x)[kCount]) const {
    switch (kind) {
      case Activation::kNone:
        return;
      case Activation::kRelu:
        return map(x, [](Acc v) { return v < 0 ? Acc{0} : v; });
      case Activation::kLeakyRelu:
        return map(x, [this](Acc v) { return v > 0 ? v : v * alpha; });
      case Activation::kSilu:
        return map(x, [](Acc v) { return v / (1 + exp(-v)); });
      case Activation::kGelu:
        return map(x, [](Acc v) { return Acc(0.5) * v * (1 + erf(v * Acc(0.7071067811865476))); });
      case Activation::kGeluTanh:
        return map(x, [](Acc v) {
          const Acc inner = Acc(0.7978845608028654) * (v + Acc(0.044715) * v * v * v);
          return Acc(0.5) * v * (1 + tanh(inner));
        });
      case Activation::kTanh:
        return map(x, [](Acc v) { return tanh(v); });
      case Activation::kSigmoid:
        return map(x, [](Acc v) { return 1 / (1 + exp(-v)); });
      case Activation::kHardswish:
        return map(x, [](Acc v) {
          Acc gate = v + 3;
          gate = gate < 0 ? Acc{0} : gate > 6 ? Acc{6} : gate;
          return v * (gate / 6);
        });
    }
  }

 private:
  template <int kCount, typename Function>
  __device__ static void map(Acc (&x)[kCount], const Function& function) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] = function(x[i]);
  }
};

}  // namespace fastconvt::cuda
