"""``python -m benchmarks.costs TABLE...``: the plan's costs against measured times.

A table is what ``python -m fastconvt.bench.tune`` writes: the time of every candidate for every problem. Printed are,
for each operation, dtype and layout, the regret (the time of the plan's choice over that of the fastest candidate) and
how far each candidate's cost is from its times; then the problems where the plan chooses worst. ``--fit`` fits cuDNN's
rates, the constants of ``cudnn_cost`` in csrc/core/cudnn_cost.h. Needs no GPU, but a C++ compiler and
``pip install fastconvt[test]``.
"""

import argparse
import collections
import json
import math
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

from tests.core_module import CORE, load_core

OPERATIONS = {"forward": "CONV_TRANSPOSE", "input_gradient": "INPUT_GRADIENT", "weight_gradient": "WEIGHT_GRADIENT"}
OPERATIONS_PER_MS = {"bfloat16": 780e9, "float16": 780e9, "float32 tf32": 407e9, "float32": 55e9}
BYTES_PER_MS = 4.3e9


class Measured:
    """A line of a table: a problem and the milliseconds of each candidate."""

    def __init__(self, core, line: str) -> None:
        self.text, _, *pairs = line.rstrip("\n").split("\t")
        self.times = {name: float(ms) for name, ms in zip(pairs[::2], pairs[1::2], strict=True)}
        words = self.text.split()
        self.operation, dtype = words[:2]
        self.layout = "channels_last" if words[2 + ("tf32" in words)] == "channels_last" else "contiguous"
        self.precision = f"{dtype} tf32" if "tf32" in words else dtype
        at = words.index("batch")
        self.batch, self.channels = int(words[at + 1]), (int(words[at + 3]), int(words[at + 4]))
        self.groups = int(words[at + 6])
        self.axes = [[int(w) for w in words[i + 1 : i + 7]] for i, word in enumerate(words) if word == "axis"]
        size, kernel, stride, padding, output_padding, dilation = map(list, zip(*self.axes, strict=True))
        tensors = [
            ("input", [self.batch, self.channels[0], *size], dtype, ""),
            ("weight", [self.channels[0], self.channels[1] // self.groups, *kernel], dtype, ""),
        ]
        if "bias" in words:
            tensors.append(("bias", [self.channels[1]], dtype, ""))
        self.problem = core.check_arguments(
            "conv_transpose3d", 3, tensors, stride, padding, output_padding, self.groups, dilation
        )
        self.problem.allow_tf32 = "tf32" in words
        self.problem.channels_last = self.layout == "channels_last"
        self.problem.channels_last_weight = "weight" in words

    def plan(self, core, capability: int) -> tuple[str, dict[str, float]]:
        """The plan's choice, and the cost of every candidate that can make the call."""
        operation = getattr(core.Operation, OPERATIONS[self.operation])
        plan = json.loads(core.plan_on_gpu(operation, self.problem, capability, "", ""))
        return plan["choice"], {c["name"]: c["cost_ms"] for c in plan["candidates"] if c["supported"]}


def geometric_mean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def report(core, rows: list[Measured], capability: int, worst: int) -> None:
    regrets, ratios, choices = collections.defaultdict(list), collections.defaultdict(list), []
    for row in rows:
        choice, costs = row.plan(core, capability)
        group = f"{row.operation}, {row.precision}, {row.layout}"
        for name in costs.keys() & row.times.keys():
            ratios[group, name].append(row.times[name] / costs[name])
        if choice in row.times:
            fastest = min(row.times, key=row.times.get)
            regret = row.times[choice] / row.times[fastest]
            regrets[group].append(regret)
            choices.append((regret, row, choice, fastest, costs))
    for group, values in sorted(regrets.items()):
        print(f"regret of {len(values):3} problems {geometric_mean(values):.3f}, at most {max(values):.2f}: {group}")
    print("measured time / cost: geometric mean, least, most")
    for (group, name), values in sorted(ratios.items()):
        print(f"  {geometric_mean(values):5.2f} {min(values):5.2f} {max(values):5.2f}  {len(values):3} {name}: {group}")
    print("worst choices")
    for regret, row, choice, fastest, costs in sorted(choices, key=lambda c: -c[0])[:worst]:
        times = ", ".join(f"{n} {row.times[n]:.4f} ({costs.get(n, math.nan):.4f})" for n in (choice, fastest))
        print(f"  {regret:.2f} {times}: {row.text}")


def fit(rows: list[Measured]) -> None:
    """Fits start + products * p + inputs * i + outputs * o, as ``cudnn_cost`` has it, to the times of ``aten``."""
    groups = collections.defaultdict(list)
    for row in rows:
        inner_in, inner_out = (n // row.groups for n in row.channels)
        if "aten" not in row.times or min(inner_in, inner_out) < 8:
            continue
        size, dilated = row.problem.element_size(), any(axis[5] > 1 for axis in row.axes)
        direct = row.layout == "channels_last" and not dilated and inner_in * size % 16 == inner_out * size % 16 == 0
        tile = 16 if row.precision == "float32" and row.groups == 1 else 32
        padded = math.ceil(inner_in / tile) * tile * math.ceil(inner_out / tile) * tile
        grouped = 1.7 if row.groups > 1 and row.precision != "float32" else 1
        positions_in = math.prod(axis[0] for axis in row.axes)
        positions_out = math.prod(axis.out() for axis in row.problem.axis)
        traffic = size * row.batch * row.groups / BYTES_PER_MS
        features = [
            grouped * 2 * row.problem.macs() * padded / (inner_in * inner_out) / OPERATIONS_PER_MS[row.precision],
            traffic * inner_in * positions_in,
            traffic * math.ceil(inner_out / 16) * 16 * positions_out,
        ]
        key = row.operation, row.precision, "channels_last" if direct else "contiguous"
        groups[key].append((np.array(features) * (1.5 if dilated else 1), row.times["aten"]))
    print("cuDNN: start, products, inputs, outputs; estimate / measured time: 10 %, median, 90 %")
    for key, samples in sorted(groups.items()):
        if len(samples) < 8:
            continue
        features, times = np.array([f for f, _ in samples]), np.array([t for _, t in samples])

        def error(rates, features=features, times=times):
            return np.log((abs(rates[0]) + features @ np.abs(rates[1:])) / times)

        rates = least_squares(error, [0.03, 1, 1, 1], loss="soft_l1", f_scale=0.25).x
        off = np.quantile(np.exp(error(rates)), [0.1, 0.5, 0.9])
        print("  {" + ", ".join(f"{abs(r):.3g}" for r in rates) + "}", off.round(2), f"{len(samples)}:", ", ".join(key))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.costs", description=__doc__.split("\n\n")[0])
    parser.add_argument("tables", nargs="+", type=Path)
    parser.add_argument("--filter", default="", help="only problems whose text begins so")
    parser.add_argument("--capability", type=int, default=90, help="of the GPU that was measured, 90 for 9.0")
    parser.add_argument("--worst", type=int, default=20, help="how many of the worst choices to print")
    parser.add_argument("--fit", action="store_true", help="fit cuDNN's rates")
    options = parser.parse_args()
    if not CORE.exists():
        parser.error("csrc/core is not beside this script")
    core = load_core()
    lines = [line for path in options.tables for line in path.read_text().splitlines()]
    known = tuple(f"{operation} " for operation in OPERATIONS)
    rows = [Measured(core, line) for line in lines if line.startswith(known) and line.startswith(options.filter)]
    report(core, rows, options.capability, options.worst)
    if options.fit:
        fit(rows)


if __name__ == "__main__":
    main()
