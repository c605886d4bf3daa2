// The backward operators of plain convolutions on CUDA.
#include <torch/csrc/stable/library.h>

#include <array>

#include "gradient_tensor.h"
#include "launchers.h"

namespace fastconvt::cuda {
namespace {

// The kernels of a candidate for a gradient of the input and of the weight; and what makes all gradients and shares
// work, null if there is nothing, which may refuse tensors for their alignment. It makes both, or `any`.
using GradientWorkspace = int64_t (*)(const Problem&, const void* grad_output, const void* input, const void* weight);
struct GradientKernels {
  CandidateId id;
  decltype(&launch_dense_input_gradient) input;
  GradientWorkspace input_workspace;  // null: none
  decltype(&launch_dense_weight_gradient) weight;
  GradientWorkspace weight_workspace;  // null: none
  decltype(&launch_depthwise_gradients) all = nullptr;
  GradientWorkspace workspace_of_all = nullptr;
  bool as_one = false;  // whether that pass costs hardly more than one of them
  bool any = false;     // whether it makes any of them
  // That of the weight before another family's of the input, in whose memory a part of the workspace stands.
  decltype(&launch_gemm_weight_gradient_beside) weight_beside = nullptr;
  GradientWorkspace workspace_beside = nullptr;
};

// A launcher of the input's gradient that needs no workspace.
template <cudaError_t (*kLaunch)(const Problem&, const void*, const void*, void*, cudaStream_t)>
cudaError_t launch_without(const Problem& problem, const void* grad_output, const void* weight, void* grad_input,
                           void* /*workspace*/, cudaStream_t stream) {
  return kLaunch(problem, grad_output, weight, grad_input, stream);
}

template <int64_t (*kWorkspace)(const Problem&)>
int64_t of_problem(const Problem& problem, const void*, const void*, const void*) {
  return kWorkspace(problem);
}

constexpr GradientKernels kGradients[] = {
    {CandidateId::kRows, launch_without<launch_rows_input_gradient>, nullptr, launch_rows_weight_gradient,
     of_problem<rows_weight_gradient_workspace>},
    {CandidateId::kDepthwise, launch_without<launch_depthwise_input_gradient>, nullptr,
     launch_depthwise_weight_gradient, of_problem<depthwise_weight_gradient_workspace>},
    {CandidateId::kDepthwiseGradients, launch_without<launch_depthwise_input_gradient>, nullptr,
     launch_depthwise_weight_gradient, of_problem<depthwise_weight_gradient_workspace>, launch_depthwise_gradients,
     of_problem<depthwise_gradients_workspace>, /*as_one=*/true, /*any=*/true},
    {CandidateId::kHeads, launch_without<launch_heads_input_gradient>, nullptr, launch_heads_weight_gradient,
     of_problem<heads_weight_gradient_workspace>},
    {CandidateId::kDirect, launch_without<launch_direct_input_gradient>, nullptr, launch_direct_weight_gradient,
     of_problem<direct_weight_gradient_workspace>},
    {CandidateId::kDenseGradients, launch_dense_input_gradient, of_problem<dense_input_gradient_workspace>,
     launch_dense_weight_gradient, of_problem<dense_weight_gradient_workspace>},
    {CandidateId::kMirrored, launch_mirrored_input_gradient, mirrored_input_gradient_workspace, nullptr, nullptr},
    {CandidateId::kGradientGemm, launch_gemm_input_gradient, gemm_input_gradient_workspace, launch_gemm_weight_gradient,
     gemm_weight_gradient_workspace, launch_gemm_gradients, gemm_gradients_workspace, /*as_one=*/false, /*any=*/false,
     launch_gemm_weight_gradient_beside, gemm_weight_gradient_beside_workspace},
    {CandidateId::kPairsGradients, launch_pairs_input_gradient, pairs_input_gradient_workspace,
     launch_pairs_weight_gradient, pairs_weight_gradient_workspace, launch_pairs_gradients, pairs_gradients_workspace,
     /*as_one=*/false, /*any=*/false, launch_pairs_weight_gradient_beside, pairs_weight_gradient_beside_workspace},
    {CandidateId::kPairsTf32, launch_pairs_tf32_input_gradient, pairs_tf32_input_gradient_workspace,
     launch_pairs_tf32_weight_gradient, pairs_tf32_weight_gradient_workspace, launch_pairs_tf32_gradients,
     of_problem<pairs_tf32_gradients_workspace>, /*as_one=*/true},
    {CandidateId::kBoxesTf32, launch_boxes_tf32_input_gradient, boxes_tf32_input_gradient_workspace,
     launch_boxes_tf32_weight_gradient, boxes_tf32_weight_gradient_workspace, launch_boxes_tf32_gradients,
     of_problem<boxes_tf32_gradients_workspace>, /*as_one=*/true},
    {CandidateId::kFewPositions, launch_without<launch_few_input_gradient>, nullptr, launch_few_weight_gradient,
     nullptr},
};

// Those of a candidate; null: ATen's.
const GradientKernels* gradient_kernels(const Candidate& candidate) {
  for (const GradientKernels& kernels : kGradients) {
    if (kernels.id == candidate.id) return &kernels;
  }
  return nullptr;
}

using Gradients = std::array<Tensor, 3>;  // of input, weight and bias; those that were not asked for are empty
constexpr int64_t kInputBit = 1, kWeightBit = 2, kBiasBit = 4;

// A backward call; the gradients named by bits are made by one of the functions.
class Backward {
 public:
  Backward(const char* name, const Scope& scope, const Call& call, const Tensor& grad_output)
      : name_(name), scope_(scope), call_(call), grad_output_(grad_output) {}

  // Those of the input and the weight by kernels that may be null, in one pass where they are the same and there is
  // one. The weight's comes first, since its workspace may stand where the input's will be.
  Gradients make(const GradientKernels* of_input, const GradientKernels* of_weight, bool of_bias) {
    if (!dense_) {
      const Tensor batched = call_.batched ? grad_output_ : torch::stable::unsqueeze(grad_output_, 0);
      dense_ = to_layout(batched, call_.problem.layout);
    }
    Gradient input = of_input ? Gradient::of_input(call_) : Gradient::none(call_.input);
    Gradient weight = of_weight ? Gradient::of_weight(call_, weight_layout(of_weight->id, call_.problem))
                                : Gradient::none(call_.input);
    const Tensor bias = empty(call_.input, of_bias ? call_.problem.out_channels : 0);
    const GradientKernels* const all = of_input ? of_input : of_weight;
    const bool together = !of_input || !of_weight || of_input == of_weight;
    if (!together || !launch_all(*all, input, weight, bias)) {
      if (of_weight) launch_weight(*of_weight, weight, bias, input);
      if (of_input) launch_input(*of_input, input);
    }
    return {input.finish(), weight.finish(), bias};
  }

  Gradients make_by_aten(const Tensor& input, int64_t bits) const {
    const auto found = call_operator("fastconvt::_conv_transpose_aten_backward", "", grad_output_, input, call_.weight,
                                     spatial_list(call_, &Axis::stride), spatial_list(call_, &Axis::padding),
                                     spatial_list(call_, &Axis::output_padding), call_.problem.groups,
                                     spatial_list(call_, &Axis::dilation), bits, call_.problem.allow_tf32);
    return {to_tensor(found[0]), to_tensor(found[1]), to_tensor(found[2])};
  }

 private:
  static void* data(const Tensor& t) { return t.numel() > 0 ? t.mutable_data_ptr() : nullptr; }

  // Whether it could.
  bool launch_all(const GradientKernels& kernels, const Gradient& input, const Gradient& weight,
                  const Tensor& bias) const {
    const bool both = input.data() != nullptr && weight.data() != nullptr;
    if (!kernels.all || !(both || kernels.any)) return false;
    const Tensor as_read = weight_of(call_, kernels.id);
    const void *grad = dense_->const_data_ptr(), *x = call_.input.const_data_ptr(), *w = as_read.const_data_ptr();
    const Tensor sums = workspace(call_.input, kernels.workspace_of_all(call_.problem, grad, x, w));
    const cudaError_t error = kernels.all(call_.problem, grad, x, w, input.data(), weight.data(), data(bias),
                                          sums.mutable_data_ptr(), scope_.stream());
    if (error != cudaErrorNotSupported) check(error, name_);
    return error == cudaSuccess;
  }

  void launch_input(const GradientKernels& kernels, const Gradient& gradient) const {
    const Tensor as_read = weight_of(call_, kernels.id);
    const void *grad = dense_->const_data_ptr(), *w = as_read.const_data_ptr();
    std::optional<Tensor> packed;
    if (kernels.input_workspace) {
      packed = workspace(call_.input, kernels.input_workspace(call_.problem, grad, nullptr, w));
    }
    check(kernels.input(call_.problem, grad, w, gradient.data(), packed ? packed->mutable_data_ptr() : nullptr,
                        scope_.stream()),
          name_);
  }

  void launch_weight(const GradientKernels& kernels, const Gradient& gradient, const Tensor& bias,
                     const Gradient& input) const {
    const void *grad = dense_->const_data_ptr(), *x = call_.input.const_data_ptr();
    const int64_t bytes = kernels.weight_workspace ? kernels.weight_workspace(call_.problem, grad, x, nullptr) : 0;
    const bool fits = bytes <= call_.problem.in_elements() * call_.problem.element_size();
    if (input.data() != nullptr && !fits && kernels.weight_beside) {
      const Tensor rest = workspace(call_.input, kernels.workspace_beside(call_.problem, grad, x, nullptr));
      return check(kernels.weight_beside(call_.problem, grad, x, input.data(), gradient.data(), data(bias),
                                         rest.mutable_data_ptr(), scope_.stream()),
                   name_);
    }
    std::optional<Tensor> sums;
    if (input.data() == nullptr || !fits) sums = workspace(call_.input, bytes);
    check(kernels.weight(call_.problem, grad, x, gradient.data(), data(bias),
                         sums ? sums->mutable_data_ptr() : input.data(), scope_.stream()),
          name_);
  }

  const char* name_;
  const Scope& scope_;
  const Call& call_;
  const Tensor& grad_output_;
  std::optional<Tensor> dense_;  // grad_output as our kernels read it
};

template <int kSpatial>
std::tuple<Tensor, Tensor, Tensor> conv_transpose_backward(const Tensor& grad_output, const Tensor& input,
                                                           const Tensor& weight, IntList stride, IntList padding,
                                                           IntList output_padding, int64_t groups, IntList dilation,
                                                           std::vector<bool> mask, bool allow_tf32) {
  const std::string name = std::string(plain_name(kSpatial)) + "_backward";
  const Scope scope(input);
  Call call = make_call(name.c_str(), kSpatial, {input, weight, {}, {}, grad_output}, stride, padding, output_padding,
                        groups, dilation, allow_tf32);
  call.problem.has_bias = mask[2];
  Backward backward(name.c_str(), scope, call, grad_output);
  Gradients gradients{empty(input, 0), empty(input, 0), empty(input, 0)};
  int64_t missing = (mask[0] ? kInputBit : 0) | (mask[1] ? kWeightBit : 0) | (mask[2] ? kBiasBit : 0);
  const auto take = [&](const Gradients& made, int64_t bits) {
    for (int i = 0; i < 3; ++i) {
      if (bits >> i & 1) gradients[i] = made[i];
    }
    missing &= ~bits;
  };
  const int64_t of_input = missing & kInputBit, of_weight = mask[1] ? missing & ~kInputBit : 0;
  const bool both = of_input && of_weight;
  const auto planned = [&](Operation operation, int64_t bits) -> const GradientKernels* {
    if (bits == 0 || call.problem.in_elements() == 0) return nullptr;
    const auto in_one_pass = [&](const Candidate& candidate) {
      const GradientKernels* const kernels = gradient_kernels(candidate);
      return both && kernels && kernels->as_one;
    };
    return gradient_kernels(choose(
        operation, call.problem, scope,
        [&](const Candidate& candidate) {
          const GradientKernels* const kernels = gradient_kernels(candidate);
          const int64_t made = in_one_pass(candidate) ? of_input | of_weight : bits;
          if (!kernels) return backward.make_by_aten(input, made);
          return backward.make(made & kInputBit ? kernels : nullptr, made & kWeightBit ? kernels : nullptr,
                               made & kBiasBit);
        },
        [&](const Candidate& candidate) { return in_one_pass(candidate) ? 0.5 : 1.0; }));
  };
  const GradientKernels* const by_input = planned(Operation::kInputGradient, of_input);
  const GradientKernels* const by_weight = planned(Operation::kWeightGradient, of_weight);
  // As PyTorch does, the input's first: what cuDNN needs for it is the peak, often.
  if (of_input && !by_input && by_weight) take(backward.make_by_aten(input, of_input), of_input);
  if (by_input || by_weight) {
    const int64_t bits = (by_input ? of_input : 0) | (by_weight ? of_weight : 0);
    take(backward.make(by_input, by_weight, bits & kBiasBit), bits);
  }
  if (missing != 0) take(backward.make_by_aten(input, missing), missing);
  return {gradients[0], gradients[1], gradients[2]};
}

}  // namespace
}  // namespace fastconvt::cuda

STABLE_TORCH_LIBRARY_IMPL(fastconvt, CUDA, m) {
  m.impl("conv_transpose1d_backward", TORCH_BOX(&fastconvt::cuda::conv_transpose_backward<1>));
  m.impl("conv_transpose2d_backward", TORCH_BOX(&fastconvt::cuda::conv_transpose_backward<2>));
  m.impl("conv_transpose3d_backward", TORCH_BOX(&fastconvt::cuda::conv_transpose_backward<3>));
}
