"""The error of a result against float64, by the rule of accuracy of the project:

    max |y - ref| / (sum |x||w| + |b|) <= max(2 * PyTorch's own, 2^-20 fp32, 2^-10 TF32 and fp16, 2^-8 bf16)

A gradient is measured by its own sum of absolute products. The reference is PyTorch in float64, a few
samples at a time. Where a relu follows, rounding decides on which side of zero an output falls, and so whether the
gradient passes: the reference lets it pass where the output that is checked is positive.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from fastconvt.bench.contestants import fused_tail, pytorch
from fastconvt.bench.layers import Layer, Tensors

FLOORS = {"fp32": 2.0**-20, "tf32": 2.0**-10, "fp16": 2.0**-10, "bf16": 2.0**-8}
CHUNK_ELEMENTS = 1 << 25  # of the convolution's output, in float64
BATCHED = ("output", "grad_input")  # results with a row a sample; the others are sums over the batch
# h(v) = v * sigmoid(v + 3) / 6 is nowhere steeper, nor is its derivative: what an error is multiplied by.
HARDSWISH_SLOPE, HARDSWISH_CURVATURE = 0.17, 0.11

# What is expected of one result, and the scale of its rounding errors.
Expected = tuple[torch.Tensor, torch.Tensor]


def limit(precision: str, eager_error: float | None) -> float:
    """The largest error that the rule allows."""
    return max(FLOORS[precision], 2 * (eager_error or 0.0))


def errors(layer: Layer, tensors: Tensors, mode: str, results: dict[str, Sequence[torch.Tensor]]) -> dict[str, float]:
    """The largest error of each contestant's results in ``mode``; inf where one is not finite."""
    if not (layer.relu and mode == "train"):
        return errors_alike(layer, tensors, mode, results)
    worst = {}
    for who, found in results.items():
        passed = replace(tensors, grad_output=tensors.grad_output * (found[0] > 0))
        worst |= errors_alike(layer, passed, mode, {who: found})
    return worst


def errors_alike(
    layer: Layer, tensors: Tensors, mode: str, results: dict[str, Sequence[torch.Tensor]]
) -> dict[str, float]:
    """``errors`` of contestants with one reference for all: a relu has let ``grad_output`` pass where it should."""
    names = result_names(layer, mode)
    named = {who: dict(zip(names, tensors_of, strict=True)) for who, tensors_of in results.items()}
    worst = dict.fromkeys(results, 0.0)
    sums: dict[str, Expected] = {}

    def compare(name: str, expected: Expected, rows: slice | None = None):
        for who in named:
            actual = named[who][name] if rows is None else named[who][name][rows]
            worst[who] = max(worst[who], relative_error(actual, *expected))

    convolution_elements = layer.out_channels * math.prod(layer.output_shape[2:])
    step = max(1, CHUNK_ELEMENTS // convolution_elements)
    for begin in range(0, layer.batch, step):
        rows = slice(begin, begin + step)
        for name, expected in reference(layer, tensors, mode, rows).items():
            if name in BATCHED:
                compare(name, expected, rows)
            else:
                sums[name] = tuple(map(torch.add, sums[name], expected)) if name in sums else expected
    for name, expected in sums.items():
        compare(name, expected)
    return worst


def result_names(layer: Layer, mode: str) -> list[str]:
    """The names of what a call in ``mode`` returns, in its order."""
    gradients = ["grad_input", "grad_weight"]
    gradients += ["grad_bias"] if layer.bias else []
    gradients += ["grad_subtrahend"] if layer.fused else []
    return {"forward": ["output"], "backward": gradients, "train": ["output", *gradients]}[mode]


def relative_error(actual: torch.Tensor, expected: torch.Tensor, scale: torch.Tensor) -> float:
    """max |actual - expected| / scale; where the scale is zero, only the exact value has no error."""
    difference = (actual.double() - expected).abs()
    return (difference / scale.clamp_min(torch.finfo(torch.float64).tiny)).nan_to_num(nan=math.inf).max().item()


def reference(layer: Layer, tensors: Tensors, mode: str, rows: slice) -> dict[str, Expected]:
    """What a call in ``mode`` should return for the samples ``rows``, by name."""
    exact = in_double(tensors, rows)
    sizes = Tensors(*(None if t is None else t.abs() for t in vars(exact).values()))
    if mode != "forward":
        for leaf in exact.leaves + sizes.leaves:
            leaf.requires_grad_()
    # Float64 is outside what cuDNN is fast at: its search for an algorithm would take longer than it saves.
    with torch.set_grad_enabled(mode != "forward"), torch.backends.cudnn.flags(enabled=True, benchmark=False):
        plain = replace(layer, operator=f"conv_transpose{layer.dimensions}d", relu=False)
        conv, size = pytorch(plain, exact), pytorch(plain, sizes)
        output = fused_tail(conv, exact.subtrahend) if layer.fused else conv
        expected = {}
        if mode != "backward":
            scale = fused_scale(conv, size, exact.subtrahend, output) if layer.fused else size
            expected["output"] = (output.relu() if layer.relu else output).detach(), scale.detach()
        if mode != "forward":
            expected |= gradients(layer, exact, sizes, conv, size, output)
    return expected


def gradients(
    layer: Layer, exact: Tensors, sizes: Tensors, conv: torch.Tensor, size: torch.Tensor, output: torch.Tensor
) -> dict[str, Expected]:
    """The gradients in float64, each with the sum of absolute products that makes it up."""
    values = torch.autograd.grad(output, exact.leaves, exact.grad_output)
    grad_size = sizes.grad_output
    if layer.fused:
        grad_size = fused_gradient_scale(conv, size, grad_size)
    convolved = [leaf for leaf in sizes.leaves if leaf is not sizes.subtrahend]
    scales = list(torch.autograd.grad(size, convolved, grad_size.detach()))
    if layer.fused:
        scales.append(sizes.grad_output.sum().reshape_as(values[-1]))
    return dict(zip(result_names(layer, "backward"), zip(values, scales, strict=True), strict=True))


def fused_scale(conv: torch.Tensor, size: torch.Tensor, subtrahend: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    """The scale of the fused output's errors: that of its worst channel, through each step of the chain."""
    value = torch.logsumexp(conv, dim=1, keepdim=True)
    hardswish = value * torch.sigmoid(value + 3) / 6
    through = HARDSWISH_SLOPE * (size.amax(1, keepdim=True) + value.abs() + 1)
    return through + hardswish.abs() + subtrahend.abs() + output.abs()


def fused_gradient_scale(conv: torch.Tensor, size: torch.Tensor, grad_size: torch.Tensor) -> torch.Tensor:
    """The scale of the gradient at the convolution: an error e there moves softmax by 2e of itself, and h' too."""
    value = torch.logsumexp(conv, dim=1, keepdim=True)
    moved = size.amax(1, keepdim=True) + value.abs() + 1
    return grad_size * torch.softmax(conv, 1) * (HARDSWISH_SLOPE * (1 + 2 * moved) + HARDSWISH_CURVATURE * moved)


def in_double(tensors: Tensors, rows: slice) -> Tensors:
    """The operands of the samples ``rows`` in float64, contiguous, free of any graph."""
    parts = {name: None if t is None else t.detach() for name, t in vars(tensors).items()}
    for name in ("input", "grad_output"):
        parts[name] = parts[name][rows]
    return Tensors(**{name: None if t is None else t.double().contiguous() for name, t in parts.items()})
