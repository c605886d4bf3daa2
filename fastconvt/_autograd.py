"""Derivatives: kernels of our own for the Autograd dispatch key, lighter than ``torch.library.register_autograd``'s.

They also work under ``torch.func`` transforms of reverse mode, and refuse forward mode, which would lose the tangent.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

Formula = Callable[..., tuple]


def call(op: Any, tensors: Sequence[Tensor | None], *rest: Any, **keywords: Any) -> Any:
    """``op(*tensors, *rest, **keywords)``, past its kernel for derivatives where there is nothing to differentiate.

    That kernel is in Python: without it a call takes half as long.
    """
    if torch.compiler.is_compiling() or _may_be_differentiated(tensors):
        return op(*tensors, *rest, **keywords)
    with torch._C._AutoDispatchBelowAutograd():
        return op(*tensors, *rest, **keywords)


def _may_be_differentiated(tensors: Sequence[Tensor | None]) -> bool:
    if torch._C._are_functorch_transforms_active():
        return True
    grad_enabled = torch.is_grad_enabled()
    for tensor in tensors:
        if tensor is not None and ((grad_enabled and tensor.requires_grad) or _has_tangent(tensor)):
            return True
    return False


def _has_tangent(tensor: Tensor) -> bool:
    return forward_ad.unpack_dual(tensor).tangent is not None


def register_derivative(
    library: torch.library.Library,
    name: str,
    inputs: int,
    saved: tuple[int, ...],
    formula: Formula,
    composition: Callable[..., Callable | None] = lambda keywords: None,
) -> None:
    """Give operator ``name`` a derivative with respect to its first ``inputs`` arguments, all of them tensors or None.

    ``formula(ctx, *grads)`` returns one gradient or None for each of them. It finds in ``ctx`` the ``saved`` ones among
    them as ``saved_tensors``, the positional arguments after them as ``rest``, the keyword-only ones as ``keywords``,
    and which gradients are asked for as ``needs``. It gets None where no gradient reaches an output. An index of -1 in
    ``saved`` is the output. ``composition(keywords)`` may return a function of the operator's arguments that stands for
    it where gradients are wanted, made of operators that have derivatives themselves.
    """
    op = getattr(torch.ops.fastconvt, name).default
    defaults = [argument.default_value for argument in op._schema.arguments if not argument.kwarg_only]

    def below(keyset: Any, args: tuple, keywords: dict) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return op.redispatch(keyset & torch._C._after_autograd_keyset, *args, **keywords)

    def forward(ctx: Any, keyset: Any, keywords: dict, *args: Any) -> Any:
        ctx.set_materialize_grads(False)
        ctx.rest, ctx.keywords = args[inputs:], keywords
        if not torch._C._are_functorch_transforms_active():
            output = below(keyset, args, keywords)
        else:
            # The levels of torch.func's transforms below this one differentiate too, in either mode.
            with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
                output = below(keyset, args, keywords)
        ctx.save_for_backward(*(output if index < 0 else args[index] for index in saved))
        return output

    def backward(ctx: Any, *grads: Tensor | None) -> tuple:
        ctx.needs = ctx.needs_input_grad[2 : 2 + inputs]
        found = formula(ctx, *grads) if any(grad is not None for grad in grads) else (None,) * inputs
        return (None, None, *found, *(None for _ in ctx.rest))

    # The kernel runs once for each level of torch.func's transforms: there it needs a function of a single level.
    members = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    derivative = type(f"fastconvt_{name}", (torch.autograd.Function,), members)
    single_level = type(f"fastconvt_{name}", (torch.autograd.function._SingleLevelFunction,), members)

    def kernel(keyset: Any, *args: Any, **keywords: Any) -> Any:
        differentiated = False
        for tensor in args[:inputs]:
            if tensor is None:
                continue
            if _has_tangent(tensor):
                raise RuntimeError(
                    f"fastconvt::{name} has no forward-mode derivative (torch.func.jvp and jacfwd, dual tensors). "
                    "Use reverse mode (torch.func.vjp, jacrev or grad), or PyTorch's own operators in this place."
                )
            differentiated |= tensor.requires_grad
        if not (differentiated and torch.is_grad_enabled()):
            return below(keyset, args, keywords)
        composed = composition(keywords)
        if composed is not None:
            return composed(*args, **keywords)
        args = (*args, *defaults[len(args) :])  # the dispatcher leaves trailing ones out
        if not torch._C._are_functorch_transforms_active():
            return derivative.apply(keyset, keywords, *args)
        from torch._functorch.autograd_function import enable_single_level_autograd_function

        with enable_single_level_autograd_function():
            return single_level.apply(keyset, keywords, *args)

    library.impl(name, kernel, "Autograd", with_keyset=True)


def conv_transpose_formula(name: str) -> Formula:
    """The formula of a plain operator: its backward operator, for what is asked."""

    def formula(ctx: Any, grad_output: Tensor) -> tuple:
        backward = getattr(torch.ops.fastconvt, f"{name}_backward").default
        tensors = (grad_output, *ctx.saved_tensors)
        grads = call(backward, tensors, *ctx.rest, list(ctx.needs), **ctx.keywords)
        return tuple(grad if asked else None for grad, asked in zip(grads, ctx.needs, strict=True))

    return formula


def conv_transpose_backward_formula(name: str) -> Formula:
    """The formula of a plain backward operator, whose results are linear in grad_output and in input or weight.

    The gradient of the input is the adjoint of y = conv_transpose(x, w) applied to grad_output, the weight's correlates
    input and grad_output, and the bias's sums grad_output; so each derivative is one of these operators again.
    """

    def formula(ctx: Any, grad_input: Tensor | None, grad_weight: Tensor | None, grad_bias: Tensor | None) -> tuple:
        forward = getattr(torch.ops.fastconvt, name).default
        backward = getattr(torch.ops.fastconvt, f"{name}_backward").default
        grad_output, input, weight = ctx.saved_tensors
        *geometry, asked = ctx.rest
        with _without_autocast(input.device.type):
            to_grad_output = to_input = to_weight = None
            if ctx.needs[0]:
                terms = []
                if asked[0] and grad_input is not None:
                    terms.append(forward(grad_input, weight, None, *geometry, **ctx.keywords))
                if asked[1] and grad_weight is not None:
                    terms.append(forward(input, grad_weight, None, *geometry, **ctx.keywords))
                if asked[2] and grad_bias is not None:
                    terms.append(grad_bias.reshape(-1, *(1,) * (weight.dim() - 2)).expand_as(grad_output))
                to_grad_output = sum(terms[1:], terms[0]) if terms else None
            if ctx.needs[1] and asked[1] and grad_weight is not None:
                mask = [True, False, False]
                to_input = backward(grad_output, input, grad_weight, *geometry, mask, **ctx.keywords)[0]
            if ctx.needs[2] and asked[0] and grad_input is not None:
                mask = [False, True, False]
                to_weight = backward(grad_output, grad_input, weight, *geometry, mask, **ctx.keywords)[1]
        return to_grad_output, to_input, to_weight

    return formula


def _of_output(activation: str, alpha: float) -> Callable[[Tensor, Tensor], Tensor] | None:
    """The derivative of an activation, applied to a gradient, as a function of the gradient and of its output.

    None for an activation that its output does not determine.
    """
    aten = torch.ops.aten
    if activation == "leaky_relu" and alpha >= 0:
        return lambda grad, output: aten.leaky_relu_backward(grad, output, alpha, True)
    return {
        "relu": lambda grad, output: aten.threshold_backward(grad, output, 0),
        "tanh": aten.tanh_backward.default,
        "sigmoid": aten.sigmoid_backward.default,
    }.get(activation)


def _by_aten(activation: str, alpha: float) -> Callable[[Tensor], Tensor] | None:
    """An activation by PyTorch's own operator; None for a name that is unknown."""
    aten = torch.ops.aten
    return {
        "none": lambda x: x,
        "leaky_relu": lambda x: aten.leaky_relu(x, alpha),
        "silu": aten.silu.default,
        "gelu": aten.gelu.default,
        "gelu_tanh": lambda x: aten.gelu(x, approximate="tanh"),
        "hardswish": aten.hardswish.default,
    }.get(activation)


def register_activation_derivative(library: torch.library.Library, plain: str) -> None:
    """Give the operator ``plain`` with an activation its derivative, which saves the cheapest that determines it.

    That is the output where it does; elsewhere the operator is ``plain`` and PyTorch's activation, which saves its
    argument: the sum before it, rounded to the dtype.
    """

    def settings(keywords: dict) -> tuple[str, float]:
        return keywords["activation"], keywords.get("alpha", 0.01)

    def formula(ctx: Any, grad_output: Tensor) -> tuple:
        input, weight, output = ctx.saved_tensors
        grad = _of_output(*settings(ctx.keywords))(grad_output, output)
        backward = getattr(torch.ops.fastconvt, f"{plain}_backward").default
        allow_tf32 = ctx.keywords.get("allow_tf32", False)
        grads = call(backward, (grad, input, weight), *ctx.rest, list(ctx.needs), allow_tf32=allow_tf32)
        return tuple(grad if asked else None for grad, asked in zip(grads, ctx.needs, strict=True))

    def composition(keywords: dict) -> Callable | None:
        if _of_output(*settings(keywords)) is not None:
            return None
        activate = _by_aten(*settings(keywords))
        if activate is None:
            return None  # the operator says what is wrong
        forward = getattr(torch.ops.fastconvt, plain).default

        def composed(*args: Any, activation: str, alpha: float = 0.01, **others: Any) -> Tensor:
            return activate(forward(*args, **others))

        return composed

    register_derivative(library, f"{plain}_act", 3, (0, 1, -1), formula, composition)


def _without_autocast(device: str) -> contextlib.AbstractContextManager:
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return contextlib.nullcontext()


def chain_formula(ctx: Any, grad_output: Tensor) -> tuple:
    """The formula of the fused chain: its backward operator, for what is asked."""
    backward = torch.ops.fastconvt.conv_transpose3d_logsumexp_hardswish_backward.default
    grads = call(backward, (grad_output, *ctx.saved_tensors), *ctx.rest, list(ctx.needs), **ctx.keywords)
    return tuple(grad if asked else None for grad, asked in zip(grads, ctx.needs, strict=True))


def chain_backward_formula(ctx: Any, *grads: Tensor | None) -> tuple:
    """The fused chain has no second derivative, and says so."""
    raise RuntimeError(
        "fastconvt::conv_transpose3d_logsumexp_hardswish has no second derivative. Compose fastconvt.conv_transpose3d "
        "with PyTorch's operators where the gradients are differentiated again."
    )
