"""``python -m benchmarks.gradient_costs RESULTS``: the plan's choice of gradients against what has been measured.

Results are what ``python -m fastconvt.bench`` appends (benchmarks/results/). Printed are, for each precision and
layout, how far the costs of ``aten`` are from PyTorch's times of all gradients together, and the layers where the plan
chooses candidates that were measured to be slower than PyTorch. ``--fit`` fits cuDNN's rates, the constants of
``cudnn_gradient_rates`` in csrc/core/cudnn_cost.h. Needs no GPU, but a C++ compiler and
``pip install fastconvt[test]``.
"""

import argparse
import collections
import csv
import json
import math
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

from benchmarks.costs import BYTES_PER_MS, OPERATIONS_PER_MS
from fastconvt.bench.layers import DTYPES, load_suite
from tests.core_module import CORE, load_core

SUITES = ("layers", "relatives")
GRADIENTS = ("INPUT_GRADIENT", "WEIGHT_GRADIENT")
# Of cudnn_gradient_rates(): channels in tiles, idle or not, and how much longer few input channels take.
TILES = {
    ("bf16", True): (64, 16, 1.4),
    ("bf16", False): (64, 16, 1),
    ("tf32", True): (128, 8, 1),
    ("tf32", False): (64, 16, 1),
    ("fp32", True): (16, 16, 1),
    ("fp32", False): (16, 1, 1),
}


class Measured:
    """A layer in a precision and layout: PyTorch's milliseconds of all gradients, and ours by their plans."""

    def __init__(self, core, layer, precision: str, layout: str) -> None:
        self.layer, self.precision, self.layout = layer, precision, layout
        self.by_aten, self.by_plan = None, {}
        dtype = str(DTYPES[precision]).removeprefix("torch.")
        tensors = [("input", list(layer.input_shape), dtype, ""), ("weight", list(layer.weight_shape), dtype, "")]
        if layer.bias:
            tensors.append(("bias", [layer.out_channels], dtype, ""))
        sizes = [list(a) for a in (layer.stride, layer.padding, layer.output_padding)]
        arguments = [layer.operator, layer.dimensions, tensors, *sizes, layer.groups, list(layer.dilation)]
        self.problem = core.check_arguments(*arguments)
        self.problem.allow_tf32 = precision == "tf32"
        self.problem.channels_last = self.problem.channels_last_weight = layout == "channels_last"
        plans = [json.loads(core.plan_on_gpu(getattr(core.Operation, o), self.problem, 90, "", "")) for o in GRADIENTS]
        self.choice = "+".join(plan["choice"] for plan in plans)
        self.aten_cost = sum(c["cost_ms"] for plan in plans for c in plan["candidates"] if c["name"] == "aten")


def load(core, paths: list[Path]) -> list[Measured]:
    """The newest rows; PyTorch's other layout serves where that has no row of its own."""
    layers = {(suite, layer.name): layer for suite in SUITES for layer in load_suite(suite) if not layer.fused}
    found = {}

    def at(row: dict, layout: str) -> Measured | None:
        layer = layers.get((row["suite"], row["layer"]))
        if layer is None or (layer.dimensions == 1 and layout == "channels_last"):
            return None
        key = row["suite"], row["layer"], row["precision"], layout
        if key not in found:
            found[key] = Measured(core, layer, row["precision"], layout)
        return found[key]

    rows = [row for path in paths for row in csv.DictReader(path.open()) if row["mode"] == "backward"]
    for row in rows:
        here = at(row, row["layout"])
        if here is None:
            continue
        if row["eager_ms"]:
            here.by_aten = float(row["eager_ms"])
        if row["ours_ms"]:
            here.by_plan[row["plan"]] = float(row["ours_ms"])
    for row in rows:
        other = at(row, "contiguous" if row["layout"] == "channels_last" else "channels_last")
        if other is not None and other.by_aten is None and row["eager_other_layout_ms"]:
            other.by_aten = float(row["eager_other_layout_ms"])
    return [measured for measured in found.values() if measured.by_aten is not None]


def report(rows: list[Measured]) -> None:
    groups = collections.defaultdict(list)
    for row in rows:
        groups[row.precision, row.layout].append(math.log(row.aten_cost / row.by_aten))
    print("cost of aten / measured time: 10 %, median, 90 %; how many are within 30 %")
    for key, errors in sorted(groups.items()):
        off, near = np.exp(np.quantile(errors, [0.1, 0.5, 0.9])), np.mean(np.abs(errors) < math.log(1.3))
        print(f"  {off.round(2)} {near:.0%} of {len(errors):3}: {', '.join(key)}")
    print("choices that were slower than PyTorch, their times and PyTorch's")
    for row in rows:
        ours = row.by_plan.get(row.choice)
        if ours is not None and row.choice != "aten+aten" and ours > row.by_aten:
            print(f"  {row.layer.name} {row.precision} {row.layout}: {row.choice} {ours:.4f}, {row.by_aten:.4f}")


def has_vectors(row: Measured) -> bool:
    size, layer = row.problem.element_size(), row.layer
    return layer.groups == 1 and layer.in_channels * size % 16 == layer.out_channels * size % 16 == 0


def features(row: Measured) -> list[float]:
    """Milliseconds of products, inputs, outputs and weights at the GPU's rates, taps of a volume, groups, the bias."""
    layer, problem = row.layer, row.problem
    inner_in, inner_out = layer.in_channels // layer.groups, layer.out_channels // layer.groups
    in_tile, out_tile, few = TILES[row.precision.replace("fp16", "bf16"), has_vectors(row)]
    idle = math.ceil(inner_in / in_tile) * in_tile * math.ceil(inner_out / out_tile) * out_tile / (inner_in * inner_out)
    dtype = str(DTYPES[row.precision]).removeprefix("torch.")
    rate = OPERATIONS_PER_MS["float32 tf32" if row.precision == "tf32" else dtype]
    places = layer.batch * math.prod(axis.out() for axis in problem.axis)
    bytes_of = [math.prod(layer.input_shape), places * layer.out_channels, math.prod(layer.weight_shape)]
    traffic = [problem.element_size() * n / BYTES_PER_MS for n in bytes_of]
    taps = min(8, math.prod(layer.kernel) / math.prod(layer.stride))
    first, rest = (0.06, 0.5) if row.layout == "channels_last" else (0.03, 0.9)
    bias = layer.bias * (first * places / (places + 3e4) + rest * traffic[1])
    products = 2 * problem.macs() * idle * (few if inner_in < 64 else 1) / rate
    return [products, *traffic, (layer.dimensions == 3) * (taps - 1) / 7, float(layer.groups > 1), bias]


def fit(rows: list[Measured]) -> None:
    groups = collections.defaultdict(list)
    for row in rows:
        if row.layer.in_channels > row.layer.groups:  # others are none of cuDNN's
            kind = "vectors" if has_vectors(row) else "others"
            groups[row.precision, row.layout, kind].append((features(row), row.by_aten))
    print("start, products, inputs, outputs, weights, volume, grouped; estimate / measured time: 10 %, median, 90 %")
    for key, samples in sorted(groups.items()):
        if len(samples) < 12:
            continue
        x, times = np.array([f for f, _ in samples]), np.array([t for _, t in samples])

        def error(rates, x=x, times=times):
            start, products, *traffic, volume, grouped = np.abs(rates)
            slow = (1 + volume * x[:, 4]) * (1 + grouped * x[:, 5])
            return np.log((start + products * slow * x[:, 0] + x[:, 1:4] @ traffic + x[:, 6]) / times)

        rates = least_squares(error, [0.03, 2, 4, 4, 4, 1, 0.5], loss="soft_l1", f_scale=0.15).x
        off = np.quantile(np.exp(error(rates)), [0.1, 0.5, 0.9])
        print("  {" + ", ".join(f"{abs(r):.2g}" for r in rates) + "}", off.round(2), f"{len(samples)}:", ", ".join(key))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gradient_costs", description=__doc__.split("\n\n")[0])
    parser.add_argument("results", nargs="+", type=Path)
    parser.add_argument("--fit", action="store_true", help="fit cuDNN's rates")
    options = parser.parse_args()
    if not CORE.exists():
        parser.error("csrc/core is not beside this script")
    rows = load(load_core(), options.results)
    report(rows)
    if options.fit:
        fit(rows)


if __name__ == "__main__":
    main()
