"""``python -m fastconvt.bench``: times layers beside PyTorch, checks them against float64, keeps the results."""

import argparse
import importlib.util
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

import fastconvt
from fastconvt.bench import accuracy, report, timing
from fastconvt.bench.contestants import PEERS, build_calls
from fastconvt.bench.device import choose_device, device_name, file_stem
from fastconvt.bench.layers import DTYPES, Layer, fit, load_suite, make_tensors

NEEDED = ("rich", "matplotlib")
SECONDS = {"cpu": 6.0, "cuda": 2.0}


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m fastconvt.bench", description=__doc__.replace("``", ""))
    parser.add_argument("--suite", default="reference", help="reference, layers or a JSON file (default: %(default)s)")
    parser.add_argument("--precision", choices=list(DTYPES), default="fp32")
    parser.add_argument("--layout", choices=["contiguous", "channels_last"], default="contiguous")
    parser.add_argument("--mode", choices=["forward", "backward", "train"], default="forward")
    parser.add_argument("--device", help="cpu, cuda, cuda:1 (default: a GPU that fastconvt serves, else the CPU)")
    parser.add_argument("--filter", default="", metavar="REGEX", help="only layers whose name matches")
    parser.add_argument("--batch", type=int, help="in place of each layer's own (on a CPU: an eighth of its own)")
    parser.add_argument("--peers", type=lambda text: text.split(","), help=f"of {','.join(PEERS)}")
    parser.add_argument("--seconds", type=float, help="time for each layer (default: 6 on a CPU, 2 on a GPU)")
    parser.add_argument("--csv", type=Path, help="append here (default: benchmarks/results/<device>.csv)")
    parser.add_argument("--plot", type=Path, help="draw here (default: beside the CSV file, <device>-<suite>.png)")
    parser.add_argument("--explain", action="store_true", help="print the plan of every layer; time nothing")
    options = parser.parse_args(arguments)
    unknown = set(options.peers or []) - set(PEERS)
    if unknown:
        parser.error(f"--peers: {', '.join(sorted(unknown))}: not among {', '.join(PEERS)}")
    return options


def refuse_missing_packages() -> None:
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(f"the benchmark needs {' and '.join(missing)}: pip install 'fastconvt[bench]'")


@dataclass(frozen=True)
class Setting:
    """What all layers of a run share."""

    device: torch.device
    precision: str
    layout: str
    mode: str
    peers: list[str]
    seconds: float


def describe(layer: Layer) -> str:
    kernel, stride = ("x".join(map(str, sizes)) for sizes in (layer.kernel, layer.stride))
    return f"{layer.name} {list(layer.input_shape)}, {layer.out_channels} channels, kernel {kernel}, stride {stride}"


def plan_of(layer: Layer, setting: Setting) -> dict:
    return fastconvt.plan(
        layer.operator,
        layer.input_shape,
        layer.weight_shape,
        bias=layer.bias,
        **layer.options,
        dtype=DTYPES[setting.precision],
        memory_format=layer.memory_format(setting.layout),
        device=setting.device,
        allow_tf32=setting.precision == "tf32",
    )


def explain(layer: Layer, setting: Setting) -> str:
    """The plan of a layer as text: a line a candidate, the chosen one marked."""
    plan = plan_of(layer, setting)
    lines = [describe(layer)]
    for candidate in plan["candidates"]:
        mark = "*" if candidate["name"] == plan["choice"] else " "
        why = f"{candidate['cost_ms']:.4g} ms" if candidate["supported"] else candidate["reason"]
        lines.append(f"  {mark} {candidate['name']:16} {why}")
    return "\n".join(lines)


def run_layer(layer: Layer, setting: Setting, progress) -> tuple[dict, list[str]]:
    """Check and time one layer. Returns its row and what went wrong; ``progress`` is told the share that is done."""
    tensors = make_tensors(layer, DTYPES[setting.precision], setting.layout, setting.device)
    calls = build_calls(layer, tensors, setting.layout, setting.mode, setting.peers)
    results, problems, row = {}, [], {"layer": layer.name}
    for name, call in list(calls.items()):
        try:
            found = call()
            if name in ("ours", "eager"):
                results[name] = found
                row[f"{name}_peak_mb"] = timing.peak_megabytes(call, setting.device)
        except (RuntimeError, NotImplementedError) as error:
            problems.append(f"{layer.name}: {name}: {error}")
            del calls[name]
    for name, error in accuracy.errors(layer, tensors, setting.mode, results).items():
        row[f"{name}_err"] = error
    results.clear()
    if setting.device.type == "cuda":
        torch.cuda.empty_cache()
    progress(0.1)
    times = timing.measure(calls, setting.device, setting.seconds, lambda share: progress(0.1 + 0.9 * share))
    if "ours" in times:
        row |= {"ours_ms": times["ours"].median, "ours_min_ms": times["ours"].minimum}
        row["plan"] = plan_of(layer, setting)["choice"]
    row |= {PEERS[name].column: value.median for name, value in times.items() if name != "ours"}
    return row, problems


def run(layers: list[Layer], setting: Setting, shared: dict, csv: Path, console) -> tuple[list[dict], list[str]]:
    """Run all layers under a progress bar; each row is written as soon as it is there."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    rows, problems = [], []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # Drawn between the calls only: a thread that draws by the clock would take a processor from what is timed.
    with Progress(*columns, console=console, auto_refresh=False) as bar, timing.precision(setting.precision):
        task = bar.add_task("", total=len(layers))
        for index, layer in enumerate(layers):

            def progress(share: float, layer=layer, index=index) -> None:
                bar.update(task, description=layer.name, completed=index + share, refresh=True)

            progress(0.0)
            row, wrong = run_layer(layer, setting, progress)
            rows.append(shared | row)
            problems += wrong
            report.append(csv, rows[-1])
            progress(1.0)
    return rows, problems


def select_layers(options: argparse.Namespace, device: torch.device) -> list[Layer]:
    """The layers of the suite that the options leave, at the batch that the device gets."""
    layers = [layer for layer in load_suite(options.suite) if re.search(options.filter, layer.name)]
    if options.layout == "channels_last":
        layers = [layer for layer in layers if layer.dimensions > 1]
    if not layers:
        raise ValueError("no layer is left to run")
    if options.precision == "tf32" and device.type != "cuda":
        raise ValueError("TF32 is a precision of GPUs")
    return [fit(layer, device, options.batch) for layer in layers]


def make_console():
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 130  # a log does not wrap
    return console


def main(arguments: list[str] | None = None) -> int:
    """Returns 0, or 1 where something failed or was not accurate."""
    options = parse(arguments)
    refuse_missing_packages()
    device, why = choose_device(options.device)
    suite = Path(options.suite).stem
    csv = options.csv or report.RESULTS / f"{file_stem(device)}.csv"
    chart = options.plot or csv.with_name(f"{file_stem(device)}-{suite}.png")
    try:
        layers = select_layers(options, device)
        report.check_header(csv)
    except (OSError, ValueError) as error:
        sys.exit(f"fastconvt.bench: {error}")
    peers = options.peers or [name for name, peer in PEERS.items() if device.type in peer.devices]
    seconds = options.seconds or SECONDS[device.type]
    setting = Setting(device, options.precision, options.layout, options.mode, peers, seconds)
    if options.explain:
        print("\n\n".join(explain(layer, setting) for layer in layers))
        return 0

    console = make_console()
    console.print(f"running on {device_name(device)} ({why}), {torch.get_num_threads()} CPU threads")
    for layer in layers:
        console.print(f"  {describe(layer)}")
    if device.type == "cpu" and options.batch is None:
        console.print("on a CPU each layer runs at an eighth of its batch")
    shared = {key: getattr(options, key) for key in ("mode", "precision", "layout")}
    rows, problems = run(layers, setting, report.machine(device) | {"suite": suite} | shared, csv, console)
    limits = {row["layer"]: accuracy.limit(options.precision, row.get("eager_err")) for row in rows}
    console.print(report.table(rows, device, limits))
    for problem in problems:
        console.print(problem, style="red")
    report.plot(rows, device, chart)
    console.print(f"{report.summary(rows)}\nrows: {csv}\nchart: {chart}")
    accurate = all(row.get("ours_err") is not None and row["ours_err"] <= limits[row["layer"]] for row in rows)
    return 0 if accurate and not problems else 1


if __name__ == "__main__":
    sys.exit(main())
