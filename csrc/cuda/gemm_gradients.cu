// Both gradients by matrix products, and the bias's. What has to be packed is packed first; then come the weight's
// gradient and, as its blocks leave room, the input's: partial sums of the one may stand where the other will be.
#include "gemm_gradients.h"

#include <algorithm>

#include "launchers.h"

namespace fastconvt::cuda {
namespace {

struct AllGradients {
  const Problem& problem;
  const GemmGradientsPlan& plan;
  const void *grad_output, *input, *weight;
  void *grad_input, *grad_weight, *grad_bias;
  char* workspace;

  bool unrolled() const { return plan.form == GemmGradientsForm::kUnrolled; }
};

// The workspace: the packed weight or padded planes, packed input and gradient of the output, partial sums that are not
// where the input's gradient will be (or half of them, `far`), and the unrolled bias's. TF32 is packed in two forms,
// one after the other at the same place.
struct Workspace {
  int64_t own = 0, input = 0, grad = 0, packed = 0, sums = 0, far = 0, bias = 0;
  bool two_forms = false, lends = false;  // lends: the input's gradient has room for sums

  explicit Workspace(const AllGradients& a) {
    const Problem& p = a.plan.products;
    two_forms = p.element_size() == 4;
    own = round_up(gradient_gemm_own_bytes(p, a.plan.input, a.weight), int64_t{1024});
    if (a.plan.by_windows()) {
      packed = own;
      return;
    }
    input = round_up(gemm_weight_input_bytes(p, a.plan.weight, a.input), int64_t{1024});
    grad = a.unrolled() ? gemm_unrolled_bytes(a.problem) : gradient_gemm_packed_bytes(p, a.grad_output);
    packed = two_forms ? std::max(own + grad, input + gemm_weight_grad_bytes(p, a.grad_output)) : own + input + grad;
    packed = round_up(packed, int64_t{1024});
    sums = gemm_weight_sums_bytes(p, a.plan.weight);
    if (a.plan.halved) far = gemm_weight_far_sums_bytes(p, a.plan.weight);
    lends = !a.plan.together && sums - far <= a.problem.in_elements() * a.problem.element_size();
    bias = a.unrolled() && a.problem.has_bias ? gemm_unrolled_bias_bytes(a.problem) : 0;
  }
  int64_t bytes() const { return packed + (lends ? far : sums) + bias; }
};

struct Places {
  char *own, *input, *grad;  // packed; null: read as it lies. `own`: the weight, or padded planes
  void *sums, *far_sums;
  float* bias;

  Places(const AllGradients& a, const Workspace& of) {
    char* const base = a.workspace;
    own = of.own > 0 ? base : nullptr;
    input = of.input > 0 ? base + of.own : nullptr;
    grad = of.grad > 0 ? base + of.own + (of.two_forms ? 0 : of.input) : nullptr;
    sums = of.lends ? a.grad_input : base + of.packed;
    far_sums = of.lends && of.far > 0 ? base + of.packed : nullptr;
    bias = reinterpret_cast<float*>(base + of.packed + (of.lends ? of.far : of.sums));
  }
};

cudaError_t pack(const AllGradients& a, const Places& at, bool with_input, cudaStream_t stream) {
  if (a.unrolled()) {
    return launch_gemm_unroll(a.problem, a.grad_output, at.grad, a.grad_bias != nullptr ? at.bias : nullptr, a.weight,
                              at.own, a.input, at.input, stream);
  }
  return launch_gradient_gemm_pack(a.plan.products, a.plan.input, a.grad_output, at.grad, a.weight, at.own, a.input,
                                   with_input ? at.input : nullptr, stream);
}

const void* or_itself(const void* packed, const void* tensor) { return packed != nullptr ? packed : tensor; }

cudaError_t make_input(const AllGradients& a, const Places& at, GradientGemmOrder order, cudaStream_t stream) {
  return launch_packed_gemm_input_gradient(a.problem, a.plan.products, a.plan.input, a.grad_output,
                                           or_itself(at.grad, a.grad_output), a.weight, or_itself(at.own, a.weight),
                                           a.grad_input, order, stream);
}

cudaError_t make_weight(const AllGradients& a, const Places& at, GemmWeightPhase phase, cudaStream_t stream) {
  if (a.plan.by_windows()) {
    return launch_window_weight_gradient(a.problem, a.plan.windows, a.grad_output, at.own, a.input, a.grad_weight,
                                         a.grad_bias, stream);
  }
  const bool unrolled = a.unrolled();
  const cudaError_t error = launch_packed_gemm_weight_gradient(
      a.problem, a.plan, a.grad_output, or_itself(at.grad, a.grad_output), a.input, a.grad_weight,
      unrolled ? nullptr : a.grad_bias, {at.sums, at.input, nullptr, at.far_sums}, phase, stream);
  if (error != cudaSuccess || !unrolled || a.grad_bias == nullptr || phase == GemmWeightPhase::kSums) return error;
  return launch_gemm_unrolled_bias(a.problem, a.grad_output, at.bias, a.grad_bias, stream);
}

// One after the other, since each packs in its form.
cudaError_t launch_two_forms(const AllGradients& a, const Workspace& of, const Places& at, cudaStream_t stream) {
  const GemmWeightPlaces places{at.sums, a.workspace, a.workspace + of.input};
  cudaError_t error =
      launch_packed_gemm_weight_gradient(a.problem, a.plan, a.grad_output, nullptr, a.input, a.grad_weight, a.grad_bias,
                                         places, GemmWeightPhase::kAll, stream);
  if (error == cudaSuccess) error = pack(a, at, false, stream);
  return error == cudaSuccess ? make_input(a, at, {}, stream) : error;
}

cudaError_t launch(const AllGradients& a, cudaStream_t stream) {
  const Workspace of(a);
  const Places at(a, of);
  if (of.two_forms) return launch_two_forms(a, of, at, stream);
  cudaError_t error = pack(a, at, true, stream);
  if (error != cudaSuccess) return error;
  // Blocks that wait for sums would keep those of the input's gradient from the multiprocessors that are left to them.
  const bool together = a.plan.together;
  error = make_weight(a, at, together ? GemmWeightPhase::kSums : GemmWeightPhase::kAll, stream);
  if (error == cudaSuccess) error = make_input(a, at, {true, of.lends && of.sums > 0}, stream);
  return error == cudaSuccess && together ? make_weight(a, at, GemmWeightPhase::kRest, stream) : error;
}

bool is_refused(const Problem& problem) {
  return !gradient_gemm_refusal(problem).empty() || !gemm_weight_gradient_refusal(problem).empty();
}
bool is_aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

}  // namespace

int64_t gemm_gradients_workspace(const Problem& problem, const void* grad_output, const void* input,
                                 const void* weight) {
  if (is_refused(problem)) return 0;
  const GemmGradientsPlan& plan = last_result<gemm_gradients_plan>(problem);
  return Workspace({problem, plan, grad_output, input, weight, nullptr, nullptr, nullptr, nullptr}).bytes();
}
int64_t gemm_gradients_workspace(const Problem& problem) {
  const void* const unaligned = reinterpret_cast<const void*>(1);
  return gemm_gradients_workspace(problem, unaligned, unaligned, unaligned);
}

cudaError_t launch_gemm_gradients(const Problem& problem, const void* grad_output, const void* input,
                                  const void* weight, void* grad_input, void* grad_weight, void* grad_bias,
                                  void* workspace, cudaStream_t stream) {
  if (is_refused(problem)) return cudaErrorNotSupported;
  if (!is_aligned(grad_input) || (grad_bias != nullptr && !problem.has_bias)) return cudaErrorNotSupported;
  const GemmGradientsPlan& plan = last_result<gemm_gradients_plan>(problem);
  if ((plan.input.windows && !is_aligned(weight)) || (plan.by_windows() && !is_aligned(input))) {
    return cudaErrorNotSupported;
  }
  return launch(
      {problem, plan, grad_output, input, weight, grad_input, grad_weight, grad_bias, static_cast<char*>(workspace)},
      stream);
}

}  // namespace fastconvt::cuda
