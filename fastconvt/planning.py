"""The plan seen from outside: which candidate makes a call, at what estimated cost, and how to choose another one."""

import contextlib
import json
from collections.abc import Iterator, Sequence

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
