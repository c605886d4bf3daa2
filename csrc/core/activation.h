// The activations that a convolution can end with, as torch.nn.functional defines them. Plain C++17: no Torch, no CUDA.
#pragma once

#include <optional>
#include <string>

namespace fastconvt {

enum class Activation : int {
  kNone,
  kRelu,       // x > 0 ? x : 0, and NaN for NaN
  kLeakyRelu,  // x > 0 ? x : x * alpha
  kSilu,       // x / (1 + exp(-x))
  kGelu,       // x / 2 * (1 + erf(x / sqrt(2)))
  kGeluTanh,   // x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x^3)))
  kTanh,
  kSigmoid,   // 1 / (1 + exp(-x))
  kHardswish  // x * min(max(x + 3, 0), 6) / 6
};

// Whether it is linear on either side of 0, and not steeper below: what most CUDA kernels apply to what they store.
inline bool is_rectifier(Activation activation, double alpha) {
  if (activation == Activation::kLeakyRelu) return alpha <= 1 && alpha != 0 && alpha >= -1e30;
  return activation == Activation::kRelu;
}

// As an operator's argument names them, by their numbers; fastconvt/_shapes.py has the same list.
inline constexpr const char* kActivationNames[] = {"none",      "relu", "leaky_relu", "silu",     "gelu",
                                                   "gelu_tanh", "tanh", "sigmoid",    "hardswish"};

inline const char* activation_name(Activation activation) { return kActivationNames[static_cast<int>(activation)]; }

inline std::optional<Activation> find_activation(const std::string& name) {
  for (int i = 0; i < int(sizeof(kActivationNames) / sizeof(kActivationNames[0])); ++i) {
    if (name == kActivationNames[i]) return static_cast<Activation>(i);
  }
  return std::nullopt;
}

}  // namespace fastconvt
