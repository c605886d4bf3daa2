"""torch.vmap: the mapped dimension becomes part of the batch, or of the groups where weight or bias are mapped too."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

# Rules below move the mapped dimension to the front (B, ...) and fold it into another dimension there.


def _front(tensor: Tensor | None, dim: int | None, size: int) -> Tensor | None:
    """The mapped dimension in front; repeated there for a tensor that is not mapped."""
    if tensor is None:
        return None
    return tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)


def _into_batch(tensor: Tensor, batched: bool) -> Tensor:
    return tensor.flatten(0, 1) if batched else tensor


def _unfold(tensor: Tensor, dim: int, size: int) -> Tensor:
    return tensor.unflatten(dim, (size, tensor.shape[dim] // size))  # and not -1, which an empty batch leaves open


def _out_of_batch(tensor: Tensor, size: int, batched: bool) -> Tensor:
    return _unfold(tensor, 0, size) if batched else tensor


def _into_channels(tensor: Tensor, batched: bool) -> Tensor:
    """(B, N, C, ...) to (N, B*C, ...), (B, C, ...) to (B*C, ...)."""
    return tensor.movedim(0, 1).flatten(1, 2) if batched else tensor.flatten(0, 1)


def _out_of_channels(tensor: Tensor, size: int, batched: bool) -> Tensor:
    return _unfold(tensor, 1, size).movedim(1, 0) if batched else _unfold(tensor, 0, size)


def _grouped(geometry: Sequence, size: int) -> tuple:
    """stride, padding, output_padding, groups and dilation with ``size`` times the groups."""
    stride, padding, output_padding, groups, dilation = (*geometry, *((1,), (0,), (0,), 1, (1,))[len(geometry) :])
    return stride, padding, output_padding, groups * size, dilation


def conv_transpose_rule(op: Any, spatial: int) -> Any:
    """The rule of a plain operator, or of one with an activation.

    ``geometry`` is stride, padding, output_padding, groups and dilation.
    """

    def rule(
        info: Any,
        in_dims: Sequence,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        *geometry: Any,
        **keywords: Any,
    ) -> tuple[Tensor, int]:
        size = info.batch_size
        input_dim, weight_dim, bias_dim = (*in_dims, None)[:3]
        x = _front(input, input_dim, size)
        batched = x.dim() == spatial + 3
        if weight_dim is None and bias_dim is None:
            y = op(_into_batch(x, batched), weight, bias, *geometry, **keywords)
            return _out_of_batch(y, size, batched), 0
        w = _front(weight, weight_dim, size).flatten(0, 1)
        b = None if bias is None else _front(bias, bias_dim, size).flatten()
        y = op(_into_channels(x, batched), w, b, *_grouped(geometry, size), **keywords)
        return _out_of_channels(y, size, batched), 0

    return rule


def conv_transpose_backward_rule(op: Any, spatial: int) -> Any:
    """The rule of a plain backward operator: only the gradient of the input, with one weight, stays in the batch."""

    def rule(
        info: Any,
        in_dims: Sequence,
        grad_output: Tensor,
        input: Tensor,
        weight: Tensor,
        *args: Any,
        allow_tf32: bool = False,
    ) -> tuple[tuple[Tensor, ...], tuple[int | None, ...]]:
        *geometry, mask = args
        size = info.batch_size
        g, x = _front(grad_output, in_dims[0], size), _front(input, in_dims[1], size)
        batched = x.dim() == spatial + 3
        if in_dims[2] is None and not any(mask[1:]):
            g, x = _into_batch(g, batched), _into_batch(x, batched)
            grads = op(g, x, weight, *geometry, mask, allow_tf32=allow_tf32)
            return (_out_of_batch(grads[0], size, batched), *grads[1:]), (0, None, None)
        g, x = _into_channels(g, batched), _into_channels(x, batched)
        w = _front(weight, in_dims[2], size).flatten(0, 1)
        grads = list(op(g, x, w, *_grouped(geometry, size), mask, allow_tf32=allow_tf32))
        if mask[0]:
            grads[0] = _out_of_channels(grads[0], size, batched)
        for index in (1, 2):
            if mask[index]:
                grads[index] = _unfold(grads[index], 0, size)
        return tuple(grads), tuple(0 if asked else None for asked in mask)

    return rule


def register(library: torch.library.Library, name: str, spatial: int) -> None:
    """Register the rules of a plain operator, of the one with an activation, and of the backward."""
    backward = getattr(torch.ops.fastconvt, f"{name}_backward")
    for forward in (name, f"{name}_act"):
        rule = conv_transpose_rule(getattr(torch.ops.fastconvt, forward), spatial)
        torch.library.register_vmap(f"fastconvt::{forward}", rule, lib=library)
    rule = conv_transpose_backward_rule(backward, spatial)
    torch.library.register_vmap(f"fastconvt::{name}_backward", rule, lib=library)
