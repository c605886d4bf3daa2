"""The chart of rows: how many times as fast as each peer, and the share of the floor that is reached."""

from collections.abc import Collection
from pathlib import Path

from fastconvt.bench import report
from fastconvt.bench.contestants import PEERS

COLOURS = {"eager": "#4c72b0", "other": "#8da6cf", "flipped": "#c9a66b", "compile": "#d98b5f"}
OURS, THEIRS = "#3a7d5c", "#b8b8b8"


def draw(rows: list[report.Row], path: Path, title: str | None = None, peers: Collection[str] = tuple(PEERS)) -> None:
    """Draw a group of bars a row, one for each of ``peers``; the second panel is there where a floor is known."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in rows if any(name in peers for name in report.speed_ups(row))]
    floors = any(report.share_of_floor(row) is not None for row in rows)
    bars = sum(1 + sum(name in peers for name in report.speed_ups(row)) for row in rows)
    sizes = {"figsize": (13 if floors else 9, 1.8 + 0.22 * bars), "width_ratios": [3, 2] if floors else [1]}
    figure, panels = pyplot.subplots(
        1, len(sizes["width_ratios"]), sharey=True, squeeze=False, layout="constrained", **sizes
    )
    speed_up_bars(panels[0][0], rows, peers)
    if floors:
        floor_bars(panels[0][1], rows)
    figure.suptitle(title or default_title(rows), fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def default_title(rows: list[report.Row]) -> str:
    """What all rows share."""
    if not rows:
        return "fastconvt: nothing was compared"
    parts = [f"fastconvt on {rows[-1]['gpu']}", f"PyTorch {rows[-1]['torch']}"]
    return ", ".join(parts + [rows[0][name] for name in report.SETTING if name not in report.varying(rows)])


def speed_up_bars(axes, rows: list[report.Row], peers: Collection[str]) -> None:
    """A bar a peer that the row has, with both times."""
    longest = 1.0
    labelled = set()
    for y, row in enumerate(rows):
        ratios = {name: ratio for name, ratio in report.speed_ups(row).items() if name in peers}
        for place, (name, ratio) in zip(places(y, len(ratios)), ratios.items(), strict=True):
            label = None if name in labelled else PEERS[name].title
            bar = axes.barh(place, ratio, bar_height(len(ratios)), color=COLOURS[name], label=label)
            axes.bar_label(bar, [f" {ratio:.1f} x ({both_times(row, name)})"], fontsize=8)
            labelled.add(name)
            longest = max(longest, ratio)
    shown = report.varying(rows)
    axes.set_yticks(
        range(len(rows)), [f"{row['layer']}\n{report.what(row, shown)}".strip() for row in rows], fontsize=9
    )
    axes.set_ylim(max(1, len(rows)) - 0.5, -0.5)
    axes.axvline(1, color="black", linewidth=1)
    axes.set_xlim(0, 1.45 * longest)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("times as fast as the peer (milliseconds: ours / the peer's)")
    if labelled:
        axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=len(labelled), frameon=False, fontsize=8)


def floor_bars(axes, rows: list[report.Row]) -> None:
    """Our share of the floor above the fastest peer's."""
    largest = 1.0
    for y, row in enumerate(rows):
        ratios = report.speed_ups(row)
        fastest = PEERS[min(ratios, key=ratios.get)].column
        for place, column, colour in zip(places(y, 2), ("ours_ms", fastest), (OURS, THEIRS), strict=True):
            share = report.share_of_floor(row, column)
            if share is not None:
                bar = axes.barh(place, 100 * share, bar_height(2), color=colour)
                axes.bar_label(bar, [f" {100 * share:.0f} %"], fontsize=8)
                largest = max(largest, share)
    for colour, who in ((OURS, "fastconvt"), (THEIRS, "the fastest peer")):
        axes.barh(0, 0, color=colour, label=who)
    axes.axvline(100, color="black", linewidth=1)
    axes.set_xlim(0, 115 * largest)
    axes.tick_params(labelleft=False)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("share of the floor: bandwidth or arithmetic at its limit is 100 %")
    axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=2, frameon=False, fontsize=8)


def places(y: int, count: int) -> list[float]:
    """Where ``count`` bars stand around ``y``, the first on top."""
    return [y + (index - (count - 1) / 2) * 0.8 / count for index in range(count)]


def bar_height(count: int) -> float:
    return 0.9 * 0.8 / count


def both_times(row: report.Row, peer: str) -> str:
    return f"{report.number(row['ours_ms'], '{:.3g}')} / {report.number(row[PEERS[peer].column], '{:.3g}')} ms"
