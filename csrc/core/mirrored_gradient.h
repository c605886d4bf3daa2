// The input's gradient of a transposed convolution of stride 1 is a transposed convolution of the output's gradient,
// with the kernel turned round and padding for what it reaches: forward kernels compute it. Plain C++17: no Torch, no
// CUDA; csrc/cuda/mirrored_input_gradient.cu launches what this plans.
#pragma once

#include <string>

#include "flat_gemm.h"
#include "phase_tf32.h"
#include "phase_tma.h"

namespace fastconvt {

// The forward problem whose output is the input's gradient.
inline Problem mirrored_problem(const Problem& p) {
  Problem mirrored = p;
  std::swap(mirrored.in_channels, mirrored.out_channels);
  mirrored.weight_layout = Layout::kContiguous;
  mirrored.has_bias = false;
  for (int a = 0; a < 3; ++a) {
    const Axis& axis = p.axis[a];
    mirrored.axis[a].in = axis.out();
    mirrored.axis[a].padding = axis.dilation * (axis.kernel - 1) - axis.padding;
  }
  return mirrored;
}

// The forward kernels that are to compute it.
enum class MirroredFamily { kPhaseTma, kPhaseTf32, kFlatGemm };
inline MirroredFamily mirrored_family(const Problem& mirrored) {
  if (mirrored.element_size() == 2) return MirroredFamily::kPhaseTma;
  if (!mirrored.allow_tf32 || !phase_tf32_refusal(mirrored).empty()) return MirroredFamily::kFlatGemm;
  return flat_gemm_refusal(mirrored).empty() && flat_gemm_cost_ms(mirrored) < phase_tf32_cost_ms(mirrored)
             ? MirroredFamily::kFlatGemm
             : MirroredFamily::kPhaseTf32;
}

inline std::string mirrored_gradient_refusal(const Problem& p) {
  for (const Axis& axis : p.axis) {
    if (axis.stride != 1) return "a stride of more than 1";
    if (axis.output_padding != 0) return "output padding";
    if (axis.padding > axis.dilation * (axis.kernel - 1)) return "more padding than the kernel reaches";
    if (axis.out() < 1) return "an empty problem";
  }
  if (p.weight_elements() >= int64_t{1} << 31) return "a weight of 2^31 or more elements";
  const Problem mirrored = mirrored_problem(p);
  switch (mirrored_family(mirrored)) {
    case MirroredFamily::kPhaseTma:
      return phase_tma_refusal(mirrored);
    case MirroredFamily::kPhaseTf32:
      return "";
    default:
      return flat_gemm_refusal(mirrored);
  }
}

// Milliseconds on an H200.
inline double mirrored_gradient_cost_ms(const Problem& p) {
  const Problem mirrored = mirrored_problem(p);
  const double turn = 0.003 + 2 * double(p.element_size() * p.weight_elements()) / 1e9;
  switch (mirrored_family(mirrored)) {
    case MirroredFamily::kPhaseTma:
      return turn + phase_tma_cost_ms(mirrored);
    case MirroredFamily::kPhaseTf32:
      return turn + phase_tf32_cost_ms(mirrored);
    default:
      return turn + flat_gemm_cost_ms(mirrored);
  }
}

}  // namespace fastconvt
