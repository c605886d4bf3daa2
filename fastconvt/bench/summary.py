"""``python -m fastconvt.bench.summary FILE.csv``: geometric means and losses of a file of results, and its chart."""

import argparse
import math
import re
import sys
from collections.abc import Iterable
from pathlib import Path

from fastconvt.bench import chart, report
from fastconvt.bench.contestants import PEERS

GROUP = ("suite", "mode", "precision", "layout")
WIDTHS = (11, 14, 11, 14)
LEFT_TO_ATEN = 0.97  # at most, in means: the time is PyTorch's own and a little for the call
FILTERS = ("gpu", "suite", "layer", "mode", "precision", "layout")


def mean(values: Iterable[float]) -> float | None:
    """The geometric mean; None of nothing."""
    logarithms = [math.log(value) for value in values]
    return math.exp(sum(logarithms) / len(logarithms)) if logarithms else None


def summarise(rows: list[report.Row]) -> str:
    """Means by suite, mode, precision and layout, then what loses to its fastest peer, holds more memory than PyTorch
    or is not accurate."""
    groups = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in GROUP), []).append(row)
    lines = [
        "Geometric means: times as fast as PyTorch's eager, as the better of its layouts, as torch.compile, as each "
        f"layer's fastest peer; share of the floor reached. A layer left to ATen counts {LEFT_TO_ATEN} at most.",
        line(GROUP, "layers", "eager", "layouts", "compile", "fastest", "floor"),
    ]
    lines += [line(name, *means(members)) for name, members in groups.items()]
    lines += [f"Slower than the fastest peer: {each}" for each in losses(rows)] or [
        "Slower than the fastest peer: none"
    ]
    lines += [f"More memory than PyTorch: {each}" for each in hungry(rows)]
    lines += [
        f"Outside the rule of accuracy: {row['layer']}, {report.what(row)}: {report.number(row.get('ours_err'))}"
        for row in rows
        if not report.accurate(row)
    ]
    return "\n".join(lines)


def means(rows: list[report.Row]) -> list[str]:
    """The cells of a group's line."""
    ratios = [counted(row) for row in rows]
    values = [
        mean(min(found[name] for name in names if name in found) for found in ratios if names & found.keys())
        for names in ({"eager"}, {"eager", "other"}, {"compile"}, PEERS.keys())
    ]
    shares = [share for row in rows if (share := report.share_of_floor(row)) is not None]
    return [
        str(len(rows)),
        *(report.number(value, "{:.2f} x") for value in values),
        report.number(mean(shares), "{:.0%}"),
    ]


def counted(row: report.Row) -> dict[str, float]:
    """The row's speed-ups as the means count them."""
    most = LEFT_TO_ATEN if set((row.get("plan") or "").split("+")) == {"aten"} else math.inf
    return {name: min(ratio, most) for name, ratio in report.speed_ups(row).items()}


def line(group: Iterable[str], *cells: str) -> str:
    names = "".join(f"{name:<{width}}" for name, width in zip(group, WIDTHS, strict=True))
    return names + "".join(f"{cell:>10}" for cell in cells)


def losses(rows: list[report.Row]) -> list[str]:
    """The rows that lose to their fastest peer, worst first."""
    found = []
    for row in rows:
        ratios = report.speed_ups(row)
        if ratios and min(ratios.values()) < 1:
            name = min(ratios, key=ratios.get)
            text = f"{row['layer']}, {report.what(row)}: {ratios[name]:.2f} x {PEERS[name].title}"
            found.append((ratios[name], f"{text} ({row['ours_ms']:.4g} / {row[PEERS[name].column]:.4g} ms)"))
    return [text for _, text in sorted(found)]


def hungry(rows: list[report.Row]) -> list[str]:
    """The rows whose peak of memory is above that of PyTorch's eager, worst first."""
    found = []
    for row in rows:
        ours, eager = row.get("ours_peak_mb"), row.get("eager_peak_mb")
        if ours is not None and eager is not None and ours > eager:
            found.append((ours / eager, f"{row['layer']}, {report.what(row)}: {ours:.4g} / {eager:.4g} MB"))
    return [text for _, text in sorted(found, reverse=True)]


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m fastconvt.bench.summary", description=__doc__.replace("``", ""))
    parser.add_argument("file", type=Path, help="a CSV file of the benchmark; of rows alike, the newest counts")
    parser.add_argument("--plot", type=Path, metavar="IMAGE", help="draw the rows' chart here")
    parser.add_argument("--peers", type=lambda text: text.split(","), default=list(PEERS), help="bars of the chart")
    parser.add_argument("--title", help="the chart's title (default: the device and PyTorch's version)")
    for name in FILTERS:
        parser.add_argument(f"--{name}", metavar="REGEX", default="", help=f"only rows whose {name} matches")
    options = parser.parse_args(arguments)
    if unknown := set(options.peers) - set(PEERS):
        parser.error(f"--peers: {', '.join(sorted(unknown))}: not among {', '.join(PEERS)}")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    try:
        rows = report.read(options.file)
    except (OSError, ValueError) as error:
        sys.exit(f"fastconvt.bench.summary: {error}")
    # An expression is matched against the whole value, except in a layer's name.
    matches = {name: re.search if name in ("layer", "gpu") else re.fullmatch for name in FILTERS}
    for name in FILTERS:
        if pattern := getattr(options, name):
            rows = [row for row in rows if matches[name](pattern, row[name])]
    if not rows:
        sys.exit("fastconvt.bench.summary: no row is left")
    print(summarise(rows))
    if options.plot:
        chart.draw(rows, options.plot, options.title, options.peers)
        print(f"chart: {options.plot}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
