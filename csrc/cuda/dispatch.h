// Run-time values to compile-time types, over closed lists.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <type_traits>

#include "../core/problem.h"

namespace fastconvt::cuda {

template <typename T>
struct TypeTag {
  using type = T;
};

// Calls function(TypeTag<T>{}) with the element type of `dtype`.
template <typename Function>
auto dispatch_dtype(DType dtype, Function&& function) {
  switch (dtype) {
    case DType::kFloat64:
      return function(TypeTag<double>{});
    case DType::kFloat16:
      return function(TypeTag<__half>{});
    case DType::kBFloat16:
      return function(TypeTag<__nv_bfloat16>{});
    default:
      return function(TypeTag<float>{});
  }
}

// The same for kernels on matrix units: function(TypeTag<T>{}, split), where `split`, known at compile time, tells
// whether float32 takes three products. float64 is not supported.
template <typename Function>
cudaError_t dispatch_products(DType dtype, bool split, Function&& function) {
  return dispatch_dtype(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if constexpr (sizeof(T) == 8) {
      return cudaErrorNotSupported;
    } else {
      if constexpr (sizeof(T) == 4) {
        if (split) return function(tag, std::true_type{});
      }
      return function(tag, std::false_type{});
    }
  });
}

// Calls function(shape) with the shape of the list, known at compile time, that is the axis' kernel, stride and
// dilation.
template <const auto& kShapes, int kShape = 0, typename Function>
cudaError_t dispatch_axis(const Axis& axis, Function&& function) {
  if constexpr (kShape == sizeof(kShapes) / sizeof(kShapes[0])) {
    return cudaErrorNotSupported;
  } else {
    constexpr auto kOf = kShapes[kShape];
    if (axis.kernel == kOf.kernel && axis.stride == kOf.stride && axis.dilation == kOf.dilation) {
      return function(std::integral_constant<int, kShape>{});
    }
    return dispatch_axis<kShapes, kShape + 1>(axis, function);
  }
}

}  // namespace fastconvt::cuda
