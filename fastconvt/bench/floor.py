"""The least time that a device's memory and arithmetic allow a layer: what remains of a call at its limit.

    floor = max(bytes / bandwidth, 2 * multiply-adds / rate of the precision)

Bytes: every operand is read once and every result written once, whatever a kernel needs in between. Multiply-adds:
those of taps in range, and nothing else: logarithms and exponentials are not counted. The backward pass makes two
products of the forward's size, and reads the output where a relu made it; forward and backward together are the sum of
both floors.
"""

import math
from dataclasses import dataclass

import torch

from fastconvt.bench.device import device_name
from fastconvt.bench.layers import DTYPES, Layer


@dataclass(frozen=True)
class Ceilings:
    """What was measured on a device: bytes a second of a large copy, FLOP a second of a large matrix product."""

    bandwidth: float
    rates: dict[str, float]


CEILINGS = {
    "NVIDIA H200": Ceilings(4.3e12, {"fp32": 55e12, "tf32": 407e12, "bf16": 780e12, "fp16": 780e12}),
}


def floor_ms(layer: Layer, precision: str, mode: str, device: torch.device) -> float | None:
    """The floor of a call in milliseconds; None where the device's ceilings are not known."""
    ceilings = CEILINGS.get(device_name(device))
    if ceilings is None:
        return None
    if mode == "train":
        return sum(floor_ms(layer, precision, part, device) for part in ("forward", "backward"))
    moved = DTYPES[precision].itemsize * elements(layer, mode)
    operations = 2 * multiply_adds(layer) * (2 if mode == "backward" else 1)
    return 1e3 * max(moved / ceilings.bandwidth, operations / ceilings.rates[precision])


def elements(layer: Layer, mode: str) -> int:
    """Elements moved: operands and output; backward: operands, the output's gradient and the operands' gradients."""
    operands = math.prod(layer.input_shape) + math.prod(layer.weight_shape)
    operands += layer.out_channels if layer.bias else 0
    output = math.prod(layer.output_shape)
    if mode == "forward":
        return output + operands
    return output * (2 if layer.relu else 1) + 2 * operands


def multiply_adds(layer: Layer) -> int:
    """Multiply-adds of the convolution, taps in range only."""
    axes = zip(
        *(layer.input, layer.kernel, layer.stride, layer.padding, layer.dilation, layer.output_shape[2:]), strict=True
    )
    pairs = math.prod(pairs_in_range(*axis) for axis in axes)
    return layer.batch * layer.in_channels * layer.out_channels // layer.groups * pairs


def pairs_in_range(size: int, kernel: int, stride: int, padding: int, dilation: int, output: int) -> int:
    """How many pairs of an input and a tap reach an output along one axis."""
    total = 0
    for tap in range(kernel):
        # 0 <= i * stride + shift < output, for 0 <= i < size
        shift = tap * dilation - padding
        first = max(0, -(shift // stride))
        last = min(size - 1, (output - 1 - shift) // stride)
        total += max(0, last - first + 1)
    return total
