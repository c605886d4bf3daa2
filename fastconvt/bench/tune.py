"""``python -m fastconvt.bench.tune``: times every candidate for the layers of suites, by :func:`fastconvt.autotune`.

The table is what the plan's costs are fitted to, and whoever takes its folder for autotune need not measure again.
"""

import argparse
import re
import sys
import time
from pathlib import Path

import torch

import fastconvt
from fastconvt._library import LIBRARIES
from fastconvt.bench.__main__ import LAYOUTS, several
from fastconvt.bench.layers import DTYPES, SUITES, Layer, load_suite, make_tensors


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m fastconvt.bench.tune", description=__doc__.split("\n\n")[0].replace("``", "")
    )
    parser.add_argument("folder", type=Path, help="where the table goes; problems that are in it are passed over")
    parser.add_argument(
        "--suites", type=lambda text: text.split(","), default=list(SUITES), help=f"{', '.join(SUITES)} or JSON files"
    )
    parser.add_argument("--precision", type=several(list(DTYPES)), default=list(DTYPES))
    parser.add_argument("--layout", type=several(LAYOUTS), default=list(LAYOUTS))
    parser.add_argument("--filter", default="", metavar="REGEX", help="only layers whose name matches")
    parser.add_argument("--forward", action="store_true", help="no gradients")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after that time")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    if not (torch.cuda.is_available() and LIBRARIES["cuda"].loaded):
        sys.exit("autotune needs a GPU that torch sees, and fastconvt's CUDA kernels: python -m fastconvt.info")
    layers = [layer for suite in options.suites for layer in load_suite(suite) if re.search(options.filter, layer.name)]
    end = time.monotonic() + options.seconds
    with fastconvt.autotune(options.folder):
        for precision in options.precision:
            for layout in options.layout:
                for layer in layers:
                    if (layer.dimensions > 1 or layout == "contiguous") and time.monotonic() < end:
                        run(layer, precision, layout, not options.forward)


def run(layer: Layer, precision: str, layout: str, backward: bool) -> None:
    """One call of the layer, and one of its gradients: autotune does the rest."""
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
    tensors = make_tensors(layer, DTYPES[precision], layout, torch.device("cuda"))
    for leaf in tensors.leaves:
        leaf.requires_grad_(backward)
    operands = [tensors.input, tensors.weight, tensors.bias] + ([tensors.subtrahend] if layer.fused else [])
    out = getattr(fastconvt, layer.operator)(*operands, **layer.options)
    if backward:
        torch.autograd.grad(out, tensors.leaves, tensors.grad_output)


if __name__ == "__main__":
    main()
