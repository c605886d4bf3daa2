"""Transposed convolution in PyTorch at the speed of the hardware: ``torch.ops.fastconvt.*`` and what surrounds them."""

from fastconvt._library import load_all as _load_all

__version__ = "0.1.0"

if _load_all():
    from fastconvt import _ops as _ops

from fastconvt.folding import fold_batchnorm
from fastconvt.functional import (
    conv_transpose1d,
    conv_transpose1d_act,
    conv_transpose2d,
    conv_transpose2d_act,
    conv_transpose3d,
    conv_transpose3d_act,
    conv_transpose3d_logsumexp_hardswish,
)
from fastconvt.planning import autotune, force, plan
from fastconvt.planning import autotune_from_environment as _autotune_from_environment

_autotune_from_environment()

__all__ = [
    "autotune",
    "conv_transpose1d",
    "conv_transpose1d_act",
    "conv_transpose2d",
    "conv_transpose2d_act",
    "conv_transpose3d",
    "conv_transpose3d_act",
    "conv_transpose3d_logsumexp_hardswish",
    "fold_batchnorm",
    "force",
    "plan",
]
