// What every kernel sees of a Problem: plain data that is passed by value, and the phase arithmetic of
// csrc/core/problem.h in closed form, without loops, for device code.
#pragma once

#include <cstdint>
#include <numeric>

#include "../core/problem.h"

#ifdef __CUDACC__
#define FASTCONVT_HOST_DEVICE __host__ __device__ inline
#else
#define FASTCONVT_HOST_DEVICE inline
#endif

namespace fastconvt::cuda {

// One spatial axis. Lengths are 64-bit, so that one axis may exceed 2^31; everything else fits 31 bits.
struct AxisParams {
  int64_t in;
  int64_t out;
  int kernel;
  int stride;
  int padding;
  int dilation;
  int gcd;                // of stride and dilation: a phase has taps only if gcd divides it
  int stride_quotient;    // stride / gcd
  int dilation_quotient;  // dilation / gcd
  int inverse;            // of dilation / gcd modulo stride / gcd

  // Taps of phase r: first_tap(r), then every tap_step()-th one below `kernel`; first_tap(r) >= kernel if there are
  // none.
  FASTCONVT_HOST_DEVICE int tap_step() const { return stride_quotient; }
  FASTCONVT_HOST_DEVICE int first_tap(int r) const {
    if (r % gcd != 0) return kernel;
    if (stride < (1 << 15)) return r / gcd * inverse % tap_step();
    return static_cast<int>(static_cast<int64_t>(r / gcd) * inverse % tap_step());
  }
  FASTCONVT_HOST_DEVICE int num_taps(int r) const {
    const int first = first_tap(r);
    return first < kernel ? (kernel - 1 - first) / tap_step() + 1 : 0;
  }

  // Tap t of phase r reads the input at base + offset(r, t); the next tap of the phase reads offset_step() before it.
  FASTCONVT_HOST_DEVICE int offset(int r, int t) const { return (r - t * dilation) / stride; }
  FASTCONVT_HOST_DEVICE int offset_step() const { return dilation_quotient; }

  // Bases of all outputs: first_base() .. first_base() + num_bases() - 1.
  FASTCONVT_HOST_DEVICE int64_t first_base() const { return padding / stride; }
  FASTCONVT_HOST_DEVICE int64_t num_bases() const { return (out - 1 + padding) / stride - padding / stride + 1; }
};

constexpr int64_t kMaxAttribute = int64_t{1} << 29;

inline bool fits(const Axis& axis) {
  return axis.kernel < kMaxAttribute && axis.stride < kMaxAttribute && axis.padding < kMaxAttribute &&
         axis.dilation < kMaxAttribute && (axis.kernel - 1) * axis.dilation < kMaxAttribute;
}

// Requires fits(axis).
inline AxisParams axis_params(const Axis& axis) {
  AxisParams p{};
  p.in = axis.in;
  p.out = axis.out();
  p.kernel = static_cast<int>(axis.kernel);
  p.stride = static_cast<int>(axis.stride);
  p.padding = static_cast<int>(axis.padding);
  p.dilation = static_cast<int>(axis.dilation);
  p.gcd = std::gcd(p.stride, p.dilation);
  p.stride_quotient = p.stride / p.gcd;
  p.dilation_quotient = p.dilation / p.gcd;
  // Extended Euclid: dilation / gcd * inverse == 1 modulo stride / gcd.
  int64_t a = p.dilation_quotient, b = p.stride_quotient, u = 1, v = 0;
  const int64_t modulus = b;
  while (b != 0) {
    const int64_t quotient = a / b, rest = a % b, next = u - quotient * v;
    a = b, b = rest, u = v, v = next;
  }
  p.inverse = static_cast<int>((u % modulus + modulus) % modulus);
  return p;
}

// Strides, in elements, of a dense (batch, channels, D, H, W) tensor.
struct Strides {
  int64_t batch;
  int64_t channel;
  int64_t axis[3];
};

inline Strides dense_strides(Layout layout, int64_t channels, int64_t depth, int64_t height, int64_t width) {
  const int64_t inner = layout == Layout::kChannelsLast ? channels : 1;
  const int64_t positions = depth * height * width;
  return {channels * positions,
          layout == Layout::kChannelsLast ? 1 : positions,
          {height * width * inner, width * inner, inner}};
}

inline Strides input_strides(const Problem& problem) {
  return dense_strides(problem.layout, problem.in_channels, problem.axis[0].in, problem.axis[1].in, problem.axis[2].in);
}

inline Strides output_strides(const Problem& problem) {
  return dense_strides(problem.layout, problem.out_channels, problem.axis[0].out(), problem.axis[1].out(),
                       problem.axis[2].out());
}

// Axes and strides of kernels that march along the height (depthwise, direct); rows and planes fit 31 bits.
template <class Params>
void set_march_tensors(const Problem& problem, Params& p) {
  for (int a = 0; a < 3; ++a) p.axis[a] = axis_params(problem.axis[a]);
  const Strides in = input_strides(problem), out = output_strides(problem);
  p.input_batch = in.batch, p.input_channel = in.channel;
  p.output_batch = out.batch, p.output_channel = out.channel;
  p.input_plane = static_cast<int>(in.axis[0]), p.output_plane = static_cast<int>(out.axis[0]);
  p.input_row = static_cast<int>(in.axis[1]), p.output_row = static_cast<int>(out.axis[1]);
  p.input_inner = static_cast<int>(in.axis[2]), p.output_inner = static_cast<int>(out.axis[2]);
}

}  // namespace fastconvt::cuda
