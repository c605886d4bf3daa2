"""What the operators of the compiled library get in Python: fakes, backward operators, derivatives, autocast, vmap.

Importing this file registers all of it. Every name in it follows csrc/ops.cpp.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import flop_counter

from fastconvt import _autograd, _gradients, _precision, _shapes, _vmap

_LIBRARY = torch.library.Library("fastconvt", "IMPL")
_CHAIN = "conv_transpose3d_logsumexp_hardswish"
_PLAIN = {f"conv_transpose{spatial}d": spatial for spatial in (1, 2, 3)}
_ACT = [f"{name}_act" for name in _PLAIN]


def _fake_gradients(input: Tensor, weight: Tensor, groups: int, mask: Sequence[bool]) -> tuple[Tensor, ...]:
    shapes = (input.shape, weight.shape, (weight.shape[1] * groups,))
    strides = _gradients.gradient_strides(input, weight)
    return tuple(
        input.new_empty_strided(shape, stride) if asked else input.new_empty(0)
        for shape, stride, asked in zip(shapes, strides, mask, strict=True)
    )


def _with_defaults(geometry: tuple, spatial: int) -> tuple:
    """stride, padding, output_padding, groups and dilation of a call; the dispatcher leaves trailing defaults out."""
    ones, zeros = (1,) * spatial, (0,) * spatial
    return (*geometry, *(ones, zeros, zeros, 1, ones)[len(geometry) :])


def _register_plain(name: str, spatial: int) -> None:
    """In kernels below, ``geometry`` is stride, padding, output_padding, groups and dilation."""

    def fake(
        input: Tensor, weight: Tensor, bias: Tensor | None = None, *geometry: Any, allow_tf32: bool = False
    ) -> Tensor:
        tensors = {"input": input, "weight": weight, "bias": bias}
        call = _shapes.check_call(name, spatial, tensors, *_with_defaults(geometry, spatial))
        strides = _shapes.dense_strides(call.shape, spatial, _shapes.output_layout(input, weight))
        return input.new_empty_strided(call.shape, strides)

    def check(grad_output: Tensor, input: Tensor, weight: Tensor, geometry: Sequence) -> _shapes.Call:
        tensors = {"input": input, "weight": weight, "grad_output": grad_output}
        return _shapes.check_call(f"{name}_backward", spatial, tensors, *geometry)

    def backward(grad_output: Tensor, input: Tensor, weight: Tensor, *args: Any, allow_tf32: bool = False) -> tuple:
        *geometry, mask = args
        call = check(grad_output, input, weight, geometry)
        return _gradients.conv_transpose_backward(grad_output, input, weight, call, mask, allow_tf32)

    def fake_backward(
        grad_output: Tensor, input: Tensor, weight: Tensor, *args: Any, allow_tf32: bool = False
    ) -> tuple:
        *geometry, mask = args
        call = check(grad_output, input, weight, geometry)
        return _fake_gradients(input, weight, call.groups, mask)

    def fake_act(*args: Any, activation: str, alpha: float = 0.01, allow_tf32: bool = False) -> Tensor:
        input, weight, bias, *geometry = (*args, None)[: max(3, len(args))]
        tensors = {"input": input, "weight": weight, "bias": bias}
        call = _shapes.check_call(f"{name}_act", spatial, tensors, *_with_defaults(geometry, spatial))
        _shapes.check_activation(f"{name}_act", activation)
        strides = _shapes.dense_strides(call.shape, spatial, _shapes.output_layout(input, weight))
        return input.new_empty_strided(call.shape, strides)

    formulas = (_autograd.conv_transpose_formula(name), _autograd.conv_transpose_backward_formula(name))
    _register(name, fake, backward, fake_backward)
    _autograd.register_derivative(_LIBRARY, name, 3, (0, 1), formulas[0])
    _autograd.register_derivative(_LIBRARY, f"{name}_backward", 3, (0, 1, 2), formulas[1])
    torch.library.register_fake(f"fastconvt::{name}_act", fake_act, lib=_LIBRARY)
    _autograd.register_activation_derivative(_LIBRARY, name)
    _vmap.register(_LIBRARY, name, spatial)


def _register_chain(name: str) -> None:
    """In kernels below, ``tensors`` are input, weight, bias and subtrahend, and ``geometry`` is as above."""

    def check(op: str, tensors: Sequence, geometry: Sequence, **others: Tensor) -> _shapes.Call:
        named = dict(zip(("input", "weight", "bias", "subtrahend"), tensors, strict=True), **others)
        return _shapes.check_call(op, 3, named, *geometry)

    def fake(*args: Any, min: float = -1.0, max: float = 1.0, allow_tf32: bool = False) -> Tensor:
        call = check(name, args[:4], _with_defaults(args[4:], 3))
        return args[0].new_empty(call.shape)

    def backward(
        grad_output: Tensor, *args: Any, min: float = -1.0, max: float = 1.0, allow_tf32: bool = False
    ) -> tuple:
        tensors, (*geometry, mask) = args[:4], args[4:]
        call = check(f"{name}_backward", tensors, geometry, grad_output=grad_output)
        return _gradients.chain_backward(grad_output, tensors, call, mask, min, max, allow_tf32)

    def fake_backward(
        grad_output: Tensor, *args: Any, min: float = -1.0, max: float = 1.0, allow_tf32: bool = False
    ) -> tuple:
        (input, weight, _, subtrahend), (*geometry, mask) = args[:4], args[4:]
        call = check(f"{name}_backward", args[:4], geometry, grad_output=grad_output)
        grads = _fake_gradients(input, weight, call.groups, mask[:3])
        return (*grads, input.new_empty(subtrahend.shape if mask[3] else (0,)))

    _register(name, fake, backward, fake_backward)
    _autograd.register_derivative(_LIBRARY, name, 4, (0, 1, 2, 3), _autograd.chain_formula)
    _autograd.register_derivative(_LIBRARY, f"{name}_backward", 5, (), _autograd.chain_backward_formula)


def _register_aten_backward() -> None:
    """What the backward operators of a GPU call for gradients that no kernel of ours makes; they have checked the call.

    ``mask`` has bit i for the i-th gradient.
    """

    def unpack(rest: Sequence, grad_output: Tensor, gradients: int) -> tuple:
        *geometry, mask = rest
        return _shapes.Call(*geometry, grad_output.shape), [bool(mask >> i & 1) for i in range(gradients)]

    def plain(grad_output: Tensor, input: Tensor, weight: Tensor, *rest: Any) -> tuple:
        call, mask = unpack(rest[:-1], grad_output, 3)
        return _gradients.conv_transpose_backward(grad_output, input, weight, call, mask, rest[-1])

    def chain(grad_output: Tensor, *args: Any) -> tuple:
        tensors, rest, settings = args[:4], args[4:-3], args[-3:]
        call, mask = unpack(rest, grad_output, 4)
        return _gradients.chain_backward(grad_output, tensors, call, mask, *settings)

    _LIBRARY.impl("_conv_transpose_aten_backward", plain, "CompositeExplicitAutograd")
    _LIBRARY.impl("_logsumexp_hardswish_aten_backward", chain, "CompositeExplicitAutograd")


def _register(name: str, fake: Callable, backward: Callable, fake_backward: Callable) -> None:
    torch.library.register_fake(f"fastconvt::{name}", fake, lib=_LIBRARY)
    torch.library.register_fake(f"fastconvt::{name}_backward", fake_backward, lib=_LIBRARY)
    _LIBRARY.impl(f"{name}_backward", backward, "CompositeExplicitAutograd")


def _register_autocast(name: str, device: str) -> None:
    """Cast the operator's tensors to autocast's dtype, as PyTorch does for its own convolutions: not float64."""
    op = getattr(torch.ops.fastconvt, name).default

    def cast(argument: Any, dtype: torch.dtype) -> Any:
        if not isinstance(argument, Tensor) or argument.device.type != device:
            return argument
        if not argument.is_floating_point() or argument.dtype == torch.float64:
            return argument
        return argument.to(dtype)

    def kernel(*args: Any, **keywords: Any) -> Tensor:
        dtype = torch.get_autocast_dtype(device)
        with torch.autocast(device, enabled=False):
            return op(*(cast(argument, dtype) for argument in args), **keywords)

    _LIBRARY.impl(name, kernel, f"Autocast{device.upper()}")


def _convolution_flop(input: Sequence[int], weight: Sequence[int]) -> int:
    """Multiply-adds, two each, of every weight with every input position; an unbatched ``input`` is a batch of one."""
    spatial = len(weight) - 2
    positions = torch.Size((*input[: -spatial - 1], *input[-spatial:])).numel()
    return 2 * positions * torch.Size(weight).numel()


def _register_flop() -> None:
    """One convolution for the forward, one for each gradient of input or weight, and one to recompute the chain's."""

    def forward_flop(input: Sequence[int], weight: Sequence[int], *_: Any, **__: Any) -> int:
        return _convolution_flop(input, weight)

    def backward_flop(_: Any, input: Sequence[int], weight: Sequence[int], *args: Any, **__: Any) -> int:
        mask = args[-1]
        return (mask[0] + mask[1]) * _convolution_flop(input, weight)

    def chain_backward_flop(_: Any, input: Sequence[int], weight: Sequence[int], *args: Any, **__: Any) -> int:
        mask = args[-1]
        return (1 + mask[0] + mask[1]) * _convolution_flop(input, weight)

    ops = torch.ops.fastconvt
    flop_counter.register_flop_formula([getattr(ops, name) for name in (*_PLAIN, *_ACT, _CHAIN)])(forward_flop)
    flop_counter.register_flop_formula([getattr(ops, f"{name}_backward") for name in _PLAIN])(backward_flop)
    flop_counter.register_flop_formula(getattr(ops, f"{_CHAIN}_backward"))(chain_backward_flop)


for _name, _spatial in _PLAIN.items():
    _register_plain(_name, _spatial)
_register_chain(_CHAIN)
for _name in (*_PLAIN, *_ACT, _CHAIN):
    for _device in ("cpu", "cuda"):
        _register_autocast(_name, _device)
_register_aten_backward()
_LIBRARY.impl("_deterministic", _precision.deterministic, "CompositeExplicitAutograd")
_register_flop()
