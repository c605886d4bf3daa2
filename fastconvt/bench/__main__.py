"""``python -m fastconvt.bench``: times layers beside PyTorch, checks them against float64, keeps the results."""

import argparse
import importlib.util
import itertools
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

import fastconvt
from fastconvt.bench import accuracy, chart, report, summary, timing
from fastconvt.bench.contestants import PEERS, build_calls
from fastconvt.bench.device import choose_device, device_name, file_stem
from fastconvt.bench.floor import floor_ms
from fastconvt.bench.layers import DTYPES, SUITES, Layer, fit, load_suite, make_tensors, with_relu

NEEDED = ("rich", "matplotlib")
SECONDS = {"cpu": 6.0, "cuda": 2.0}
RELU = "_relu"  # ends the name of a mode in which each layer has a bias and a relu
MODES = ("forward", "backward", "train", f"forward{RELU}", f"train{RELU}")
LAYOUTS = ("contiguous", "channels_last")


def several(known: Sequence[str]):
    """A type for argparse: names out of ``known``, with commas between them."""

    def convert(text: str) -> list[str]:
        names = text.split(",")
        if wrong := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"{', '.join(wrong)}: not among {', '.join(known)}")
        return names

    return convert


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m fastconvt.bench",
        description=__doc__.replace("``", "") + " Options that name several take them with commas between: fp32,tf32.",
    )
    parser.add_argument(
        *("--suite", "--suites"),
        type=lambda text: text.split(","),
        default=["reference"],
        help=f"{', '.join(SUITES)} or JSON files (default: reference)",
    )
    for name, known in (("precision", list(DTYPES)), ("layout", LAYOUTS), ("mode", MODES)):
        text = f"of {', '.join(known)} (default: {known[0]})"
        parser.add_argument(f"--{name}", type=several(known), default=known[:1], help=text)
    parser.add_argument("--device", help="cpu, cuda, cuda:1 (default: a GPU that fastconvt serves, else the CPU)")
    parser.add_argument("--filter", default="", metavar="REGEX", help="only layers whose name matches")
    parser.add_argument("--batch", type=int, help="in place of each layer's own (on a CPU: an eighth of its own)")
    usual = ", ".join(name for name, peer in PEERS.items() if "cuda" in peer.devices)
    parser.add_argument("--peers", type=several(list(PEERS)), help=f"of {', '.join(PEERS)} (default on a GPU: {usual})")
    parser.add_argument("--seconds", type=float, help="time for each row (default: 6 on a CPU, 2 on a GPU)")
    parser.add_argument("--csv", type=Path, help="append here (default: benchmarks/results/<device>.csv)")
    parser.add_argument("--plot", type=Path, help="draw here (default: beside the CSV file, <device>-<suite>.png)")
    parser.add_argument("--explain", action="store_true", help="print the plan of every row; time nothing")
    return parser.parse_args(arguments)


def refuse_missing_packages() -> None:
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(f"the benchmark needs {' and '.join(missing)}: pip install 'fastconvt[bench]'")


@dataclass(frozen=True)
class Job:
    """What makes one row: a layer of a suite, and how it is run."""

    suite: str
    layer: Layer
    mode: str
    precision: str
    layout: str

    @property
    def passes(self) -> str:
        """forward, backward or train: what runs, of the layer as it is here."""
        return self.mode.removesuffix(RELU)

    @property
    def columns(self) -> dict[str, str]:
        names = {"suite": self.suite, "layer": self.layer.name}
        return names | {"mode": self.mode, "precision": self.precision, "layout": self.layout}

    def __str__(self) -> str:
        return f"{self.layer.name}, {report.what(self.columns)}"


def describe(layer: Layer) -> str:
    kernel, stride = ("x".join(map(str, sizes)) for sizes in (layer.kernel, layer.stride))
    text = f"{layer.name} {list(layer.input_shape)}, {layer.out_channels} channels, kernel {kernel}, stride {stride}"
    return text + ", bias and relu" * layer.relu


def plans_of(job: Job, device: torch.device) -> dict[str, dict]:
    """The plans that the job's mode needs, by the operation's name."""
    operator, forward = job.layer.operator, ["_act" if job.layer.relu else ""]
    gradients = ["_backward"] if job.layer.fused else ["_input_gradient", "_weight_gradient"]
    endings = {"forward": forward, "backward": gradients, "train": forward + gradients}[job.passes]
    return {
        operator + ending: fastconvt.plan(
            operator + ending,
            job.layer.input_shape,
            job.layer.weight_shape,
            bias=job.layer.bias,
            **job.layer.options,
            dtype=DTYPES[job.precision],
            memory_format=job.layer.memory_format(job.layout),
            device=device,
            allow_tf32=job.precision == "tf32",
            activation="relu" if ending == "_act" else "none",
        )
        for ending in endings
    }


def explain(job: Job, device: torch.device) -> str:
    """The plans of a row as text: a line a candidate, the chosen one marked."""
    lines = [f"{describe(job.layer)}, {job.precision}, {job.layout}"]
    for operation, plan in plans_of(job, device).items():
        lines.append(f"  {operation}")
        for candidate in plan["candidates"]:
            mark = "*" if candidate["name"] == plan["choice"] else " "
            why = f"{candidate['cost_ms']:.4g} ms" if candidate["supported"] else candidate["reason"]
            lines.append(f"  {mark} {candidate['name']:20} {why}")
    return "\n".join(lines)


def run_job(
    job: Job, device: torch.device, peers: list[str], timer: timing.Timer, seconds: float, progress
) -> tuple[report.Row, list[str]]:
    """Check and time one row. Returns it and what went wrong; ``progress`` is told the share that is done."""
    layer = job.layer
    tensors = make_tensors(layer, DTYPES[job.precision], job.layout, device)
    calls = build_calls(layer, tensors, job.layout, job.passes, peers)
    results, problems, row = {}, [], dict(job.columns)
    for name, call in list(calls.items()):
        try:
            found = call()
            if name in ("ours", "eager"):
                results[name] = found
                row[f"{name}_peak_mb"] = timing.peak_megabytes(call, device)
        except (RuntimeError, NotImplementedError) as error:
            problems.append(f"{job}: {name}: {error}")
            del calls[name]
    for name, error in accuracy.errors(layer, tensors, job.passes, results).items():
        row[f"{name}_err"] = error
    results.clear()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    progress(0.1)
    if not calls:
        return row, problems
    yardsticks = [name for name, peer in PEERS.items() if peer.column not in report.COLUMNS]
    measured = timing.measure(calls, timer, seconds, lambda share: progress(0.1 + 0.9 * share), yardsticks)
    times = measured.times
    if "ours" in times:
        row |= {"ours_ms": times["ours"].median, "ours_min_ms": times["ours"].minimum}
        row["plan"] = "+".join(plan["choice"] for plan in plans_of(job, device).values())
    row |= {PEERS[name].column: value.median for name, value in times.items() if name != "ours"}
    row |= {"floor_ms": floor_ms(layer, job.precision, job.passes, device), "graph": 1 if measured.graph else None}
    row |= {"clock_ghz": measured.clock_ghz, "note": measured.note}
    return row, problems


def run(
    jobs: list[Job], options: argparse.Namespace, device: torch.device, csv: Path, console
) -> tuple[list[report.Row], list[str]]:
    """Run all jobs under a progress bar, and write each row as soon as it is there. Returns rows and problems."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    peers = options.peers or [name for name, peer in PEERS.items() if device.type in peer.devices]
    seconds = options.seconds or SECONDS[device.type]
    machine, timer = report.machine(device), timing.timer_for(device)
    rows, problems = [], []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # Drawn between the calls only: a thread that draws by the clock would take a processor from what is timed.
    with Progress(*columns, console=console, auto_refresh=False) as bar, timing.own_stream(device):
        task = bar.add_task("", total=len(jobs))
        for index, job in enumerate(jobs):

            def progress(share: float, job=job, index=index) -> None:
                bar.update(task, description=str(job), completed=index + share, refresh=True)

            progress(0.0)
            with timing.precision(job.precision):
                row, wrong = run_job(job, device, peers, timer, seconds, progress)
            rows.append(machine | row)
            problems += wrong
            report.append(csv, rows[-1])
            progress(1.0)
    return rows, problems


def select_jobs(options: argparse.Namespace, device: torch.device) -> list[Job]:
    """What the options ask for, each layer at the batch that the device gets."""
    if "tf32" in options.precision and device.type != "cuda":
        raise ValueError("TF32 is a precision of GPUs")
    layers = [
        (Path(suite).stem, fit(layer, device, options.batch))
        for suite in options.suite
        for layer in load_suite(suite)
        if re.search(options.filter, layer.name)
    ]
    jobs = []
    for mode, *setting in itertools.product(options.mode, options.precision, options.layout):
        if mode.endswith(RELU):
            jobs += [Job(suite, with_relu(layer), mode, *setting) for suite, layer in layers if not layer.fused]
        else:
            jobs += [Job(suite, layer, mode, *setting) for suite, layer in layers]
    jobs = [job for job in jobs if job.layout == "contiguous" or job.layer.dimensions > 1]
    if not jobs:
        raise ValueError("no layer is left to run")
    return jobs


def make_console():
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 180  # a log does not wrap
    return console


def main(arguments: list[str] | None = None) -> int:
    """Returns 0, or 1 where something failed or was not accurate."""
    options = parse(arguments)
    refuse_missing_packages()
    device, why = choose_device(options.device)
    csv = options.csv or report.RESULTS / f"{file_stem(device)}.csv"
    suites = "-".join(Path(suite).stem for suite in options.suite)
    image = options.plot or csv.with_name(f"{file_stem(device)}-{suites}.png")
    try:
        jobs = select_jobs(options, device)
        report.check_header(csv)
    except (OSError, ValueError) as error:
        sys.exit(f"fastconvt.bench: {error}")
    if options.explain:
        print("\n\n".join(explain(job, device) for job in jobs))
        return 0

    console = make_console()
    console.print(f"running on {device_name(device)} ({why}), {torch.get_num_threads()} CPU threads")
    for layer in dict.fromkeys(job.layer for job in jobs):
        console.print(f"  {describe(layer)}")
    if device.type == "cpu" and options.batch is None:
        console.print("on a CPU each layer runs at an eighth of its batch")
    rows, problems = run(jobs, options, device, csv, console)
    console.print(report.table(rows, device))
    for row in rows:
        if row.get("note"):
            console.print(f"{row['layer']}, {report.what(row)}: {row['note']}", markup=False)
    for problem in problems:
        console.print(problem, style="red", markup=False)
    chart.draw(rows, image)
    console.print(f"{summary.summarise(rows)}\nrows: {csv}\nchart: {image}", markup=False)
    return 0 if all(map(report.accurate, rows)) and not problems else 1


if __name__ == "__main__":
    sys.exit(main())
