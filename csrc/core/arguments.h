// The checks of an operator's arguments. fastconvt/_shapes.py makes the same ones, with the same texts in the same
// order, for fake tensors. Plain C++17: no Torch, no CUDA.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "problem.h"

namespace fastconvt {

struct TensorInfo {
  const char* name;  // of the argument
  std::vector<int64_t> sizes;
  std::string dtype;   // "float32"
  std::string device;  // "cuda:0"
};

struct Arguments {
  std::string op;                   // the operator's name, which begins every message
  int spatial;                      // its number of spatial axes, 1 to 3
  std::vector<TensorInfo> tensors;  // "input", "weight"; then "bias", "subtrahend", "grad_output" where they are given
  std::vector<int64_t> stride;      // each list has one element, or one for each spatial axis
  std::vector<int64_t> padding;
  std::vector<int64_t> output_padding;
  std::vector<int64_t> dilation;
  int64_t groups;
};

// The problem of a legal call, in contiguous layout; std::runtime_error with the reason for an illegal one.
Problem check_arguments(const Arguments& arguments);

}  // namespace fastconvt
