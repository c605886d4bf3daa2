"""Checks of arguments, output shapes and layouts: what csrc/core's C++ does, for fakes and for operators in Python.

Sizes may be symbolic: a condition on a symbolic size goes through ``torch._check``, so that nothing is specialised and
an unbacked batch can be exported. Texts, and the order of the checks, are those of csrc/core/arguments.cpp.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

FLOATING = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
ACTIVATIONS = ("none", "relu", "leaky_relu", "silu", "gelu", "gelu_tanh", "tanh", "sigmoid", "hardswish")
_INT64_MAX = 2**63 - 1


class Call(NamedTuple):
    """A checked call: its geometry, one element a spatial axis, and the ``shape`` of its output."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    output_padding: tuple[int, ...]
    groups: int
    dilation: tuple[int, ...]
    shape: tuple[int, ...]


def check_call(
    name: str,
    spatial: int,
    tensors: dict[str, Tensor | None],
    stride: Sequence[int],
    padding: Sequence[int],
    output_padding: Sequence[int],
    groups: int,
    dilation: Sequence[int],
) -> Call:
    """Check the arguments of operator ``name`` with this many spatial axes; RuntimeError where it cannot be computed.

    ``tensors`` are the operator's by argument name: ``input`` first, then ``weight``, and those of ``bias``,
    ``subtrahend`` and ``grad_output`` that it has, in this order.
    """

    def check(condition: bool | torch.SymBool, text: Callable[[], str]) -> None:
        if condition is not True:
            torch._check(condition, lambda: f"{name}: {text()}")

    given = {key: tensor for key, tensor in tensors.items() if tensor is not None}
    input, weight, bias = given["input"], given["weight"], given.get("bias")
    _check_tensors(check, given)
    plain = name.removesuffix("_backward")
    check(
        input.dim() in (spatial + 1, spatial + 2),
        lambda: (
            f"Expected {spatial + 1}D (unbatched) or {spatial + 2}D (batched) input to {plain}, "
            f"but got input of size: {list(input.shape)}"
        ),
    )
    check(
        weight.dim() == spatial + 2,
        lambda: f"expected {spatial + 2}D weight, but got weight of size {list(weight.shape)}",
    )
    lists = {"stride": stride, "padding": padding, "output_padding": output_padding, "dilation": dilation}
    for key, values in lists.items():
        _check_length(check, key, values, spatial)
    _check_values(check, lists, groups, spatial)
    _check_channels(check, input.shape, weight.shape, None if bias is None else bias.shape, groups, spatial)
    if "subtrahend" in given:
        shape = given["subtrahend"].shape
        check(
            math.prod(shape) == 1,
            lambda: f"expected subtrahend to have one element, but got subtrahend of size {list(shape)}",
        )
    stride, padding, output_padding, dilation = (_spread(values, spatial) for values in lists.values())
    sizes = _check_output(check, input, weight, stride, padding, output_padding, groups, dilation, spatial)
    channels = 1 if "subtrahend" in given else weight.shape[1] * groups
    output = (*input.shape[: -spatial - 1], channels, *sizes)
    if "grad_output" in given:
        _check_grad_output(check, given["grad_output"].shape, output)
    return Call(stride, padding, output_padding, groups, dilation, output)


def check_activation(name: str, activation: str) -> None:
    """Check the activation of operator ``name``."""
    text = f"{name}: expected activation to be one of {', '.join(ACTIVATIONS)}, but got {activation}"
    torch._check(activation in ACTIVATIONS, lambda: text)


def _spread(values: Sequence[int], spatial: int) -> tuple[int, ...]:
    return tuple(values) * spatial if len(values) == 1 else tuple(values)


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _check_tensors(check: Callable, given: dict[str, Tensor]) -> None:
    input = given["input"]
    check(
        input.dtype in FLOATING,
        lambda: f"expected float32, float64, float16 or bfloat16, but got input of dtype {_dtype_name(input)}",
    )
    for key, tensor in given.items():
        check(
            tensor.device == input.device,
            lambda key=key, tensor=tensor: (
                "Expected all tensors to be on the same device, "
                f"but got input on {input.device} and {key} on {tensor.device}"
            ),
        )
    for key, tensor in given.items():
        check(
            tensor.dtype == input.dtype,
            lambda key=key, tensor=tensor: (
                "expected all tensors to have the same dtype, "
                f"but got input of dtype {_dtype_name(input)} and {key} of dtype {_dtype_name(tensor)}"
            ),
        )


def _check_length(check: Callable, key: str, values: Sequence[int], spatial: int) -> None:
    check(
        len(values) in (1, spatial),
        lambda: (
            f"expected {key} to be a single integer value or a list of {spatial} values to match the convolution "
            f"dimensions, but got {key}={list(values)}"
        ),
    )


def _check_values(check: Callable, lists: dict[str, Sequence[int]], groups: int, spatial: int) -> None:
    bounds = {
        "stride": (1, "non-positive stride is not supported"),
        "dilation": (1, "dilation should be greater than zero"),
        "padding": (0, "negative padding is not supported"),
        "output_padding": (0, "negative output_padding is not supported"),
    }
    for key, (least, text) in bounds.items():
        for value in lists[key]:
            check(value >= least, lambda key=key, text=text: f"{text}, but got {key}={list(lists[key])}")
    check(groups >= 1, lambda: f"non-positive groups is not supported, but got groups={groups}")
    axes = zip(*(_spread(lists[key], spatial) for key in ("output_padding", "stride", "dilation")), strict=True)
    for output_padding, stride, dilation in axes:
        check(
            output_padding < _larger(stride, dilation),
            lambda: (
                "output padding must be smaller than either stride or dilation, but got "
                f"output_padding={list(lists['output_padding'])}, stride={list(lists['stride'])}, "
                f"dilation={list(lists['dilation'])}"
            ),
        )


def _larger(a: int, b: int) -> int:
    return max(a, b) if isinstance(a, int) and isinstance(b, int) else torch.sym_max(a, b)


def _check_channels(
    check: Callable,
    input: Sequence[int],
    weight: Sequence[int],
    bias: Sequence[int] | None,
    groups: int,
    spatial: int,
) -> None:
    check(
        weight[0] % groups == 0,
        lambda: (
            f"Given groups={groups}, expected weight to be divisible by {groups} at dimension 0, "
            f"but got weight of size {list(weight)}"
        ),
    )
    channels = input[-spatial - 1]
    check(
        channels == weight[0],
        lambda: (
            f"Given weight of size {list(weight)}, expected input{list(input)} to have {weight[0]} channels, "
            f"but got {channels} channels instead"
        ),
    )
    for size in input[-spatial - 1 :]:
        check(size >= 1, lambda: f"Only zero batch inputs are supported, but got input of size {list(input)}")
    check(weight[1] >= 1, lambda: f"expected at least one output channel, but got weight of size {list(weight)}")
    for size in weight[2:]:
        check(size >= 1, lambda: f"kernel size should be greater than zero, but got weight of size {list(weight)}")
    if bias is not None:
        check(len(bias) == 1 and bias[0] == weight[1] * groups, lambda: _bias_text(weight, bias, groups))


def _bias_text(weight: Sequence[int], bias: Sequence[int], groups: int) -> str:
    return (
        f"Given weight of size {list(weight)} and groups={groups}, expected bias to be 1-dimensional with "
        f"{weight[1] * groups} elements, but got bias of size {list(bias)} instead"
    )


def _check_output(
    check: Callable,
    input: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    output_padding: Sequence[int],
    groups: int,
    dilation: Sequence[int],
    spatial: int,
) -> tuple[int, ...]:
    """The output's spatial sizes, at least 1 each. Uncropped, they and the bytes of the output must fit in an int64."""
    sizes = input.shape[-spatial:]
    axes = list(zip(sizes, weight.shape[2:], stride, output_padding, dilation, strict=True))
    uncropped = tuple((i - 1) * s + d * (k - 1) + op + 1 for i, k, s, op, d in axes)
    output = tuple(size - 2 * p for size, p in zip(uncropped, padding, strict=True))

    def given() -> str:
        return f"Given input size per channel: ({' x '.join(map(str, sizes))}). "

    def too_large() -> str:
        return given() + "Output size is too large"

    for size in uncropped:
        if isinstance(size, int):
            check(size <= _INT64_MAX, too_large)
    output = tuple(max(size, -_INT64_MAX) if isinstance(size, int) else size for size in output)
    for size in output:
        check(
            size >= 1,
            lambda: (
                f"{given()}Calculated output size per channel: ({' x '.join(map(str, output))}). "
                "Output size is too small"
            ),
        )
    factors = (*input.shape[: -spatial - 1], weight.shape[1] * groups, *output, input.element_size())
    if all(isinstance(factor, int) for factor in factors):
        check(math.prod(factors) <= _INT64_MAX, too_large)
    return output


def _check_grad_output(check: Callable, grad_output: Sequence[int], output: Sequence[int]) -> None:
    def text() -> str:
        return f"expected grad_output of size {list(output)}, but got grad_output of size {list(grad_output)}"

    check(len(grad_output) == len(output), text)
    for size, expected in zip(grad_output, output, strict=True):
        check(size == expected, text)


def _known(condition: bool | torch.SymBool, otherwise: bool) -> bool:
    """The truth of ``condition``, or ``otherwise`` where it depends on a size that is not known (an unbacked one)."""
    if isinstance(condition, bool):
        return condition
    from torch.fx.experimental.symbolic_shapes import guard_or_false, guard_or_true

    return guard_or_true(condition) if otherwise else guard_or_false(condition)


# The rule of layout, for sizes and strides of 4 or 5 dimensions. Dimensions are visited from the innermost of
# channels_last outwards: channels, width, height(, depth), batch. A tensor is channels_last iff
#   - it is dense so: every dimension of a size other than 1 has the product of the sizes visited before as its stride;
#   - no dimension, of size 1 or not, has a stride below the extent (stride * size) of the one visited before;
#   - it is not the ambiguous N111 case: the extent before the batch differs from the stride of the channels;
#   - the channels' stride is not 0.
# Dense tensors aside, this is what torch.nn.functional's outputs follow, size-1 dimensions included. A batch of 0
# counts as any other, so that nothing depends on the batch's size, which may be unknown.
def is_channels_last(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether a tensor of these sizes and strides is channels_last, dense and unambiguous."""
    if _known(strides[1] == 0, False):
        return False
    dense, extent = 1, 0
    for axis in (1, *range(len(sizes) - 1, 1, -1), 0):
        size, stride = sizes[axis], strides[axis]
        if _known(stride < extent, False):
            return False
        if axis == 0 and _known(extent == strides[1], False):
            return False
        if _known(size != 1, True) and _known(stride != dense, True):
            return False
        dense, extent = dense * size, stride * size
    return True


def output_layout(input: Tensor, weight: Tensor) -> torch.memory_format:
    """The layout of the output: channels_last (or _3d) iff input or weight is, never in 1D.

    An unbatched input counts as a batch of one, ``input.unsqueeze(0)``, and its output is that batch's, squeezed.
    """
    rank = weight.dim()
    if rank == 3:
        return torch.contiguous_format
    sizes, strides = input.shape, input.stride()
    if len(sizes) < rank:
        sizes, strides = (1, *sizes), (sizes[0] * strides[0], *strides)
    if is_channels_last(sizes, strides) or is_channels_last(weight.shape, weight.stride()):
        return torch.channels_last if rank == 4 else torch.channels_last_3d
    return torch.contiguous_format


def dense_strides(shape: Sequence[int], spatial: int, layout: torch.memory_format) -> tuple[int, ...]:
    """Strides of a dense tensor of ``shape``, ([batch,] channels, spatial...), in ``layout``."""
    order = [*range(len(shape) - 1, -1, -1)]
    if layout is not torch.contiguous_format:
        order.remove(len(shape) - spatial - 1)
        order.insert(0, len(shape) - spatial - 1)
    strides, dense = [1] * len(shape), 1
    for axis in order:
        strides[axis] = dense
        dense = dense * shape[axis]
    return tuple(strides)
