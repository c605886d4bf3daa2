// The fused chain's operators on CUDA.
#include <torch/csrc/stable/library.h>

#include "gradient_tensor.h"
#include "launchers.h"

namespace fastconvt::cuda {
namespace {

constexpr const char* kChain = "conv_transpose3d_logsumexp_hardswish";

Tensor logsumexp_hardswish(const Tensor& input, const Tensor& weight, std::optional<Tensor> bias,
                           const Tensor& subtrahend, IntList stride, IntList padding, IntList output_padding,
                           int64_t groups, IntList dilation, double min, double max, bool allow_tf32) {
  const Scope scope(input);
  const Call call = make_call(kChain, 3, {input, weight, bias, subtrahend, {}}, stride, padding, output_padding, groups,
                              dilation, allow_tf32);
  const Layout layout = Layout::kContiguous;  // one channel: both layouts are the same memory
  if (call.problem.batch == 0) return finish_output(call, allocate_output(call, 1, layout), layout);
  const auto make = [&](const Candidate& candidate) {
    if (candidate.id == CandidateId::kAten) return aten_logsumexp_hardswish(call, subtrahend, min, max);
    const Tensor output = allocate_output(call, 1, layout);
    const auto launch = candidate.id == CandidateId::kFusedMma ? launch_chain_mma : launch_logsumexp_hardswish;
    check(launch(call.problem, call.input.const_data_ptr(), contiguous_weight(call).const_data_ptr(), bias_data(call),
                 subtrahend.const_data_ptr(), min, max, output.mutable_data_ptr(), scope.stream()),
          kChain);
    return output;
  };
  return finish_output(call, make(choose(Operation::kLogSumExpHardswish, call.problem, scope, make)), layout);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> logsumexp_hardswish_backward(
    const Tensor& grad_output, const Tensor& input, const Tensor& weight, std::optional<Tensor> bias,
    const Tensor& subtrahend, IntList stride, IntList padding, IntList output_padding, int64_t groups, IntList dilation,
    std::vector<bool> mask, double min, double max, bool allow_tf32) {
  const std::string name = std::string(kChain) + "_backward";
  const Scope scope(input);
  const Call call = make_call(name.c_str(), 3, {input, weight, bias, subtrahend, grad_output}, stride, padding,
                              output_padding, groups, dilation, /*allow_tf32=*/false);
  using Found = std::tuple<Tensor, Tensor, Tensor, Tensor>;
  const auto make_by_aten = [&]() -> Found {
    int64_t asked = 0;
    for (int i = 0; i < 4; ++i) asked |= int64_t{mask[i]} << i;
    const auto found = call_operator("fastconvt::_logsumexp_hardswish_aten_backward", "", grad_output, input, weight,
                                     bias, subtrahend, spatial_list(call, &Axis::stride),
                                     spatial_list(call, &Axis::padding), spatial_list(call, &Axis::output_padding),
                                     groups, spatial_list(call, &Axis::dilation), asked, min, max, allow_tf32);
    return {to_tensor(found[0]), to_tensor(found[1]), to_tensor(found[2]), to_tensor(found[3])};
  };
  if (call.problem.in_elements() == 0) return make_by_aten();
  const auto make = [&](const Candidate& candidate) -> Found {
    if (candidate.id == CandidateId::kAten) return make_by_aten();
    Gradient grad_input = mask[0] ? Gradient::of_input(call) : Gradient::none(input);
    Gradient grad_weight = mask[1] ? Gradient::of_weight(call) : Gradient::none(input);
    const Tensor grad_bias = empty(input, mask[2] ? call.problem.out_channels : 0);
    const Tensor grad_subtrahend = mask[3] ? torch::stable::new_empty(input, vec(subtrahend.sizes())) : empty(input, 0);
    const auto data = [](const Tensor& t) { return t.numel() > 0 ? t.mutable_data_ptr() : nullptr; };
    const bool mma = candidate.id == CandidateId::kFusedMma && fused_chain_backward_fits(call.problem);
    const auto workspace_bytes = mma ? fused_chain_backward_workspace : logsumexp_hardswish_backward_workspace;
    const auto launch = mma ? launch_fused_chain_backward : launch_logsumexp_hardswish_backward;
    const Tensor grad = to_layout(grad_output, Layout::kContiguous);
    const Tensor sums = workspace(input, workspace_bytes(call.problem));
    const Tensor contiguous = contiguous_weight(call);
    check(launch(call.problem, grad.const_data_ptr(), call.input.const_data_ptr(), contiguous.const_data_ptr(),
                 bias_data(call), subtrahend.const_data_ptr(), min, max, grad_input.data(), grad_weight.data(),
                 data(grad_bias), data(grad_subtrahend), sums.mutable_data_ptr(), scope.stream()),
          name.c_str());
    return {grad_input.finish(), grad_weight.finish(), grad_bias, grad_subtrahend};
  };
  return make(choose(Operation::kChainGradients, call.problem, scope, make));
}

}  // namespace
}  // namespace fastconvt::cuda

STABLE_TORCH_LIBRARY_IMPL(fastconvt, CUDA, m) {
  m.impl("conv_transpose3d_logsumexp_hardswish", TORCH_BOX(&fastconvt::cuda::logsumexp_hardswish));
  m.impl("conv_transpose3d_logsumexp_hardswish_backward", TORCH_BOX(&fastconvt::cuda::logsumexp_hardswish_backward));
}
