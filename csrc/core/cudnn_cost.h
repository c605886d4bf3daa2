// What cuDNN's kernels, behind PyTorch's own operators, take on an H200: the costs of the plan's candidate "aten".
// Plain C++17: no Torch, no CUDA.
#pragma once

#include <algorithm>

#include "plan.h"

namespace fastconvt {

// Whether a vector of 16 bytes holds whole channels, as cuDNN's kernels on matrix units want.
inline bool cudnn_has_vectors(const Problem& p) {
  return (p.in_channels_per_group() * p.element_size()) % 16 == 0 &&
         (p.out_channels_per_group() * p.element_size()) % 16 == 0;
}

// The forward, fitted to some 90 layers: mostly within a factor of 1.5. Its products run in tiles of channels, idle or
// not.
struct CudnnRate {
  double start, products, inputs, outputs;  // the last three times what the GPU could do
};

inline double cudnn_cost(const Problem& p, double operations, int64_t tile, CudnnRate contiguous,
                         CudnnRate channels_last) {
  const int64_t in = p.in_channels_per_group(), out = p.out_channels_per_group();
  const bool dilated = p.axis[0].dilation > 1 || p.axis[1].dilation > 1 || p.axis[2].dilation > 1;
  // Its kernels for channels_last know neither dilation nor channels that are no whole vectors.
  const bool direct = p.layout == Layout::kChannelsLast && !dilated && cudnn_has_vectors(p);
  const CudnnRate& rate = direct ? channels_last : contiguous;
  const int64_t strides = p.axis[0].stride * p.axis[1].stride * p.axis[2].stride;
  const bool volume = !p.axis[0].is_trivial() && strides == 1;
  const double slow = (p.groups > 1 && tile == 32 ? 1.7 : 1) * (volume ? 1.7 : 1);
  if (p.groups > 1) tile = 32;
  const double filled = double(in * out) / double(round_up(in, tile) * round_up(out, out <= 4 && tile < 32 ? 2 : tile));
  const double bytes = double(p.element_size() * p.groups * p.batch);
  const double inputs = ms(bytes * double(in) * double(p.in_positions()), 4.3e12);
  const double outputs = ms(bytes * double(round_up(out, 16)) * double(p.out_positions()), 4.3e12);
  const double products = rate.products * slow * ms(2 * p.macs() / filled, operations);
  // Without strides in channels_last, by 64 output channels at a time or, better, by 128.
  if (direct && tile == 32 && p.groups == 1 && !volume && strides == 1) {
    const double padded = double(round_up(out, int64_t{64})) / double(out);
    const double times = (p.element_size() == 2 ? 1.1 : 1.25) * (out % 128 == 0 ? 1 : 1.35);
    return rate.start + times * padded * ms(2 * p.macs(), operations) + 0.3 * (inputs + outputs);
  }
  return rate.start + (dilated ? 1.5 : 1) * (products + rate.inputs * inputs + rate.outputs * outputs);
}

inline double cudnn_cost(const Problem& p) {
  if (p.element_size() == 2) return cudnn_cost(p, 780e12, 32, {0.032, 1.55, 5.6, 7}, {0.016, 1.17, 3.6, 3.8});
  const double exact = cudnn_cost(p, 55e12, 16, {0.026, 1.5, 4, 5.5}, {0.035, 1.6, 2, 8.5});
  if (!p.allow_tf32) return exact;
  return std::min(exact, cudnn_cost(p, 407e12, 32, {0.034, 2, 0.6, 5.7}, {0.016, 1.8, 1.6, 2.3}));
}

// All gradients together, fitted to the same layers by precision and layout: within 30 % for nine layers of ten where
// channels are whole vectors, for four of five elsewhere.
struct CudnnGradientRate {
  double start, products, inputs, outputs, weights;  // all but the first times what the GPU could do
  double volume;       // how much longer products take for eight taps an output and more along three axes
  double grouped = 0;  // how much longer in groups
};

struct CudnnGradientRates {
  int64_t in_tile, out_tile;  // channels, idle or not
  double few;                 // how much longer products take for fewer than 64 input channels
  CudnnGradientRate contiguous, channels_last;
};

// `vectors`: where cudnn_has_vectors(), without groups.
inline const CudnnGradientRates& cudnn_gradient_rates(const Problem& p, bool vectors) {
  constexpr int kKinds = 2;
  static constexpr CudnnGradientRates kHalf[kKinds] = {
      {64, 16, 1, {0.086, 4.5, 8.9, 6.7, 0, 0.73}, {0.069, 4.9, 0, 2.2, 0, 0.67}},
      {64, 16, 1.4, {0.038, 1.3, 14, 8.3, 23, 2.3}, {0.025, 1.6, 6.4, 0.45, 6.1, 1.2}}};
  static constexpr CudnnGradientRates kTf32[kKinds] = {
      {64, 16, 1, {0.16, 1.9, 3.6, 6.5, 0, 0.9, 1.4}, {0.066, 1.9, 4, 14, 0, 1, 1.2}},
      {128, 8, 1, {0.048, 2.6, 6.8, 5.6, 13, 0.52}, {0.031, 2.8, 4.1, 5.4, 5.4, 0.34}}};
  static constexpr CudnnGradientRates kFloat32[kKinds] = {
      {16, 1, 1, {0.042, 4.6, 0.8, 8.4, 0, 1.5, 0.5}, {0.054, 5.2, 0.26, 14, 0, 1.3, 0.4}},
      {16, 16, 1, {0.068, 3.2, 0.73, 0.63, 30, 1}, {0.054, 3.3, 0, 7, 27, 1.3}}};
  return (p.element_size() == 2 ? kHalf : p.allow_tf32 ? kTf32 : kFloat32)[vectors ? 1 : 0];
}

// Of one channel a group: PyTorch's own kernels.
inline double aten_depthwise_gradients_cost(const Problem& p) {
  const bool last = p.layout == Layout::kChannelsLast, half = p.element_size() == 2;
  return 0.02 + ms(p.macs(), last ? (half ? 90e9 : 62e9) : (half ? 270e9 : 180e9));
}

inline double cudnn_gradients_cost(const Problem& p) {
  const int64_t in = p.in_channels_per_group(), out = p.out_channels_per_group();
  if (in == 1 && out == 1) return aten_depthwise_gradients_cost(p);
  const bool vectors = cudnn_has_vectors(p) && p.groups == 1, last = p.layout == Layout::kChannelsLast;
  const CudnnGradientRates& rates = cudnn_gradient_rates(p, vectors);
  const CudnnGradientRate& rate = last ? rates.channels_last : rates.contiguous;
  const double size = double(p.element_size());
  const double idle = double(round_up(in, rates.in_tile) * round_up(out, rates.out_tile)) / double(in * out) *
                      (in < 64 ? rates.few : 1);
  const int64_t strides = p.axis[0].stride * p.axis[1].stride * p.axis[2].stride;
  const double taps = std::min(8.0, double(p.kernel_positions()) / double(strides));
  const double slow =
      (p.axis[0].is_trivial() ? 1 : 1 + rate.volume * (taps - 1) / 7) * (p.groups > 1 ? 1 + rate.grouped : 1);
  const double operations = p.element_size() == 2 ? 780e12 : p.allow_tf32 ? 407e12 : 55e12;
  // In channels_last it has faster kernels for as many taps along all axes.
  bool even = true;
  for (int i = 0; i < 2; ++i) even = even && (p.axis[i].is_trivial() || p.axis[i].kernel == p.axis[2].kernel);
  const double uneven = last && vectors && size == 2 && !even ? 1.2 : 1;
  const double rest = uneven * rate.products * slow * idle * ms(2 * p.macs(), operations) +
                      ms(size * (rate.inputs * double(p.in_elements()) + rate.outputs * double(p.out_elements()) +
                                 rate.weights * double(p.weight_elements())),
                         4.3e12);
  // The smallest layers, without a bias, begin faster.
  const double less = last && vectors && size == 2 && !p.has_bias ? 0.0075 * std::max(0.0, 1 - rest / 0.05) : 0;
  return rate.start - less + rest;
}

// The bias's, a sum of its own over the output's gradient: few columns of channels in channels_last.
inline double aten_bias_gradient_cost(const Problem& p) {
  const double rows = double(p.batch) * double(p.out_positions());
  const bool last = p.layout == Layout::kChannelsLast;
  return (last ? 0.06 : 0.03) * rows / (rows + 3e4) +
         (last ? 0.5 : 0.9) * ms(double(p.element_size() * p.out_elements()), 4.3e12);
}

// One of its gradients; the bias's belongs to the weight's.
inline double cudnn_gradient_cost(const Problem& p, bool of_weight) {
  if (!of_weight) return 0.45 * cudnn_gradients_cost(p);
  return 0.55 * cudnn_gradients_cost(p) + (p.has_bias ? aten_bias_gradient_cost(p) : 0);
}

}  // namespace fastconvt
