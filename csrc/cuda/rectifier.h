// The activations that kernels apply to sums in registers: those that are linear on either side of 0.
#pragma once

#include <limits>
#include <type_traits>

#include "../core/problem.h"

namespace fastconvt::cuda {

// max(y, y * slope) of y = max(x, floor), in three instructions; NaN stays. The switch is the same for all threads.
struct Rectifier {
  bool on = false;
  float slope = 1;  // at most 1
  float floor = -std::numeric_limits<float>::infinity();

#ifdef __CUDACC__
  __device__ __forceinline__ float operator()(float x) const {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    float y;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(x), "f"(floor));
#else
    const float y = x < floor ? floor : x;
#endif
    return fmaxf(y, y * slope);
  }
  // An array of any rank, behind one branch.
  template <typename Row, int kRows>
  __device__ __forceinline__ void operator()(Row (&x)[kRows]) const {
    if (on) apply(x);
  }
  // Whether a stored value tells that its sum was finite: 0 may have been -infinity.
  __device__ __forceinline__ bool shows_finite(float stored) const {
    return fabsf(stored) < __int_as_float(0x7f800000) && !(on && stored == 0);
  }

 private:
  template <typename Row, int kRows>
  __device__ __forceinline__ void apply(Row (&x)[kRows]) const {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if constexpr (std::is_array_v<Row>) {
        apply(x[i]);
      } else {
        x[i] = (*this)(x[i]);
      }
    }
  }
#endif
};

// For what is_rectifier() (core/activation.h) names.
inline Rectifier rectifier(const Problem& problem) {
  switch (problem.activation) {
    case Activation::kRelu:
      return {true, 1, 0};
    case Activation::kLeakyRelu:
      return {true, static_cast<float>(problem.alpha), -std::numeric_limits<float>::infinity()};
    default:
      return {};
  }
}

// Calls a function with std::true_type or std::false_type.
template <class Function>
auto dispatch_rectifier(const Rectifier& rectify, Function&& function) {
  return rectify.on ? function(std::true_type{}) : function(std::false_type{});
}

}  // namespace fastconvt::cuda
