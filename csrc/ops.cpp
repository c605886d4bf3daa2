// Every operator of the library: its table of contents. Argument names, order and defaults are those of
// torch.nn.functional.conv_transpose{1,2,3}d; what is ours is keyword-only.
#include <torch/csrc/stable/library.h>

namespace {

bool deterministic_by_default() { return false; }

}  // namespace

STABLE_TORCH_LIBRARY(fastconvt, m) {
  m.def(
      "conv_transpose1d(Tensor input, Tensor weight, Tensor? bias=None, SymInt[1] stride=1, SymInt[1] padding=0, "
      "SymInt[1] output_padding=0, SymInt groups=1, SymInt[1] dilation=1, *, bool allow_tf32=False) -> Tensor");
  m.def(
      "conv_transpose2d(Tensor input, Tensor weight, Tensor? bias=None, SymInt[2] stride=1, SymInt[2] padding=0, "
      "SymInt[2] output_padding=0, SymInt groups=1, SymInt[2] dilation=1, *, bool allow_tf32=False) -> Tensor");
  m.def(
      "conv_transpose3d(Tensor input, Tensor weight, Tensor? bias=None, SymInt[3] stride=1, SymInt[3] padding=0, "
      "SymInt[3] output_padding=0, SymInt groups=1, SymInt[3] dilation=1, *, bool allow_tf32=False) -> Tensor");

  // The same and an activation of the result, one of core/activation.h's; alpha is leaky_relu's slope below 0. Where
  // gradients are wanted, fastconvt/_autograd.py composes them of the operators above and below, and of ATen's.
  m.def(
      "conv_transpose1d_act(Tensor input, Tensor weight, Tensor? bias=None, SymInt[1] stride=1, SymInt[1] padding=0, "
      "SymInt[1] output_padding=0, SymInt groups=1, SymInt[1] dilation=1, *, str activation, float alpha=0.01, "
      "bool allow_tf32=False) -> Tensor");
  m.def(
      "conv_transpose2d_act(Tensor input, Tensor weight, Tensor? bias=None, SymInt[2] stride=1, SymInt[2] padding=0, "
      "SymInt[2] output_padding=0, SymInt groups=1, SymInt[2] dilation=1, *, str activation, float alpha=0.01, "
      "bool allow_tf32=False) -> Tensor");
  m.def(
      "conv_transpose3d_act(Tensor input, Tensor weight, Tensor? bias=None, SymInt[3] stride=1, SymInt[3] padding=0, "
      "SymInt[3] output_padding=0, SymInt groups=1, SymInt[3] dilation=1, *, str activation, float alpha=0.01, "
      "bool allow_tf32=False) -> Tensor");

  // The gradients of conv_transpose{1,2,3}d with respect to input, weight and bias; what output_mask does not ask is an
  // empty tensor.
  m.def(
      "conv_transpose1d_backward(Tensor grad_output, Tensor input, Tensor weight, SymInt[1] stride, SymInt[1] padding, "
      "SymInt[1] output_padding, SymInt groups, SymInt[1] dilation, bool[3] output_mask, *, bool allow_tf32=False) "
      "-> (Tensor, Tensor, Tensor)");
  m.def(
      "conv_transpose2d_backward(Tensor grad_output, Tensor input, Tensor weight, SymInt[2] stride, SymInt[2] padding, "
      "SymInt[2] output_padding, SymInt groups, SymInt[2] dilation, bool[3] output_mask, *, bool allow_tf32=False) "
      "-> (Tensor, Tensor, Tensor)");
  m.def(
      "conv_transpose3d_backward(Tensor grad_output, Tensor input, Tensor weight, SymInt[3] stride, SymInt[3] padding, "
      "SymInt[3] output_padding, SymInt groups, SymInt[3] dilation, bool[3] output_mask, *, bool allow_tf32=False) "
      "-> (Tensor, Tensor, Tensor)");

  // clamp(h(logsumexp(conv_transpose3d(input), dim=1, keepdim=True)) - subtrahend, min, max), h(v) = v*sigmoid(v+3)/6;
  // its gradients are those of input, weight, bias and subtrahend.
  m.def(
      "conv_transpose3d_logsumexp_hardswish(Tensor input, Tensor weight, Tensor? bias, Tensor subtrahend, "
      "SymInt[3] stride=1, SymInt[3] padding=0, SymInt[3] output_padding=0, SymInt groups=1, SymInt[3] dilation=1, *, "
      "float min=-1.0, float max=1.0, bool allow_tf32=False) -> Tensor");
  m.def(
      "conv_transpose3d_logsumexp_hardswish_backward(Tensor grad_output, Tensor input, Tensor weight, Tensor? bias, "
      "Tensor subtrahend, SymInt[3] stride, SymInt[3] padding, SymInt[3] output_padding, SymInt groups, "
      "SymInt[3] dilation, bool[4] output_mask, *, float min=-1.0, float max=1.0, bool allow_tf32=False) "
      "-> (Tensor, Tensor, Tensor, Tensor)");

  // What the backward operators of a GPU hand over to ATen, in Python: the plain one's gradients that no kernel of ours
  // makes (bits 0, 1, 2 of the mask, as in output_mask; the others are empty), and the chain's, all of them (bits 0 to
  // 3).
  m.def(
      "_conv_transpose_aten_backward(Tensor grad_output, Tensor input, Tensor weight, SymInt[] stride, "
      "SymInt[] padding, SymInt[] output_padding, SymInt groups, SymInt[] dilation, int mask, bool allow_tf32) "
      "-> (Tensor, Tensor, Tensor)");
  m.def(
      "_logsumexp_hardswish_aten_backward(Tensor grad_output, Tensor input, Tensor weight, Tensor? bias, "
      "Tensor subtrahend, SymInt[] stride, SymInt[] padding, SymInt[] output_padding, SymInt groups, "
      "SymInt[] dilation, int mask, float min, float max, bool allow_tf32) -> (Tensor, Tensor, Tensor, Tensor)");

  // Whether PyTorch asks for deterministic algorithms: what ATen is told where a forward is handed over to it. Python
  // knows; a program without Python gets PyTorch's default, since explicit kernels come before implicit ones.
  m.def("_deterministic() -> bool");

  // For each device's library: what the plan would choose and why, as JSON; and the candidate that every following call
  // must use ("" for the plan's own choice), which returns the one before.
  m.def(
      "_plan_cpu(str op, SymInt[] input, SymInt[] weight, bool bias, SymInt[] stride, SymInt[] padding, "
      "SymInt[] output_padding, SymInt groups, SymInt[] dilation, str dtype, str layout, bool allow_tf32, "
      "str activation='none') -> str");
  m.def(
      "_plan_cuda(str op, SymInt[] input, SymInt[] weight, bool bias, SymInt[] stride, SymInt[] padding, "
      "SymInt[] output_padding, SymInt groups, SymInt[] dilation, str dtype, str layout, bool allow_tf32, "
      "str activation='none') -> str");
  m.def("_force_cpu(str candidate) -> str");
  m.def("_force_cuda(str candidate) -> str");

  // The folder where new measurements of fastconvt.autotune go, "" for no measuring, which returns the one before.
  m.def("_autotune_cuda(str folder) -> str");
}

STABLE_TORCH_LIBRARY_IMPL(fastconvt, CompositeImplicitAutograd, m) {
  m.impl("_deterministic", TORCH_BOX(&deterministic_by_default));
}
