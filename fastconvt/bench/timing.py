"""Times of calls that stand beside each other: taken in turns, so that a busy machine slows all of them alike."""

import contextlib
import statistics
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

import torch

MIN_ROUNDS, MAX_ROUNDS = 5, 50
WARM_UPS = 2
FLUSH_BYTES = 1 << 30  # several times the largest L2 cache
# Below this the gaps between a call's kernels are a large part of it, so the calls are replayed from CUDA graphs.
GRAPH_BELOW_MS, PROBES = 0.020, 5
WAIT_CYCLES = 4_000_000  # of the GPU, about 2 ms: time to launch a call, forward and backward, that nothing then delays

Calls = dict[str, Callable]


@dataclass(frozen=True)
class Times:
    """Milliseconds over all repetitions."""

    median: float
    minimum: float


@dataclass(frozen=True)
class Measured:
    """The times by name; ``graph``: of replays of CUDA graphs; ``clock_ghz``: the GPU's, right after the last call."""

    times: dict[str, Times]
    graph: bool = False
    clock_ghz: float | None = None
    note: str = ""


class CpuTimer:
    """The wall clock."""

    graphs = False

    def time(self, call: Callable) -> float:
        """Milliseconds of a call. Its results are freed afterwards, so outputs are fresh memory for everybody."""
        start = time.perf_counter()
        results = call()
        elapsed = time.perf_counter() - start
        del results
        return 1e3 * elapsed

    def clock_ghz(self) -> float | None:
        return None


class CudaTimer:
    """CUDA events around a call; the L2 cache is overwritten before it.

    Then the GPU waits until the call is launched, as in a network, where the processor runs ahead of it.
    """

    graphs = True

    def __init__(self, device: torch.device):
        self.flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)

    def time(self, call: Callable) -> float:
        """Milliseconds of a call. Its results are freed afterwards."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.flush.fill_(1)
        torch.cuda._sleep(WAIT_CYCLES)
        start.record()
        results = call()
        end.record()
        end.synchronize()
        del results
        return start.elapsed_time(end)

    def capture(self, call: Callable) -> Callable:
        """The call as a CUDA graph; every replay writes to the same memory."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            call()
        return graph.replay

    def clock_ghz(self) -> float:
        """The clock of the multiprocessors now: how long a kernel takes that waits for a number of its cycles."""
        # The shorter of two: the first one of a process is also loaded.
        milliseconds = min(self.time(lambda: torch.cuda._sleep(WAIT_CYCLES)) for _ in range(2))
        return WAIT_CYCLES / milliseconds / 1e6


Timer = CpuTimer | CudaTimer


def timer_for(device: torch.device) -> Timer:
    return CudaTimer(device) if device.type == "cuda" else CpuTimer()


def measure(
    calls: Calls,
    timer: Timer,
    seconds: float,
    report: Callable[[float], None] = lambda share: None,
    yardsticks: Collection[str] = (),
) -> Measured:
    """Time ``calls`` for about ``seconds`` altogether; ``report`` is told the share that is done.

    ``yardsticks`` are the names of calls that are no contestants: they do not decide whether graphs are replayed.
    """
    for _ in range(WARM_UPS):
        for call in calls.values():
            call()
    graphs, note = as_graphs(calls, timer, yardsticks)
    calls = graphs or calls
    samples = {name: [] for name in calls}
    start = time.perf_counter()
    order = list(calls)
    for done in range(1, MAX_ROUNDS + 1):
        for name in order:
            samples[name].append(timer.time(calls[name]))
        order.append(order.pop(0))  # nobody always follows the same one, whose traces are in the caches
        spent = (time.perf_counter() - start) / seconds
        report(min(1.0, max(spent, done / MAX_ROUNDS)))
        if done >= MIN_ROUNDS and spent >= 1:
            break
    times = {name: Times(statistics.median(values), min(values)) for name, values in samples.items()}
    return Measured(times, bool(graphs), timer.clock_ghz(), note)


def as_graphs(calls: Calls, timer: Timer, yardsticks: Collection[str]) -> tuple[Calls | None, str]:
    """All calls as CUDA graphs where the GPU's part of the fastest contestant is below GRAPH_BELOW_MS; else None.

    All or none: a graph beside a plain call would be no comparison. The note says which one could not be captured.
    """
    contestants = [call for name, call in calls.items() if name not in yardsticks]
    if not timer.graphs or not contestants:
        return None, ""
    if min(statistics.median(timer.time(call) for _ in range(PROBES)) for call in contestants) >= GRAPH_BELOW_MS:
        return None, ""
    graphs = {}
    for name, call in calls.items():
        try:
            graphs[name] = timer.capture(call)
        except RuntimeError as error:
            return None, f"no CUDA graphs: {name} cannot be captured: {str(error).splitlines()[0]}"
    return graphs, ""


def peak_megabytes(call: Callable, device: torch.device) -> float | None:
    """The most memory that a call asks for beyond what was there before, results included; None on a CPU.

    What is asked for, not what the allocator hands out: of a kept block, it may hand out up to 1 MB more.
    """
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_stats(device)["requested_bytes.all.current"]
    torch.cuda.reset_peak_memory_stats(device)
    call()
    return (torch.cuda.memory_stats(device)["requested_bytes.all.peak"] - before) / 1e6


@contextlib.contextmanager
def precision(name: str) -> Iterator[None]:
    """PyTorch at the precision ``name``, with cuDNN's search for its fastest algorithm on."""
    with torch.backends.cudnn.flags(enabled=True, benchmark=True, deterministic=False, allow_tf32=name == "tf32"):
        yield


def own_stream(device: torch.device) -> contextlib.AbstractContextManager:
    """A stream that can be captured; a backward pass runs where its forward ran, so both have to run there."""
    return torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else contextlib.nullcontext()
