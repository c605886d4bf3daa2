"""The rows that a run leaves in a CSV file, and the table that it prints."""

import csv
import datetime
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import torch

import fastconvt
from fastconvt.bench import accuracy
from fastconvt.bench.contestants import PEERS
from fastconvt.bench.device import device_name

Row = dict[str, str | float | None]
COLUMNS = [
    *("date", "commit", "gpu", "driver", "torch", "cudnn", "suite", "layer", "mode", "precision", "layout"),
    *("ours_ms", "ours_min_ms", "plan", "eager_ms", "eager_other_layout_ms", "flipped_ms", "compile_ms", "floor_ms"),
    *("ours_err", "eager_err", "ours_peak_mb", "eager_peak_mb", "graph"),
]
SETTING = ("mode", "precision", "layout")  # how a layer is run
MEASURED = ("_ms", "_err", "_mb")  # how the names of columns with numbers end
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
    """The commit of the source tree whose root this runs in, marked where its code is changed.

    Where git does not know: what FASTCONVT_COMMIT says, else the version.
    """
    found = output_of("git", "rev-parse", "--short", "HEAD") if Path("csrc/ops.cpp").exists() else ""
    if not found:
        return os.environ.get("FASTCONVT_COMMIT") or f"v{fastconvt.__version__}"
    changed = output_of("git", "status", "--porcelain", "--", "csrc", "fastconvt", "setup.py")
    return found + ("-dirty" if changed else "")


def check_header(path: Path) -> None:
    """Raise ValueError where ``path`` exists with other columns, so that no run ends in a file of two kinds of rows."""
    if path.exists() and path.stat().st_size:
        with path.open(newline="") as file:
            if next(csv.reader(file)) != COLUMNS:
                raise ValueError(f"{path} has other columns than this benchmark writes: move it away")


def append(path: Path, row: Row) -> None:
    """Append a row, and the header to a new file; what is not one of COLUMNS is for the table only."""
    path.parent.mkdir(parents=True, exist_ok=True)
    is_new = not path.exists() or not path.stat().st_size
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n", extrasaction="ignore")
        if is_new:
            writer.writeheader()
        writer.writerow({key: f"{value:.4g}" if isinstance(value, float) else value for key, value in row.items()})


def read(path: Path) -> list[Row]:
    """The newest row of each layer, mode, precision and layout of each suite, in the order of their first rows.

    Raises:
        OSError, ValueError: where the file cannot be read or has other columns.
    """
    check_header(path)
    newest = {}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            for name in COLUMNS:
                if name.endswith(MEASURED):
                    row[name] = float(row[name]) if row[name] else None
            newest[tuple(row[name] for name in ("gpu", "suite", "layer", "mode", "precision", "layout"))] = row
    return list(newest.values())


def speed_ups(row: Row) -> dict[str, float]:
    """How many times faster than each peer, by the peer's name; nothing where a time is missing."""
    own = row.get("ours_ms")
    times = {name: row.get(peer.column) for name, peer in PEERS.items() if peer.column in COLUMNS}
    return {name: time / own for name, time in times.items() if time is not None} if own is not None else {}


def share_of_floor(row: Row, column: str = "ours_ms") -> float | None:
    """The floor over the time in ``column``: 1 is what the device's limits allow."""
    time, floor = row.get(column), row.get("floor_ms")
    return None if time is None or floor is None else floor / time


def accurate(row: Row) -> bool:
    """Whether our error is there and within the rule."""
    error = row.get("ours_err")
    return error is not None and error <= accuracy.limit(row["precision"], row.get("eager_err"))


def what(row: Row, names: Sequence[str] = SETTING) -> str:
    """The row's mode, precision and layout in words, or what ``names`` say of them."""
    return ", ".join(str(row[name]) for name in names)


def varying(rows: list[Row]) -> list[str]:
    """Which of mode, precision and layout are not the same in all rows."""
    return [name for name in SETTING if len({row[name] for row in rows}) > 1]


def table(rows: list[Row], device: torch.device):
    """A rich table, in milliseconds. What all rows share is in its title, the GPU's clock in its caption."""
    from rich import box
    from rich.table import Table

    differing = varying(rows)
    shared = [rows[0][name] for name in SETTING if name not in differing]
    title = ", ".join([f"Milliseconds (median) on {device_name(device)}", f"PyTorch {torch.__version__}", *shared])
    clocks = [row["clock_ghz"] for row in rows if row.get("clock_ghz")]
    caption = f"GPU clock while timing: {min(clocks):.2f} to {max(clocks):.2f} GHz" if clocks else None
    result = Table(title=title, caption=caption, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    peers = [peer for peer in PEERS.values() if any(row.get(peer.column) is not None for row in rows)]
    for heading in ("layer", *differing):
        result.add_column(heading, no_wrap=True)
    headings = ["ours", *(peer.title for peer in peers), "speed-up", "against the best"]
    floors = ["floor", "reached"] if any(row.get("floor_ms") for row in rows) else []
    for heading in (*headings, *floors, "max error", "PyTorch's"):
        result.add_column(heading, justify="right", overflow="fold")
    result.add_column("plan", no_wrap=True)
    for row in rows:
        times = [number(row.get(column)) for column in ("ours_ms", *(peer.column for peer in peers))]
        style = None if accurate(row) else "red"
        reached = [number(row.get("floor_ms")), number(share_of_floor(row), "{:.0%}")] if floors else []
        name = row["layer"] + (" (graph)" if row.get("graph") else "")
        result.add_row(name, *(row[key] for key in differing), *times, *cells(row, reached), style=style)
    return result


def cells(row: Row, reached: list[str]) -> list[str]:
    """The cells of a row that are not times: speed-ups, what was ``reached`` of the floor, errors and plan."""
    error, ratios = row.get("ours_err"), speed_ups(row)
    allowed = accuracy.limit(row["precision"], row.get("eager_err"))
    return [
        number(ratios.get("eager"), "{:.1f} x"),
        number(min(ratios.values(), default=None), "{:.1f} x"),
        *reached,
        number(error, "{:.1e}") + ("" if accurate(row) else f" > {allowed:.1e}"),
        number(row.get("eager_err"), "{:.1e}"),
        row.get("plan") or "-",
    ]


def number(value: float | None, form: str = "{:.4g}") -> str:
    return "-" if value is None else form.format(value)
