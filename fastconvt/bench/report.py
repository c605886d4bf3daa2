"""What the benchmark leaves behind: rows of a CSV file, a table, a chart and a summary."""

import csv
import datetime
import math
import subprocess
from pathlib import Path

import torch

import fastconvt
from fastconvt.bench.contestants import PEERS
from fastconvt.bench.device import device_name

COLUMNS = [
    *("date", "commit", "gpu", "driver", "torch", "cudnn", "suite", "layer", "mode", "precision", "layout"),
    *("ours_ms", "ours_min_ms", "plan", "eager_ms", "eager_other_layout_ms", "flipped_ms", "compile_ms", "floor_ms"),
    *("ours_err", "eager_err", "ours_peak_mb", "eager_peak_mb", "graph"),
]
RESULTS = Path("benchmarks/results")


def output_of(*command: str) -> str:
    """What a command prints, or nothing where it is missing or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def machine(device: torch.device) -> dict[str, str]:
    """The columns that tell where and on what a row was measured."""
    facts = {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "commit": commit(),
        "gpu": device_name(device),
        "torch": torch.__version__,
    }
    if device.type == "cuda":
        drivers = output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").splitlines()
        facts |= {"driver": drivers[0] if drivers else "", "cudnn": str(torch.backends.cudnn.version())}
    return facts


def commit() -> str:
    """The commit of the source tree whose root this runs in, marked where its code is changed; else the version."""
    if not Path("csrc/ops.cpp").exists():
        return f"v{fastconvt.__version__}"
    changed = output_of("git", "status", "--porcelain", "--", "csrc", "fastconvt", "setup.py")
    return output_of("git", "rev-parse", "--short", "HEAD") + ("-dirty" if changed else "")


def check_header(path: Path) -> None:
    """Raise ValueError where ``path`` exists with other columns, so that no run ends in a file of two kinds of rows."""
    if path.exists() and path.stat().st_size:
        with path.open(newline="") as file:
            if next(csv.reader(file)) != COLUMNS:
                raise ValueError(f"{path} has other columns than this benchmark writes: move it away")


def append(path: Path, row: dict) -> None:
    """Append a row, and the header to a new file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    is_new = not path.exists() or not path.stat().st_size
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if is_new:
            writer.writeheader()
        writer.writerow({key: f"{value:.4g}" if isinstance(value, float) else value for key, value in row.items()})


def speed_ups(row: dict) -> dict[str, float]:
    """How many times faster than each peer, by the peer's name; nothing where a time is missing."""
    own = row.get("ours_ms")
    times = {name: row.get(peer.column) for name, peer in PEERS.items()}
    return {name: time / own for name, time in times.items() if time is not None} if own is not None else {}


def table(rows: list[dict], device: torch.device, limits: dict[str, float]):
    """A rich table: a row a layer, milliseconds; ``limits`` holds the largest error that each may have."""
    from rich import box
    from rich.table import Table

    peers = [peer for peer in PEERS.values() if any(row.get(peer.column) is not None for row in rows)]
    title = f"Milliseconds (median) on {device_name(device)}, PyTorch {torch.__version__}"
    result = Table(title=title, box=box.SIMPLE_HEAD, padding=0)
    for heading in ("layer", "device", "dtype"):
        result.add_column(heading, no_wrap=True)
    titles = [peer.title for peer in peers]
    for heading in ("ours", *titles, "speed-up", "against the best", "max error (PyTorch's)"):
        result.add_column(heading, justify="right", overflow="fold")
    for row in rows:
        error, allowed, ratios = row.get("ours_err"), limits[row["layer"]], speed_ups(row)
        correct = error is not None and error <= allowed
        result.add_row(
            row["layer"],
            device.type,
            row["precision"],
            number(row.get("ours_ms")),
            *(number(row.get(peer.column)) for peer in peers),
            number(ratios.get("eager"), "{:.1f} x"),
            number(min(ratios.values(), default=None), "{:.1f} x"),
            f"{number(error, '{:.1e}')} ({number(row.get('eager_err'), '{:.1e}')})"
            + ("" if correct else f" > {allowed:.1e}"),
            style=None if correct else "red",
        )
    return result


def number(value: float | None, form: str = "{:.4g}") -> str:
    return "-" if value is None else form.format(value)


def summary(rows: list[dict]) -> str:
    """The geometric mean of the speed-ups over each layer's fastest peer, and the layers that lose to it."""
    smallest = {row["layer"]: min(ratios.values()) for row in rows if (ratios := speed_ups(row))}
    if not smallest:
        return "nothing was compared"
    mean = math.exp(sum(map(math.log, smallest.values())) / len(smallest))
    slower = [f"{layer} ({ratio:.2f} x)" for layer, ratio in smallest.items() if ratio < 1]
    return (
        f"{len(smallest)} layers, {mean:.2f} times as fast as the fastest peer (geometric mean); "
        f"slower: {', '.join(slower) or 'none'}"
    )


def plot(rows: list[dict], device: torch.device, path: Path) -> None:
    """A group of bars a layer: how many times faster than each peer, with both times."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in rows if speed_ups(row)]
    peers = [name for name in PEERS if any(name in speed_ups(row) for row in rows)]
    thickness = 0.8 / max(1, len(peers))
    figure, axes = pyplot.subplots(figsize=(9, 1.8 + 0.3 * len(rows) * (len(peers) + 1)), layout="constrained")
    longest = 1.0
    for index, name in enumerate(peers):
        drawn = [(y, row, speed_ups(row)[name]) for y, row in enumerate(rows) if name in speed_ups(row)]
        positions = [y + (index - (len(peers) - 1) / 2) * thickness for y, _, _ in drawn]
        ratios = [ratio for _, _, ratio in drawn]
        longest = max(longest, *ratios)
        bars = axes.barh(positions, ratios, 0.9 * thickness, label=PEERS[name].title)
        times = [f"{number(row['ours_ms'])} / {number(row[PEERS[name].column])} ms" for _, row, _ in drawn]
        texts = [f" {ratio:.1f} x ({both})" for ratio, both in zip(ratios, times, strict=True)]
        axes.bar_label(bars, texts, fontsize=8)
    axes.set_yticks(range(len(rows)), [f"{row['layer']}\n{row['mode']}, {row['precision']}" for row in rows])
    axes.invert_yaxis()
    axes.axvline(1, color="black", linewidth=1)
    axes.set_xlim(0, 1.5 * longest)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("times as fast as the peer (milliseconds: ours / the peer's)")
    axes.set_title(f"fastconvt on {device_name(device)}, PyTorch {torch.__version__}", fontsize=10)
    if peers:
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
