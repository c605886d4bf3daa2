"""What is timed: fastconvt and its peers, each a function from a layer's tensors to its output.

A new peer is one function and one row of PEERS.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

import fastconvt
from fastconvt.bench.layers import Layer, Tensors

Forward = Callable[[Tensors], torch.Tensor]
Call = Callable[[], tuple[torch.Tensor, ...]]


def fused_tail(conv: torch.Tensor, subtrahend: torch.Tensor) -> torch.Tensor:
    """What the fused operator does after the convolution, in PyTorch."""
    value = torch.logsumexp(conv, dim=1, keepdim=True)
    value = value * torch.sigmoid(value + 3) / 6
    return torch.clamp(value - subtrahend, -1, 1)


def pytorch(layer: Layer, tensors: Tensors) -> torch.Tensor:
    """The layer in plain PyTorch."""
    function = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[layer.dimensions - 1]
    return tail(layer, function(tensors.input, tensors.weight, tensors.bias, **layer.options), tensors)


def tail(layer: Layer, conv: torch.Tensor, tensors: Tensors) -> torch.Tensor:
    """What follows the convolution in the layer, in PyTorch."""
    if layer.fused:
        return fused_tail(conv, tensors.subtrahend)
    return F.relu(conv, inplace=True) if layer.relu else conv


def ours(layer: Layer, tensors: Tensors, layout: str) -> tuple[Forward, Tensors]:
    function = getattr(fastconvt, layer.operator)
    if layer.fused:
        return lambda t: function(t.input, t.weight, t.bias, t.subtrahend, **layer.options), tensors
    if layer.relu:
        with_activation = getattr(fastconvt, f"{layer.operator}_act")
        return lambda t: with_activation(t.input, t.weight, t.bias, **layer.options, activation="relu"), tensors
    return lambda t: function(t.input, t.weight, t.bias, **layer.options), tensors


def eager(layer: Layer, tensors: Tensors, layout: str) -> tuple[Forward, Tensors]:
    return lambda t: pytorch(layer, t), tensors


def eager_other_layout(layer: Layer, tensors: Tensors, layout: str) -> tuple[Forward, Tensors] | None:
    """Eager in the layout that the data does not have: it pays for converting input and output, not the weight."""
    if layer.dimensions == 1:
        return None
    here, there = layer.memory_format("contiguous"), layer.memory_format("channels_last")
    if layout == "channels_last":
        here, there = there, here

    def forward(t: Tensors) -> torch.Tensor:
        converted = replace(t, input=t.input.contiguous(memory_format=there))
        return pytorch(layer, converted).contiguous(memory_format=here)

    return forward, replace(tensors, weight=tensors.weight.contiguous(memory_format=there))


def flipped(layer: Layer, tensors: Tensors, layout: str) -> tuple[Forward, Tensors] | None:
    """At stride 1, an ordinary convolution with the weight flipped and transposed; making that is part of the call."""
    if set(layer.stride) != {1}:
        return None
    function = (F.conv1d, F.conv2d, F.conv3d)[layer.dimensions - 1]
    # Zeros before and after the input of each axis; what both sides have is the convolution's own padding.
    before = [d * (k - 1) - p for d, k, p in zip(layer.dilation, layer.kernel, layer.padding, strict=True)]
    after = [size + extra for size, extra in zip(before, layer.output_padding, strict=True)]
    padding = [max(0, size) for size in before]
    rest = [(b - p, a - p) for b, a, p in zip(before, after, padding, strict=True)]
    uneven = [size for pair in reversed(rest) for size in pair]  # as F.pad takes them: the last axis first
    keywords = {"padding": padding, "groups": layer.groups, "dilation": layer.dilation}

    def forward(t: Tensors) -> torch.Tensor:
        weight = t.weight.unflatten(0, (layer.groups, -1)).transpose(1, 2).flatten(0, 1)
        weight = weight.flip(list(range(2, weight.dim())))
        input = F.pad(t.input, uneven) if any(uneven) else t.input  # negative sizes crop
        return tail(layer, function(input, weight, t.bias, **keywords), t)

    return forward, tensors


def fill(layer: Layer, tensors: Tensors, layout: str) -> tuple[Forward, Tensors]:
    """No peer but a yardstick: writing the output and nothing else."""
    memory_format, like = layer.memory_format(layout), tensors.grad_output

    def forward(t: Tensors) -> torch.Tensor:
        return torch.empty(like.shape, dtype=like.dtype, device=like.device, memory_format=memory_format).fill_(1.0)

    return forward, tensors


def compiled(layer: Layer, tensors: Tensors, layout: str) -> tuple[Forward, Tensors]:
    torch._dynamo.reset()  # every layer runs the same code object, whose compiled versions are limited in number
    return torch.compile(lambda t: pytorch(layer, t), dynamic=False, fullgraph=True), tensors


@dataclass(frozen=True)
class Peer:
    """A row of PEERS: ``column`` in the results, ``title`` in the table, the modes it can run, the default devices.

    One whose column is not among those of the results is in the table only, and no speed-up is over it.
    """

    column: str
    title: str
    build: Callable[[Layer, Tensors, str], tuple[Forward, Tensors] | None]
    modes: tuple[str, ...] = ("forward", "backward", "train")
    devices: tuple[str, ...] = ("cpu", "cuda")


PEERS = {
    "eager": Peer("eager_ms", "PyTorch", eager),
    "other": Peer("eager_other_layout_ms", "other layout", eager_other_layout),
    "flipped": Peer("flipped_ms", "flipped weight", flipped),
    # A compiled backward may free what it needs, so it cannot be repeated on its own.
    "compile": Peer("compile_ms", "torch.compile", compiled, modes=("forward", "train"), devices=("cuda",)),
    "fill": Peer("fill_ms", "fill", fill, modes=("forward",), devices=()),
}


def build_calls(layer: Layer, tensors: Tensors, layout: str, mode: str, peers: list[str]) -> dict[str, Call]:
    """What to time, by name: ``ours``, then the peers that the layer and the mode have."""
    builders = {"ours": ours} | {name: PEERS[name].build for name in peers if mode in PEERS[name].modes}
    contestants = {name: build(layer, tensors, layout) for name, build in builders.items()}
    return {name: in_mode(*found, mode) for name, found in contestants.items() if found is not None}


def in_mode(forward: Forward, tensors: Tensors, mode: str) -> Call:
    """A call without arguments that runs the forward pass, the backward pass or both; its results are fresh tensors.

    The backward pass gives the gradients of everything that can have one: input, weight, bias and subtrahend.
    """
    if mode == "forward":

        def infer():
            with torch.no_grad():
                return (forward(tensors),)

        return infer

    leaves = [t.detach().requires_grad_() for t in tensors.leaves]
    fresh = iter(leaves)
    names = ("input", "weight", "bias", "subtrahend")
    tensors = replace(tensors, **{name: next(fresh) for name in names if getattr(tensors, name) is not None})
    if mode == "train":

        def train():
            out = forward(tensors)
            return out.detach(), *torch.autograd.grad(out, leaves, tensors.grad_output)

        return train

    graph = []  # the forward pass runs once, at the first call, which is never timed

    def backward():
        if not graph:
            graph.append(forward(tensors))
        return torch.autograd.grad(graph[0], leaves, tensors.grad_output, retain_graph=True)

    return backward
