// Run-time values to compile-time types, over closed lists.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

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

}  // namespace fastconvt::cuda
