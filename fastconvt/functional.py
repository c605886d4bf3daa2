"""Transposed convolution as functions that stand in for those of ``torch.nn.functional``, and fused operators.

They take what PyTorch's take, in the same order, and may compute float32 in TF32 where PyTorch's setting allows it at
the time of the call: ``torch.backends.cudnn.conv.fp32_precision``, or inside ``torch.compile``, which guards only that
one, ``torch.backends.cudnn.allow_tf32``. Where only the newer setting has been used, PyTorch raises when the older one
is read: then compile ``torch.ops.fastconvt.*`` with an explicit ``allow_tf32``.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastconvt._autograd import call
from fastconvt._library import require_operators
from fastconvt._precision import tf32_allowed

_IntOrInts = int | Sequence[int]


def _call(name: str, tensors: tuple[Tensor | None, ...], *geometry: Any, **keywords: Any) -> Tensor:
    try:
        op = getattr(torch.ops.fastconvt, name).default
    except AttributeError:
        require_operators()
        raise
    return call(op, tensors, *geometry, **keywords, allow_tf32=tf32_allowed())


def _ints(value: _IntOrInts) -> Sequence[int]:
    return value if isinstance(value, (list, tuple)) else [value]


def conv_transpose1d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: _IntOrInts = 1,
    padding: _IntOrInts = 0,
    output_padding: _IntOrInts = 0,
    groups: int = 1,
    dilation: _IntOrInts = 1,
) -> Tensor:
    """Transposed convolution along one axis.

    Equivalent to ``torch.nn.functional.conv_transpose1d(input, weight, bias, stride, padding, output_padding, groups,
    dilation)``; see :func:`conv_transpose2d`, with one axis in place of two.
    """
    geometry = _ints(stride), _ints(padding), _ints(output_padding), groups, _ints(dilation)
    return _call("conv_transpose1d", (input, weight, bias), *geometry)


def conv_transpose2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: _IntOrInts = 1,
    padding: _IntOrInts = 0,
    output_padding: _IntOrInts = 0,
    groups: int = 1,
    dilation: _IntOrInts = 1,
) -> Tensor:
    """Transposed convolution along two axes.

    Equivalent to ``torch.nn.functional.conv_transpose2d(input, weight, bias, stride, padding, output_padding, groups,
    dilation)``.

    Args:
        input: (N, C_in, H, W), or (C_in, H, W) without a batch; float32, float64, float16 or bfloat16; any strides.
        weight: (C_in, C_out / groups, kH, kW), of the same dtype and device.
        bias: (C_out), or None.
        stride, padding, output_padding, dilation: one int, or one for each axis; ``padding`` crops the output on both
            sides, and ``output_padding``, below the larger of ``stride`` and ``dilation``, lengthens it at the far one.
        groups: the input's channels and the output's are split into this many groups that do not mix.

    Returns:
        (N, C_out, H', W') with H' = (H - 1) * stride - 2 * padding + dilation * (kH - 1) + output_padding + 1, without
        N for an unbatched input; channels_last if the input or the weight is dense in that layout, else contiguous.
        float16 and bfloat16 are accumulated in float32 and rounded once.

    Raises:
        RuntimeError: for arguments that do not fit together, and for forward-mode differentiation.
    """
    geometry = _ints(stride), _ints(padding), _ints(output_padding), groups, _ints(dilation)
    return _call("conv_transpose2d", (input, weight, bias), *geometry)


def conv_transpose3d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: _IntOrInts = 1,
    padding: _IntOrInts = 0,
    output_padding: _IntOrInts = 0,
    groups: int = 1,
    dilation: _IntOrInts = 1,
) -> Tensor:
    """Transposed convolution along three axes.

    Equivalent to ``torch.nn.functional.conv_transpose3d(input, weight, bias, stride, padding, output_padding, groups,
    dilation)``; see :func:`conv_transpose2d`, with three axes in place of two, and channels_last_3d.
    """
    geometry = _ints(stride), _ints(padding), _ints(output_padding), groups, _ints(dilation)
    return _call("conv_transpose3d", (input, weight, bias), *geometry)


def conv_transpose1d_act(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: _IntOrInts = 1,
    padding: _IntOrInts = 0,
    output_padding: _IntOrInts = 0,
    groups: int = 1,
    dilation: _IntOrInts = 1,
    *,
    activation: str,
    alpha: float = 0.01,
) -> Tensor:
    """Transposed convolution along one axis, and an activation; see :func:`conv_transpose2d_act`."""
    geometry = _ints(stride), _ints(padding), _ints(output_padding), groups, _ints(dilation)
    tensors = (input, weight, bias)
    return _call("conv_transpose1d_act", tensors, *geometry, activation=activation, alpha=alpha)


def conv_transpose2d_act(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: _IntOrInts = 1,
    padding: _IntOrInts = 0,
    output_padding: _IntOrInts = 0,
    groups: int = 1,
    dilation: _IntOrInts = 1,
    *,
    activation: str,
    alpha: float = 0.01,
) -> Tensor:
    """Transposed convolution along two axes, and an activation of every output, in one pass where it can be.

    Equivalent to ``activation(torch.nn.functional.conv_transpose2d(input, weight, bias, stride, padding,
    output_padding, groups, dilation))``. Outputs that no tap reaches are the activation of the bias.

    Args:
        activation: ``"relu"``, ``"leaky_relu"``, ``"silu"``, ``"gelu"``, ``"gelu_tanh"`` (gelu's approximation),
            ``"tanh"``, ``"sigmoid"``, ``"hardswish"`` or ``"none"``, each as in ``torch.nn.functional``, NaN and inf
            included.
        alpha: the slope of ``"leaky_relu"`` below zero.
        The others as in :func:`conv_transpose2d`.

    Returns:
        As :func:`conv_transpose2d`. float16 and bfloat16 may be rounded before the activation, too, as PyTorch does.
        What is saved for the backward is the output where it determines the derivative ("relu", "tanh", "sigmoid",
        "leaky_relu" with alpha >= 0); for the others the convolution's, and the activation is PyTorch's own then.

    Raises:
        RuntimeError: for an activation that is unknown, and as :func:`conv_transpose2d`.
    """
    geometry = _ints(stride), _ints(padding), _ints(output_padding), groups, _ints(dilation)
    tensors = (input, weight, bias)
    return _call("conv_transpose2d_act", tensors, *geometry, activation=activation, alpha=alpha)


def conv_transpose3d_act(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: _IntOrInts = 1,
    padding: _IntOrInts = 0,
    output_padding: _IntOrInts = 0,
    groups: int = 1,
    dilation: _IntOrInts = 1,
    *,
    activation: str,
    alpha: float = 0.01,
) -> Tensor:
    """Transposed convolution along three axes, and an activation; see :func:`conv_transpose2d_act`."""
    geometry = _ints(stride), _ints(padding), _ints(output_padding), groups, _ints(dilation)
    tensors = (input, weight, bias)
    return _call("conv_transpose3d_act", tensors, *geometry, activation=activation, alpha=alpha)


def conv_transpose3d_logsumexp_hardswish(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    subtrahend: Tensor,
    stride: _IntOrInts = 1,
    padding: _IntOrInts = 0,
    output_padding: _IntOrInts = 0,
    groups: int = 1,
    dilation: _IntOrInts = 1,
    *,
    min: float = -1.0,
    max: float = 1.0,
) -> Tensor:
    """Transposed convolution, logsumexp over the channels, x * sigmoid(x + 3) / 6, subtraction and clamp in one pass.

    Equivalent to::

        x = torch.nn.functional.conv_transpose3d(input, weight, bias, stride, padding, output_padding, groups, dilation)
        x = torch.logsumexp(x, dim=-4, keepdim=True)
        x = x * torch.sigmoid(x + 3) / 6 - subtrahend.reshape(())
        return torch.clamp(x, min, max)

    The convolution's output is never stored, neither here nor in the backward, which recomputes it in parts.

    Args:
        subtrahend: one element in any shape, of the input's dtype and on its device, where it is read.
        min, max: the bounds of the clamp.
        The others as in :func:`conv_transpose3d`.

    Returns:
        (N, 1, D', H', W'), contiguous, without N for an unbatched input. Its gradients cannot be differentiated again.

    Raises:
        RuntimeError: for arguments that do not fit together, for forward-mode differentiation and second derivatives.
    """
    geometry = _ints(stride), _ints(padding), _ints(output_padding), groups, _ints(dilation)
    return _call("conv_transpose3d_logsumexp_hardswish", (input, weight, bias, subtrahend), *geometry, min=min, max=max)
