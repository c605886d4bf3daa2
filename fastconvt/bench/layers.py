"""The layers that the benchmark times: their shapes, the suites they come in, and their data."""

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path

import torch

FUSED = "conv_transpose3d_logsumexp_hardswish"
SUITES = ("reference", "layers", "relatives")  # all but the first are lists in benchmarks/, in the source tree
DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Layer:
    """One layer: sizes in elements, one entry an axis; ``operator`` is the name under ``torch.ops.fastconvt``."""

    name: str
    operator: str
    batch: int
    in_channels: int
    out_channels: int
    groups: int
    input: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    output_padding: tuple[int, ...]
    dilation: tuple[int, ...]
    bias: bool
    relu: bool = False  # follows the convolution

    @classmethod
    def from_json(cls, entry: dict) -> "Layer":
        """A layer from an entry of a layer list; ``operator`` may be left out for a plain transposed convolution."""
        axes = {
            key: tuple(entry[key]) for key in ("input", "kernel", "stride", "padding", "output_padding", "dilation")
        }
        operator = entry.get("operator", f"conv_transpose{len(axes['input'])}d")
        channels = {key: entry[key] for key in ("in_channels", "out_channels", "groups")}
        return cls(entry["name"], operator, entry["N"], **channels, **axes, bias=entry["bias"])

    @property
    def fused(self) -> bool:
        return self.operator == FUSED

    @property
    def dimensions(self) -> int:
        return len(self.input)

    @property
    def input_shape(self) -> tuple[int, ...]:
        return (self.batch, self.in_channels, *self.input)

    @property
    def weight_shape(self) -> tuple[int, ...]:
        return (self.in_channels, self.out_channels // self.groups, *self.kernel)

    @property
    def output_shape(self) -> tuple[int, ...]:
        axes = zip(self.input, self.kernel, self.stride, self.padding, self.output_padding, self.dilation, strict=True)
        sizes = ((i - 1) * s - 2 * p + d * (k - 1) + op + 1 for i, k, s, p, op, d in axes)
        return (self.batch, 1 if self.fused else self.out_channels, *sizes)

    @property
    def options(self) -> dict:
        """The keyword arguments that PyTorch's function and ours share."""
        return {
            "stride": self.stride,
            "padding": self.padding,
            "output_padding": self.output_padding,
            "groups": self.groups,
            "dilation": self.dilation,
        }

    def memory_format(self, layout: str) -> torch.memory_format:
        """The memory format of ``layout``; one-dimensional layers have only the contiguous one."""
        if layout == "contiguous":
            return torch.contiguous_format
        if self.dimensions == 1:
            raise ValueError(f"{self.name} is one-dimensional, and PyTorch has no channels_last for that")
        return torch.channels_last if self.dimensions == 2 else torch.channels_last_3d


REFERENCE = (
    Layer(
        name="reference_2d",
        operator="conv_transpose2d",
        batch=16,
        in_channels=32,
        out_channels=64,
        groups=4,
        input=(128, 256),
        kernel=(3, 5),
        stride=(2, 3),
        padding=(1, 2),
        output_padding=(0, 0),
        dilation=(2, 1),
        bias=False,
    ),
    Layer(
        name="reference_3d_chain",
        operator=FUSED,
        batch=128,
        in_channels=3,
        out_channels=16,
        groups=1,
        input=(16, 32, 32),
        kernel=(3, 3, 3),
        stride=(2, 2, 2),
        padding=(1, 1, 1),
        output_padding=(0, 0, 0),
        dilation=(1, 1, 1),
        bias=True,
    ),
)


def load_suite(suite: str) -> list[Layer]:
    """The layers of one of SUITES, or of a JSON file in the format of those in the source tree."""
    if suite == "reference":
        return list(REFERENCE)
    listed = suite in SUITES
    path = Path("benchmarks", f"{suite}.json") if listed else Path(suite)
    if not path.is_file():
        hint = "run from the root of the source tree, which has it" if listed else "no such file"
        raise FileNotFoundError(f"suite {suite!r}: {path}: {hint}")
    return [Layer.from_json(entry) for entry in json.loads(path.read_text())]


def fit(layer: Layer, device: torch.device, batch: int | None) -> Layer:
    """The layer at ``batch``; without one at its own, of which a CPU gets an eighth."""
    if batch is None:
        batch = layer.batch if device.type == "cuda" else max(1, layer.batch // 8)
    return replace(layer, batch=batch)


def with_relu(layer: Layer) -> Layer:
    """The layer with a bias and a relu after it."""
    return replace(layer, bias=True, relu=True)


@dataclass(frozen=True)
class Tensors:
    """The operands of one call; ``subtrahend`` is the fused operator's."""

    input: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    subtrahend: torch.Tensor | None
    grad_output: torch.Tensor

    @property
    def leaves(self) -> list[torch.Tensor]:
        """What gradients are taken of."""
        return [t for t in (self.input, self.weight, self.bias, self.subtrahend) if t is not None]


def make_tensors(layer: Layer, dtype: torch.dtype, layout: str, device: torch.device, seed: int = 0) -> Tensors:
    """Random data, never zeros: on a GPU zeros cost less power and so less time.

    The weight is scaled so that the convolution's output has about unit variance; the fused layer's output then lies
    inside its clamp, where it can be checked.
    """
    generator = torch.Generator(device).manual_seed(seed)
    memory_format = layer.memory_format(layout)

    def normal(shape, scale=1.0):
        return torch.randn(shape, device=device, generator=generator).mul_(scale).to(dtype)

    terms = layer.in_channels / layer.groups * math.prod(layer.kernel) / math.prod(layer.stride)
    return Tensors(
        input=normal(layer.input_shape).contiguous(memory_format=memory_format),
        weight=normal(layer.weight_shape, max(1.0, terms) ** -0.5).contiguous(memory_format=memory_format),
        bias=normal((layer.out_channels,)) if layer.bias else None,
        subtrahend=torch.full((1, 1, 1, 1), 0.25, dtype=dtype, device=device) if layer.fused else None,
        grad_output=normal(layer.output_shape).contiguous(memory_format=memory_format),
    )
