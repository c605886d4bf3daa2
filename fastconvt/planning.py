"""The plan seen from outside: which candidate makes a call, at what estimated cost, and how to choose another one."""

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from fastconvt._library import LIBRARIES, require_operators


def plan(
    op: str,
    input_shape: Sequence[int],
    weight_shape: Sequence[int],
    *,
    bias: bool = False,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    output_padding: int | Sequence[int] = 0,
    groups: int = 1,
    dilation: int | Sequence[int] = 1,
    dtype: torch.dtype = torch.float32,
    memory_format: torch.memory_format = torch.contiguous_format,
    device: str | torch.device = "cpu",
    allow_tf32: bool = False,
    activation: str = "none",
) -> dict:
    """Tell which candidate would make a call, and why; nothing is computed.

    Args:
        op: an operator's name, such as ``"conv_transpose2d"`` or ``"conv_transpose3d_logsumexp_hardswish"``.
        input_shape, weight_shape: as the operator takes them; the rest as well.

    Returns:
        ``{"choice": name, "candidates": [{"name", "supported", "reason", "cost_ms"}]}``: ``reason`` is why a candidate
        refuses the call, ``cost_ms`` its estimated time in milliseconds (None where it refuses).

    Raises:
        RuntimeError: for arguments that the operator itself would refuse, with the same text.
    """
    where = torch.device(device).type
    require_operators(where)

    def as_list(value: int | Sequence[int]) -> list[int]:
        return [value] if isinstance(value, int) else list(value)

    layout = "contiguous" if memory_format == torch.contiguous_format else "channels_last"
    return json.loads(
        getattr(torch.ops.fastconvt, f"_plan_{where}")(
            op,
            list(input_shape),
            list(weight_shape),
            bias,
            as_list(stride),
            as_list(padding),
            as_list(output_padding),
            groups,
            as_list(dilation),
            str(dtype).removeprefix("torch."),
            layout,
            allow_tf32,
            activation,
        )
    )


@contextlib.contextmanager
def force(candidate: str) -> Iterator[None]:
    """Make every call in the block, in any thread, use the candidate of this name, as :func:`plan` lists them.

    It does not touch calls of operators and on devices for which there is no candidate of this name.

    Raises:
        ValueError: where no candidate has the name. A call that the candidate cannot make raises RuntimeError.
    """
    require_operators()
    operators = [getattr(torch.ops.fastconvt, f"_force_{key}") for key, library in LIBRARIES.items() if library.loaded]
    try:
        previous = [operator(candidate) for operator in operators]
    except RuntimeError as error:
        raise ValueError(f"fastconvt.force: no candidate is called {candidate!r}") from error
    try:
        yield
    finally:
        for operator, name in zip(operators, previous, strict=True):
            operator(name)


@contextlib.contextmanager
def autotune(folder: str | os.PathLike | None = None) -> Iterator[None]:
    """Time the candidates of every new problem in the block on the GPU, and use the fastest from then on.

    The first call of a problem (an operation with its shapes, dtype, memory format and TF32 setting) runs each
    candidate that can make it several times; this call and all later ones, in the block and after it, use the one that
    was fastest by at least 3 %, and the plan's own choice where there is none. Gradients are problems of their own.
    Nothing is measured while a CUDA graph is captured: run the model once before. The CPU's plan stays as it is.

    ``FASTCONVT_AUTOTUNE=1`` in the environment does the same for a whole process.

    Args:
        folder: where results are kept, one file for each kind of GPU, and found again by the next process. By default
            ``fastconvt/<version>`` in ``$XDG_CACHE_HOME`` or ``~/.cache``.

    Raises:
        RuntimeError: where the CUDA kernels are missing, with the reason.
        OSError: where the folder cannot be made.
    """
    require_operators("cuda")
    previous = _set_autotune(folder)
    try:
        yield
    finally:
        torch.ops.fastconvt._autotune_cuda(previous)


def autotune_from_environment() -> None:
    """What ``FASTCONVT_AUTOTUNE`` asks for: 1 measures in the whole process, 0 or nothing does not."""
    wanted = os.environ.get("FASTCONVT_AUTOTUNE", "0")
    if wanted not in ("", "0", "1"):
        raise ValueError(f"fastconvt: FASTCONVT_AUTOTUNE must be 0 or 1, not {wanted!r}")
    if wanted == "1" and LIBRARIES["cuda"].loaded:
        _set_autotune(None)


def _set_autotune(folder: str | os.PathLike | None) -> str:
    from fastconvt import __version__

    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    path = Path(cache, "fastconvt", __version__) if folder is None else Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    return torch.ops.fastconvt._autotune_cuda(str(path))
