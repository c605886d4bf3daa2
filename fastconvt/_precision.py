"""PyTorch's settings for convolutions: reading them, and holding them while ATen computes a gradient."""

import contextlib
import threading
from collections.abc import Callable, Iterator

import torch


def tf32_allowed() -> bool:
    """Whether PyTorch lets float32 convolutions use TF32 now: ``torch.backends.cudnn.conv.fp32_precision`` is "tf32".

    Dynamo cannot trace that setting; it guards the older ``torch.backends.cudnn.allow_tf32``, which is read while it
    traces. Where only the newer one was set, reading the older one raises: pass the operator its own ``allow_tf32``.
    """
    if torch.compiler.is_dynamo_compiling():
        return torch.backends.cudnn.allow_tf32
    return torch.backends.cudnn.conv.fp32_precision == "tf32"


def _own_precision(holders: tuple) -> str:
    """The ``fp32_precision`` of ``holders[0]`` itself: "none" where it reads as what the next holder says."""
    setting = holders[0].fp32_precision
    if len(holders) == 1 or setting != holders[1].fp32_precision or setting == "none":
        return setting
    parent = _own_precision(holders[1:])
    holders[1].fp32_precision = "tf32" if setting == "ieee" else "ieee"
    inherited = holders[0].fp32_precision != setting
    holders[1].fp32_precision = parent
    return "none" if inherited else setting


def deterministic() -> bool:
    """Whether PyTorch asks cuDNN for algorithms that give the same bits every run."""
    return torch.backends.cudnn.deterministic or torch.are_deterministic_algorithms_enabled()


def _enable_cudnn() -> Callable[[], None]:
    before = torch.backends.cudnn.enabled
    torch.backends.cudnn.enabled = True

    def restore() -> None:
        torch.backends.cudnn.enabled = before

    return restore


def _forbid_tf32() -> Callable[[], None]:
    conv = torch.backends.cudnn.conv
    if conv.fp32_precision != "tf32":
        return lambda: None
    own = _own_precision((conv, torch.backends.cudnn, torch.backends))
    conv.fp32_precision = "ieee"

    def restore() -> None:
        conv.fp32_precision = own

    return restore


def _disable_onednn() -> Callable[[], None]:
    before = torch.backends.mkldnn.enabled
    torch.backends.mkldnn.enabled = False

    def restore() -> None:
        torch.backends.mkldnn.enabled = before

    return restore


class _Hold:
    """A change of process-wide settings that lasts while any thread is inside; ``change`` returns what undoes it."""

    _lock = threading.Lock()

    def __init__(self, change: Callable[[], Callable[[], None]]) -> None:
        self._change, self._users = change, 0

    def __enter__(self) -> None:
        with self._lock:
            if self._users == 0:
                self._restore = self._change()
            self._users += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                self._restore()


_WITH_CUDNN, _WITHOUT_TF32, _WITHOUT_ONEDNN = map(_Hold, (_enable_cudnn, _forbid_tf32, _disable_onednn))


@contextlib.contextmanager
def aten_convolutions(device: torch.device, allow_tf32: bool, onednn: bool = True) -> Iterator[None]:
    """Make ATen's convolutions on a GPU run in cuDNN, and without TF32 unless it is allowed.

    Whether cuDNN searches for its fastest algorithm, and among deterministic ones only, stays the user's choice:
    ``torch.backends.cudnn.benchmark``, ``torch.use_deterministic_algorithms``. On the CPU, make them run without oneDNN
    unless ``onednn`` is True. The settings are process-wide and are put back exactly. TF32 is only ever taken away from
    other threads, never given to them: where PyTorch's setting forbids it, ``allow_tf32`` has no effect here.
    """
    holds = [_WITH_CUDNN, *([] if allow_tf32 else [_WITHOUT_TF32])] if device.type == "cuda" else []
    if device.type == "cpu" and not onednn:
        holds.append(_WITHOUT_ONEDNN)
    with contextlib.ExitStack() as stack:
        for hold in holds:
            stack.enter_context(hold)
        yield
