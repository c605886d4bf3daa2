"""Times of calls that stand beside each other: taken in turns, so that a busy machine slows all of them alike."""

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

MIN_ROUNDS, MAX_ROUNDS = 5, 50
WARM_UPS = 2
FLUSH_BYTES = 1 << 30  # several times the largest L2 cache; the write also hides the launch of what follows


@dataclass(frozen=True)
class Times:
    """Milliseconds over all repetitions."""

    median: float
    minimum: float


def measure(
    calls: dict[str, Callable], device: torch.device, seconds: float, report: Callable[[float], None]
) -> dict[str, Times]:
    """Time ``calls`` for about ``seconds`` altogether; ``report`` is told the share that is done.

    Each repetition's results are freed before the next one, so outputs are fresh memory for everybody.
    """
    time_one = cuda_timer(device) if device.type == "cuda" else cpu_time
    for _ in range(WARM_UPS):
        for call in calls.values():
            call()
    samples = {name: [] for name in calls}
    start = time.perf_counter()
    order = list(calls)
    for done in range(1, MAX_ROUNDS + 1):
        for name in order:
            samples[name].append(time_one(calls[name]))
        order.append(order.pop(0))  # nobody always follows the same one, whose traces are in the caches
        spent = (time.perf_counter() - start) / seconds
        report(min(1.0, max(spent, done / MAX_ROUNDS)))
        if done >= MIN_ROUNDS and spent >= 1:
            break
    return {name: Times(statistics.median(values), min(values)) for name, values in samples.items()}


def cpu_time(call: Callable) -> float:
    start = time.perf_counter()
    results = call()
    elapsed = time.perf_counter() - start
    del results
    return 1e3 * elapsed


def cuda_timer(device: torch.device) -> Callable[[Callable], float]:
    """A timer by CUDA events that empties the L2 cache before each call."""
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)

    def time_one(call: Callable) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush.fill_(1)
        start.record()
        results = call()
        end.record()
        end.synchronize()
        del results
        return start.elapsed_time(end)

    return time_one


def peak_megabytes(call: Callable, device: torch.device) -> float | None:
    """The most memory that a call holds beyond what was there before, results included; None on a CPU."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    call()
    return (torch.cuda.max_memory_allocated(device) - before) / 1e6


@contextlib.contextmanager
def precision(name: str) -> Iterator[None]:
    """PyTorch at the precision ``name``, with cuDNN's search for its fastest algorithm on."""
    with torch.backends.cudnn.flags(enabled=True, benchmark=True, deterministic=False, allow_tf32=name == "tf32"):
        yield
