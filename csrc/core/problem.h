// A transposed convolution and its phase arithmetic. Plain C++17: no Torch, no CUDA.
//
// Per axis, with input size I, kernel k, stride s, padding p, dilation d, output padding op:
//
//   O      = (I - 1) * s - 2 * p + d * (k - 1) + op + 1
//   out[o] = bias + sum over taps t with (o + p - t * d) % s == 0 of in[(o + p - t * d) / s] * w[t]
//
// Write o + p = s * q + r with 0 <= r < s: r is the phase of o and q its base. The taps of a phase are every
// (s / gcd(s, d))-th one, and each reads the input at q + offset(r, t). No phase arithmetic stands anywhere else.
#pragma once

#include <array>
#include <cstdint>
#include <numeric>
#include <optional>
#include <type_traits>
#include <utility>

#include "activation.h"

namespace fastconvt {

// Of integers that are not negative.
template <typename A, typename B>
constexpr auto ceil_div(A a, B b) {
  return (a + b - 1) / b;
}
template <typename A, typename B>
constexpr auto round_up(A a, B b) {
  return ceil_div(a, b) * b;
}

enum class DType : int { kFloat32, kFloat64, kFloat16, kBFloat16 };
enum class Layout : int { kContiguous, kChannelsLast };

// One spatial axis. Sizes are in elements; every method takes in-range arguments.
struct Axis {
  int64_t in = 1;
  int64_t kernel = 1;
  int64_t stride = 1;
  int64_t padding = 0;
  int64_t output_padding = 0;
  int64_t dilation = 1;

  // One element, that stays as it is.
  bool is_trivial() const { return in == 1 && kernel == 1 && stride == 1 && padding == 0 && output_padding == 0; }

  int64_t out() const { return (in - 1) * stride - 2 * padding + dilation * (kernel - 1) + output_padding + 1; }

  // The phase r and the base q of output o.
  int64_t phase(int64_t o) const { return (o + padding) % stride; }
  int64_t base(int64_t o) const { return (o + padding) / stride; }

  // Taps of a phase: first_tap(r), first_tap(r) + tap_step(), ... below `kernel`; first_tap(r) == kernel if there are
  // none.
  int64_t tap_step() const { return stride / std::gcd(stride, dilation); }
  int64_t first_tap(int64_t r) const {
    for (int64_t t = 0; t < tap_step() && t < kernel; ++t) {
      if ((r - t * dilation) % stride == 0) return t;
    }
    return kernel;
  }
  int64_t num_taps(int64_t r) const { return (kernel - first_tap(r) + tap_step() - 1) / tap_step(); }

  // Tap t of phase r reads the input at base + offset(r, t); the division is exact.
  int64_t offset(int64_t r, int64_t t) const { return (r - t * dilation) / stride; }

  // Outputs of a phase: first_output(r), then every stride-th one.
  int64_t first_output(int64_t r) const {
    const int64_t o = (r - padding) % stride;
    return o < 0 ? o + stride : o;
  }
  int64_t num_outputs(int64_t r) const {
    const int64_t first = first_output(r);
    return first < out() ? (out() - first + stride - 1) / stride : 0;
  }

  bool operator==(const Axis& other) const {
    return in == other.in && kernel == other.kernel && stride == other.stride && padding == other.padding &&
           output_padding == other.output_padding && dilation == other.dilation;
  }

  // Pairs (i, t) whose output i * stride - padding + t * dilation is in range: the useful multiplications along this
  // axis.
  int64_t num_pairs() const {
    int64_t pairs = 0;
    for (int64_t t = 0; t < kernel; ++t) {
      const int64_t shift = padding - t * dilation;  // in range: 0 <= i * stride - shift < out
      const int64_t first = shift <= 0 ? 0 : (shift + stride - 1) / stride;
      const int64_t end = out() + shift <= 0 ? 0 : (out() + shift + stride - 1) / stride;
      pairs += end > first ? (end < in ? end : in) - (first < in ? first : in) : 0;
    }
    return pairs;
  }
};

// One call. Always three spatial axes, depth, height, width: a 1D or 2D call has leading axes of size 1.
// Tensors are dense in `layout`: input (batch, in_channels, D, H, W), output (batch, out_channels, D', H', W');
// the weight, (in_channels, out_channels / groups, kd, kh, kw), is dense in `weight_layout` for the candidates that
// take both and contiguous for all others; the bias, (out_channels), is contiguous.
struct Problem {
  DType dtype = DType::kFloat32;
  Layout layout = Layout::kContiguous;
  Layout weight_layout = Layout::kContiguous;
  int64_t batch = 1;
  int64_t in_channels = 1;
  int64_t out_channels = 1;
  int64_t groups = 1;
  std::array<Axis, 3> axis;
  bool has_bias = false;
  bool allow_tf32 = false;
  Activation activation = Activation::kNone;  // of the output
  double alpha = 0;                           // leaky_relu's slope below 0, else 0

  int64_t in_channels_per_group() const { return in_channels / groups; }
  int64_t out_channels_per_group() const { return out_channels / groups; }
  int64_t in_positions() const { return axis[0].in * axis[1].in * axis[2].in; }
  int64_t out_positions() const { return axis[0].out() * axis[1].out() * axis[2].out(); }
  int64_t kernel_positions() const { return axis[0].kernel * axis[1].kernel * axis[2].kernel; }
  int64_t in_elements() const { return batch * in_channels * in_positions(); }
  int64_t out_elements() const { return batch * out_channels * out_positions(); }
  int64_t weight_elements() const { return in_channels * out_channels_per_group() * kernel_positions(); }
  int64_t element_size() const { return dtype == DType::kFloat64 ? 8 : dtype == DType::kFloat32 ? 4 : 2; }

  bool operator==(const Problem& other) const {
    return dtype == other.dtype && layout == other.layout && weight_layout == other.weight_layout &&
           batch == other.batch && in_channels == other.in_channels && out_channels == other.out_channels &&
           groups == other.groups && axis == other.axis && has_bias == other.has_bias &&
           allow_tf32 == other.allow_tf32 && activation == other.activation && alpha == other.alpha;
  }

  // Useful multiply-adds, and the fewest bytes that must move: input, weight and output once.
  double macs() const {
    return double(batch) * double(in_channels) * double(out_channels_per_group()) * double(axis[0].num_pairs()) *
           double(axis[1].num_pairs()) * double(axis[2].num_pairs());
  }
  double bytes() const { return double(element_size()) * double(in_elements() + out_elements() + weight_elements()); }
};

// What kFunction, a pure one, returns; a thread keeps some results, since a plan and its launch ask several times and
// the layers of a network take turns. A reference is good until fifteen other problems have been asked for.
template <auto kFunction>
const auto& last_result(const Problem& problem) {
  using Result = std::decay_t<decltype(kFunction(problem))>;
  static thread_local std::array<std::optional<std::pair<Problem, Result>>, 16> kept;
  static thread_local size_t next = 0;
  for (const auto& one : kept) {
    if (one && one->first == problem) return one->second;
  }
  Result made = kFunction(problem);  // which may ask for the results of other functions
  auto& slot = kept[next++ % kept.size()];
  slot.emplace(problem, std::move(made));
  return slot->second;
}

}  // namespace fastconvt
