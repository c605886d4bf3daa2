// Both gradients of a layer by matrix products, which share what is packed. Plain C++17: no Torch, no CUDA;
// csrc/cuda/gemm_gradients.* compute what this plans.
//
// Copies read channels innermost. Contiguous tensors are turned, with the weight; or, in 16 bits, unrolled: a row for
// each input position, of all the outputs that it meets, (output channel, tap). Both gradients then are products with
// that matrix, the weight is read and its gradient written as they lie. Few channels, innermost already, are merged
// with the taps of a last axis whose kernel is its stride: these are neighbours in memory, of the weight as well.
#pragma once

#include "gemm_weight_gradient.h"
#include "gradient_gemm.h"

namespace fastconvt {

enum class GemmGradientsForm { kTurned, kUnrolled, kMerged };

struct GemmGradientsPlan {
  GemmGradientsForm form;
  Problem products;  // as the products see the layer
  GradientGemmTile input;
  GemmWeightTile weight;
  double cost_ms;  // of everything
  bool together;   // both products at the same time, each on some multiprocessors
  // Of the weight's gradient from padded planes, which the input's reads as well; without a shape: by `weight`.
  GradientGemmTile windows{};
  bool halved = false;  // partial sums of the weight's gradient are in two places

  bool by_windows() const { return windows.shape >= 0; }
};

constexpr int kUnrollMaxTaps = 128, kUnrollMaxKernel = 32;

// Positions in a row, without a kernel.
inline Problem unrolled_problem(const Problem& p) {
  Problem q = p;
  q.out_channels = p.out_channels * p.kernel_positions();
  q.axis[0] = q.axis[1] = {1, 1, 1, 0, 0, 1};
  q.axis[2] = {p.in_positions(), 1, 1, 0, 0, 1};
  q.weight_layout = Layout::kChannelsLast;  // the same as contiguous
  q.has_bias = false;
  return q;
}

// Whether the matrix is no larger than what would be packed otherwise.
inline bool gemm_gradients_may_unroll(const Problem& p) {
  if (p.element_size() != 2 || p.layout != Layout::kContiguous || p.weight_layout != Layout::kContiguous) return false;
  if (p.has_bias && !gemm_weight_counts(p)) return false;
  const int64_t taps = p.kernel_positions(), columns = p.out_channels * taps;
  if (taps > kUnrollMaxTaps || p.out_channels_per_group() * taps % 8 != 0 || columns >= (1 << 20)) return false;
  for (const Axis& a : p.axis) {
    if (a.kernel > kUnrollMaxKernel) return false;
  }
  const double matrix = double(p.batch) * double(p.in_positions()) * double(columns);
  return matrix <= double(p.out_elements() + p.weight_elements()) && matrix < double(1 << 30);
}

inline Problem merged_problem(const Problem& p) {
  Problem q = p;
  Axis& last = q.axis[2];
  q.out_channels = p.out_channels * last.kernel;
  last.kernel = last.stride = 1;
  return q;
}

inline bool gemm_gradients_may_merge(const Problem& p) {
  const Axis& last = p.axis[2];
  return p.layout == Layout::kChannelsLast && p.weight_layout == Layout::kChannelsLast && p.groups == 1 &&
         last.kernel > 1 && last.kernel == last.stride && last.dilation == 1 && last.padding == 0 &&
         last.output_padding == 0 && p.out_channels * p.element_size() < 128 && gradient_gemm_reads(p, p.layout);
}

constexpr double kGradientGemmClocksMs = 1.7e6;

// Milliseconds before anything is multiplied, and between products; packing has its own.
inline double gemm_gradients_begin_ms(const Problem& p) { return p.layout == Layout::kChannelsLast ? 0.006 : 0; }

// Milliseconds of the input's gradient, and of the weight's. Sums for the bias slow the latter down.
inline double gemm_gradients_input_ms(const Problem& products, const GradientGemmTile& t) {
  const double outputs = gemm_weight_outputs(products);
  const double memory = double(products.element_size()) * (outputs + double(products.in_elements()));
  const double rate = outputs < double(products.out_elements()) ? 2.6e9 : 3.6e9;
  return std::max(t.cycles / kGradientGemmClocksMs, memory / rate);
}
inline double gemm_gradients_weight_ms(const Problem& products, const GemmWeightTile& t) {
  const bool sums_bias = gemm_weight_sums_bias(products, t);
  const double bias = sums_bias ? 0.05 + 0.2 / t.in_blocks : 0;
  const double begin = sums_bias && gemm_weight_finishes(products, t) ? 0.0035 : 0;  // of the pass that adds its parts
  return begin + t.clocks / kGemmWeightClocksMs * (1 + bias);
}
inline double gemm_gradients_weight_ms(const GemmGradientsPlan& plan) {
  if (plan.by_windows()) return plan.windows.cycles / kGradientGemmClocksMs;
  return gemm_gradients_weight_ms(plan.products, plan.weight);
}
inline double gemm_gradients_in_turn(const GemmGradientsPlan& plan) {
  return gemm_gradients_input_ms(plan.products, plan.input) + gemm_gradients_weight_ms(plan);
}

// Few blocks: both at the same time, each on some multiprocessors, if that is faster.
inline void gemm_gradients_share(GemmGradientsPlan& plan) {
  constexpr double kSmall = 0.065;  // milliseconds
  constexpr double kBegin = 0.003;
  if (plan.products.has_bias) return;  // its sums stand where the input's gradient will be
  const double in_turn = gemm_gradients_in_turn(plan);
  if (in_turn > kSmall || plan.products.element_size() != 2) return;  // TF32 is packed in two forms, in turn
  constexpr std::array<int64_t, 3> kShares{36, 66, 96};
  const auto weights = gemm_weight_tiles<3>(plan.products, kShares, gemm_weight_room(plan.products));
  double least = in_turn + 0.004;  // of what is between them
  for (size_t i = 0; i < kShares.size(); ++i) {
    if (weights[i].shape < 0 || !gemm_weight_finishes(plan.products, weights[i])) continue;
    const GradientGemmTile input = gradient_gemm_tile_of(plan.products, 132 - weights[i].kinds * weights[i].splits);
    if (input.shape < 0) continue;
    const double both = kBegin + std::max(gemm_gradients_input_ms(plan.products, input),
                                          gemm_gradients_weight_ms(plan.products, weights[i]));
    if (both < least) least = both, plan.input = input, plan.weight = weights[i], plan.together = true;
    if (plan.together) plan.halved = false;
  }
  if (plan.together) plan.cost_ms += least - in_turn;
}

// Both gradients from padded planes, where that is faster: nothing else is packed.
inline void gemm_gradients_take_windows(GemmGradientsPlan& plan) {
  const Problem& p = plan.products;
  GemmGradientsPlan other = plan;
  other.input = last_result<gradient_gemm_tile>(p), other.together = other.halved = false;
  if (!other.input.windows) return;
  other.windows = gradient_gemm_weight_tile(p);
  if (!other.by_windows()) return;
  const double element = double(p.element_size());
  const double bytes = double(gradient_gemm_planes_bytes(p)) + element * double(p.out_elements());
  other.cost_ms = gemm_gradients_in_turn(other) + bytes / 2.8e9 + 0.0035;
  if (other.cost_ms < plan.cost_ms) plan = other;
}

inline GemmGradientsPlan gemm_gradients_as(const Problem& p, GemmGradientsForm form) {
  const bool unrolled = form == GemmGradientsForm::kUnrolled, turned = form == GemmGradientsForm::kTurned;
  GemmGradientsPlan plan{form, unrolled ? unrolled_problem(p) : turned ? p : merged_problem(p), {}, {}, 0, false};
  const Problem& q = plan.products;
  plan.input = turned ? last_result<gradient_gemm_tile>(p) : gradient_gemm_tile(q);
  plan.weight = turned ? last_result<gemm_weight_tile>(p) : gemm_weight_tile(q);
  if (turned && plan.weight.shape >= 0) {
    const GemmWeightTile halved = gemm_weight_halved_tile(p);
    plan.halved =
        halved.shape >= 0 && gemm_gradients_weight_ms(p, halved) < 0.96 * gemm_gradients_weight_ms(p, plan.weight);
    if (plan.halved) plan.weight = halved;
  }
  const double element = double(p.element_size());
  double packing = 0;
  if (unrolled) {
    const bool pairs = p.axis[2].kernel % 2 + p.axis[2].stride % 2 + p.axis[2].padding % 2 + p.axis[2].out() % 2 == 0;
    packing = double(q.out_elements()) * (pairs ? 1.3e-9 : 2e-9) + double(p.out_elements()) * 0.5e-9;
  } else {
    double bytes = 0;
    if (!gradient_gemm_reads(p, p.layout)) bytes += 2 * element * double(p.out_elements());
    bytes += (plan.input.windows ? 2 : 3) * double(gradient_gemm_own_bytes(q, plan.input));
    packing = bytes / 2.8e9;
  }
  plan.cost_ms = gemm_gradients_in_turn(plan) + packing + (unrolled ? 0.011 : packing > 0 ? 0.0035 : 0);
  if (plan.input.shape >= 0 && plan.weight.shape >= 0) {
    gemm_gradients_share(plan);
    if (turned) gemm_gradients_take_windows(plan);
  }
  return plan;
}

// Requires that neither product is refused.
inline GemmGradientsPlan gemm_gradients_plan(const Problem& p) {
  const GemmGradientsPlan turned = gemm_gradients_as(p, GemmGradientsForm::kTurned);
  const bool unrolls = gemm_gradients_may_unroll(p);
  if (!unrolls && !gemm_gradients_may_merge(p)) return turned;
  const GemmGradientsPlan other =
      gemm_gradients_as(p, unrolls ? GemmGradientsForm::kUnrolled : GemmGradientsForm::kMerged);
  const bool fits = other.input.shape >= 0 && other.weight.shape >= 0;
  const double better = unrolls ? 1 : 1.05;  // wide rows are copied faster
  return fits && other.cost_ms < better * turned.cost_ms ? other : turned;
}

// Milliseconds on an H200 of one gradient where both are wanted: a part of what both take, if these make both and share
// what is packed (16 bits).
inline double gemm_gradients_input_cost_ms(const Problem& p) {
  if (p.element_size() == 4 || !gemm_weight_gradient_refusal(p).empty()) return gradient_gemm_cost_ms(p);
  const GemmGradientsPlan& plan = last_result<gemm_gradients_plan>(p);
  const double input = gemm_gradients_input_ms(plan.products, plan.input), all = gemm_gradients_in_turn(plan);
  return (plan.cost_ms + gemm_gradients_begin_ms(p)) * input / all;
}
inline double gemm_gradients_weight_cost_ms(const Problem& p) {
  if (p.element_size() == 4 || !gradient_gemm_refusal(p).empty()) return gemm_weight_gradient_cost_ms(p);
  const GemmGradientsPlan& plan = last_result<gemm_gradients_plan>(p);
  const double weight = gemm_gradients_weight_ms(plan), all = gemm_gradients_in_turn(plan);
  const bool sums_bias = plan.form == GemmGradientsForm::kUnrolled || plan.by_windows() ||
                         gemm_weight_sums_bias(plan.products, plan.weight);
  const double bias = p.has_bias && !sums_bias ? 0.012 + double(p.element_size() * p.out_elements()) / 3e9 : 0;
  return (plan.cost_ms + gemm_gradients_begin_ms(p)) * weight / all + bias;
}

}  // namespace fastconvt
