"""``python -m fastconvt.bench.tune``: times every candidate for the layers of suites, by :func:`fastconvt.autotune`.

The table is what the plan's costs are fitted to, and whoever takes its folder for autotune need not measure again.
"""

import argparse
import re
import time
from pathlib import Path

import torch

import fastconvt
from fastconvt.bench.__main__ import LAYOUTS, several
from fastconvt.bench.device import choose_device
from fastconvt.bench.layers import DTYPES, SUITES, load_suite, make_tensors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0].replace("``", ""))
    parser.add_argument("folder", type=Path, help="where the table goes; problems that are in it are passed over")
    parser.add_argument("--suites", type=several(list(SUITES)), default=list(SUITES), help=f"of {', '.join(SUITES)}")
    parser.add_argument("--precision", type=several(list(DTYPES)), default=list(DTYPES))
    parser.add_argument("--layout", type=several(LAYOUTS), default=list(LAYOUTS))
    parser.add_argument("--filter", default="", metavar="REGEX", help="only layers whose name matches")
    parser.add_argument("--forward", action="store_true", help="no gradients")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after that time")
    options = parser.parse_args()
    device, _ = choose_device("cuda")
    end = time.monotonic() + options.seconds
    layers = [layer for suite in options.suites for layer in load_suite(suite) if re.search(options.filter, layer.name)]
    with fastconvt.autotune(options.folder):
        for precision in options.precision:
            for layout in options.layout:
                for layer in layers:
                    if (layer.dimensions > 1 or layout == "contiguous") and time.monotonic() < end:
                        run(layer, precision, layout, device, not options.forward)


def run(layer, precision, layout, device, backward) -> None:
    """One call of the layer, and one of its gradients: autotune does the rest."""
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
    tensors = make_tensors(layer, DTYPES[precision], layout, device)
    for leaf in tensors.leaves:
        leaf.requires_grad_(backward)
    operands = [tensors.input, tensors.weight, tensors.bias] + ([tensors.subtrahend] if layer.fused else [])
    out = getattr(fastconvt, layer.operator)(*operands, **layer.options)
    if backward:
        torch.autograd.grad(out, tensors.leaves, tensors.grad_output)


if __name__ == "__main__":
    main()
