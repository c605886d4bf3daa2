"""What the tests and the fuzzer share: candidates, views with other strides, memory that is full of garbage."""

import contextlib
import ctypes
from dataclasses import replace

import torch
import torch.nn.functional as F

import fastconvt
from fastconvt._library import require_operators
from tests import reference

require_operators()  # or each test would fail in its own way

F_FUNCTIONS = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


def candidates(case, dtype, device, op=None, channels_last=False, tf32=False):
    """The names of the plan's candidates that support the call."""
    stride, padding, output_padding, groups, dilation = case.args
    plan = fastconvt.plan(
        op or case.op,
        case.input,
        case.weight,
        bias=case.bias,
        stride=stride,
        padding=padding,
        output_padding=output_padding,
        groups=groups,
        dilation=dilation,
        dtype=dtype,
        memory_format=layout(case, channels_last),
        device=device,
        allow_tf32=tf32,
    )
    names = [row["name"] for row in plan["candidates"] if row["supported"]]
    assert plan["choice"] in names, f"the plan chose {plan['choice']}, which does not support the call"
    return names


def on_every_candidate(case, call, dtype, device, op=None, channels_last=False, tf32=False, skip=()):
    """(name, call()) with each candidate of the plan forced, but those to ``skip``."""
    for name in candidates(case, dtype, device, op, channels_last, tf32):
        if name in skip:
            continue
        with fastconvt.force(name):
            yield name, call()


def on_every_gradient(case, call, dtype, device, channels_last=False, tf32=False, skip=()):
    """(name, call()) with each candidate for the gradient of the input, then of the weight, forced, but those to
    ``skip``; None in place of the gradients that others made."""
    with_bias = replace(case, bias=True)  # whether or not the layer has one, its gradient may be asked for
    for which, own in (("input", (0,)), ("weight", (1, 2))):
        op = f"{case.op}_{which}_gradient"
        for name, grads in on_every_candidate(with_bias, call, dtype, device, op, channels_last, tf32, skip):
            yield name, [grad if i in own or name == "aten" else None for i, grad in enumerate(grads)]


def check_every(outputs, rule):
    """The rule for the outputs by name; equal ones are measured once."""
    checked = []
    for name, y in outputs:
        if any(y.dtype == other.dtype and torch.equal(y, other) for other in checked):
            continue
        try:
            rule([y])
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error
        checked.append(y)


def forward(case, input, weight, bias, **kwargs):
    return getattr(torch.ops.fastconvt, case.op)(input, weight, bias, *case.args, **kwargs)


def forward_act(case, input, weight, bias, activation, alpha=0.01, **kwargs):
    op = getattr(torch.ops.fastconvt, f"{case.op}_act")
    return op(input, weight, bias, *case.args, activation=activation, alpha=alpha, **kwargs)


def backward(case, grad_output, input, weight, mask=(True, True, True), **kwargs):
    op = getattr(torch.ops.fastconvt, f"{case.op}_backward")
    return op(grad_output, input, weight, *case.args, list(mask), **kwargs)


def check_second_derivatives(case, grad_output, input, weight, which, factor, tf32=False):
    """The derivatives of one of the gradients, multiplied by ``factor``: each is one of the plain results again."""
    x, w, grad = (t.detach().requires_grad_() for t in (input, weight, grad_output))
    result = backward(case, grad, x, w, [i == which for i in range(3)], allow_tf32=tf32)[which]
    to_grad, to_x, to_w = torch.autograd.grad(result, (grad, x, w), factor, allow_unused=True)
    assert [t is None for t in (to_x, to_w)] == [which != 1, which != 0]
    if which == 2:
        assert torch.equal(to_grad, factor.reshape(-1, *[1] * case.ndim).expand_as(grad))
        return
    x, w = (factor, w) if which == 0 else (x, factor)
    reference.output_rule(x, w, None, *case.args, tf32=tf32)([to_grad])
    reference.gradients_rule(grad, x, w, *case.args, tf32=tf32)([to_x, to_w, None])


def expected_strides(case, input, weight):
    """The rule of layout: channels_last iff input or weight is so, dense and unambiguously."""
    x = input if case.batched else input.unsqueeze(0)
    shape = case.output if case.batched else (1, *case.output)
    last = is_channels_last(x) or is_channels_last(weight)
    strides = torch.empty(shape, device="meta", memory_format=layout(case, last)).stride()
    return strides if case.batched else strides[1:]


def layout(case, channels_last):
    formats = {2: torch.channels_last, 3: torch.channels_last_3d} if channels_last else {}
    return formats.get(case.ndim, torch.contiguous_format)


def is_channels_last(tensor):
    """Dense in channels_last, and what PyTorch takes for it, which sizes of 1 leave to the strides: the output of an
    upsampling shows that."""
    if tensor.ndim not in (4, 5):
        return False
    memory_format = torch.channels_last if tensor.ndim == 4 else torch.channels_last_3d
    shape = (max(1, tensor.shape[0]), *tensor.shape[1:])  # a batch of 0 counts as one of 1
    like = torch.empty_strided(shape, tensor.stride()).zero_()
    taken = F.interpolate(like, scale_factor=2).stride(1) == 1
    return taken and tensor.is_contiguous(memory_format=memory_format)


def inside_nan(tensor):
    """The values in the middle of a larger block of NaN."""
    block = tensor.new_full([n + 2 for n in tensor.shape], torch.nan)
    view = block[tuple(slice(1, n + 1) for n in tensor.shape)]
    return view.copy_(tensor)


def every_second(tensor):
    """The values at every second place of the last axis, NaN between them."""
    block = tensor.new_full((*tensor.shape[:-1], 2 * tensor.shape[-1]), torch.nan)
    return block[..., ::2].copy_(tensor)


def offset_by_one(tensor):
    """A dense tensor that starts one element into its storage, so that no vector load is aligned."""
    block = tensor.new_full((tensor.numel() + 1,), torch.nan)
    return block[1:].view(tensor.shape).copy_(tensor)


def axes_reversed(tensor):
    """The values with the axes in the opposite order in memory."""
    order = tuple(reversed(range(tensor.ndim)))
    return tensor.permute(order).contiguous().permute(order)


def last_axes_swapped(tensor):
    return tensor.transpose(-1, -2).contiguous().transpose(-1, -2) if tensor.ndim > 1 else tensor


def expanded(tensor):
    """Stride 0 along the last axis: its first value everywhere."""
    return tensor[..., :1].expand_as(tensor)


def expanded_first(tensor):
    """Stride 0 along the first axis."""
    return tensor[:1].expand_as(tensor)


VIEWS = (inside_nan, every_second, offset_by_one, axes_reversed, last_axes_swapped, expanded, expanded_first)


@contextlib.contextmanager
def poisoned_memory(device="cpu"):
    """Within it fresh memory is never zero: torch's empty tensors are NaN, and blocks that the C library gives out are
    full of 0xFE, which is NaN or at least 1e38 in every floating-point type."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    if torch.device(device).type == "cuda":
        poison_cuda_cache(device)
    _perturb_malloc(0x01)  # new blocks get its complement
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        _perturb_malloc(0)


def poison_cuda_cache(device="cuda", megabytes=256):
    """Leave blocks of NaN of every size in the caching allocator."""
    blocks = [torch.full((n,), torch.nan, device=device) for n in (128, 4096, 100_000, 1 << 20, megabytes << 18)]
    del blocks


def _perturb_malloc(byte):
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc only
    if mallopt is not None:
        mallopt(-6, byte)  # M_PERTURB
