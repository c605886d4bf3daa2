"""Folding a batch normalisation into the transposed convolution before it, for inference."""

import copy
from typing import TypeVar

import torch
from torch import nn

_BATCH_NORM_OF = {
    nn.ConvTranspose1d: nn.BatchNorm1d,
    nn.ConvTranspose2d: nn.BatchNorm2d,
    nn.ConvTranspose3d: nn.BatchNorm3d,
}
_Conv = TypeVar("_Conv", nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def fold_batchnorm(conv: _Conv, bn: nn.Module) -> _Conv:
    """One layer that does what a transposed convolution and a following batch normalisation do at inference.

    Equivalent to ``torch.nn.Sequential(conv, bn)`` in ``eval()`` mode; any ``groups``, depthwise too, unlike
    ``torch.nn.utils.fuse_conv_bn_eval(conv, bn, transpose=True)``.

    Channel c of the output is scaled by ``s[c] = bn.weight[c] / sqrt(bn.running_var[c] + bn.eps)``: the weight of the
    c-th output channel by ``s[c]``, and the bias becomes ``(bias - bn.running_mean) * s + bn.bias``. Both are computed
    in float64 and rounded once.

    Args:
        conv: a ``torch.nn.ConvTranspose{1,2,3}d``, weight (in_channels, out_channels / groups, *kernel_size).
        bn: the ``torch.nn.BatchNorm{1,2,3}d`` of ``conv.out_channels`` features after it, in ``eval()`` mode and with
            running statistics; with or without ``affine``.

    Returns:
        A new module of ``conv``'s class, dtype, device, memory format and mode; ``conv`` and ``bn`` stay as they are.

    Raises:
        TypeError: where conv is no transposed convolution, or bn not the batch normalisation of as many dimensions.
        ValueError: where the features are not conv's output channels, bn is in training mode, or it has no running
            statistics.
    """
    kind = next((kind for kind in _BATCH_NORM_OF if isinstance(conv, kind)), None)
    if kind is None:
        raise TypeError(f"fold_batchnorm: conv must be a torch.nn.ConvTranspose1d, 2d or 3d, not {type(conv).__name__}")
    if not isinstance(bn, _BATCH_NORM_OF[kind]):
        raise TypeError(
            f"fold_batchnorm: bn must be a torch.nn.{_BATCH_NORM_OF[kind].__name__} after a {kind.__name__}, "
            f"not {type(bn).__name__}"
        )
    if bn.num_features != conv.out_channels:
        raise ValueError(
            f"fold_batchnorm: bn has {bn.num_features} features, but conv has {conv.out_channels} output channels"
        )
    if bn.running_mean is None or bn.running_var is None:
        raise ValueError("fold_batchnorm: bn has no running statistics (track_running_stats=False)")
    if bn.training:
        raise ValueError("fold_batchnorm: bn is in training mode, where it normalises by the batch; call bn.eval()")

    folded = copy.deepcopy(conv)
    weight = conv.weight
    with torch.no_grad():
        scale = torch.rsqrt(bn.running_var.double() + bn.eps)
        if bn.weight is not None:
            scale *= bn.weight.double()
        bias = -bn.running_mean.double() if conv.bias is None else conv.bias.double() - bn.running_mean.double()
        bias *= scale
        if bn.bias is not None:
            bias += bn.bias.double()
        # Row i of the weight belongs to group i // (in_channels / groups), and has that group's output channels.
        of_rows = scale.view(conv.groups, 1, -1).expand(-1, conv.in_channels // conv.groups, -1)
        of_rows = of_rows.reshape(conv.in_channels, -1, *[1] * (weight.dim() - 2))
        folded.weight.copy_(weight.double() * of_rows)
        folded.bias = nn.Parameter(bias.to(weight), requires_grad=weight.requires_grad)
    return folded
