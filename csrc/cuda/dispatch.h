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

// The same for kernels that do not know float64.
template <typename Function>
cudaError_t dispatch_up_to_float32(DType dtype, Function&& function) {
  return dispatch_dtype(dtype, [&](auto tag) {
    if constexpr (sizeof(typename decltype(tag)::type) == 8) {
      return cudaErrorNotSupported;
    } else {
      return function(tag);
    }
  });
}

// The same for kernels of 16 bits.
template <typename Function>
cudaError_t dispatch_16_bits(DType dtype, Function&& function) {
  return dispatch_dtype(dtype, [&](auto tag) {
    if constexpr (sizeof(typename decltype(tag)::type) != 2) {
      return cudaErrorNotSupported;
    } else {
      return function(tag);
    }
  });
}

// The same for kernels on matrix units: function(TypeTag<T>{}, split), where `split`, known at compile time, tells
// whether float32 takes three products.
template <typename Function>
cudaError_t dispatch_products(DType dtype, bool split, Function&& function) {
  return dispatch_up_to_float32(dtype, [&](auto tag) {
    if constexpr (sizeof(typename decltype(tag)::type) == 4) {
      if (split) return function(tag, std::true_type{});
    }
    return function(tag, std::false_type{});
  });
}

// The same: function(TypeTag<T>{}, precision), a std::integral_constant of an enum with kFloat32, kTf32 and k16Bits.
template <typename Precision, typename Function>
cudaError_t dispatch_precision(const Problem& problem, Function&& function) {
  return dispatch_up_to_float32(problem.dtype, [&](auto tag) {
    if constexpr (sizeof(typename decltype(tag)::type) == 2) {
      return function(tag, std::integral_constant<Precision, Precision::k16Bits>{});
    } else {
      return problem.allow_tf32 ? function(tag, std::integral_constant<Precision, Precision::kTf32>{})
                                : function(tag, std::integral_constant<Precision, Precision::kFloat32>{});
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
