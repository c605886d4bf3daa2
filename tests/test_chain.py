"""conv_transpose3d_logsumexp_hardswish against the oracle, forward and backward, on every candidate of the plan."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fastconvt
from tests import harness, reference
from tests.cases import CASES, DTYPES, Case
from tests.illegal import CHAIN

pytestmark = pytest.mark.usefixtures("poison")

CHANNELS = (1, 2, 3, 7, 8, 16, 17, 31, 64, 130, 512)
CHAIN_CASES = [case for case in CASES if case.ndim == 3]
CHAIN_CASES += [Case(f"channels_{c}", (2, 3, 2, 3, 4), (3, c, 3, 3, 3), 2, 1) for c in CHANNELS]
CHAIN_CASES += [
    Case("channels_64_in_4_groups", (1, 8, 2, 3, 4), (8, 16, 3, 3, 3), 2, 1, 0, 4),
    Case("channels_17_in_17_groups", (1, 17, 2, 3, 4), (17, 1, 3, 3, 3), 2, 1, 0, 17),
    Case("stride_3", (1, 3, 3, 2, 4), (3, 5, 3, 3, 3), 3, 1, 1),
    Case("dilation_and_stride", (1, 3, 3, 3, 4), (3, 5, 3, 2, 3), (2, 3, 1), 1, 0, 1, (2, 3, 2)),
    Case("output_padding_2", (1, 2, 2, 3, 2), (2, 4, 3, 3, 3), 3, 0, 2),
    Case("stride_beyond_kernel", (1, 2, 2, 3, 2), (2, 4, 2, 1, 2), 4, 0, (3, 2, 0), bias=False),
    Case("long_row", (1, 3, 1, 2, 75), (3, 16, 3, 3, 3), 2, 1, 1),
    Case("many_taps", (1, 5, 9, 4, 6), (5, 16, 5, 4, 3), (1, 2, 2), (5, 0, 1), 0, 1, (1, 2, 1)),
    # More than one tile along each axis.
    Case("tall", (2, 3, 2, 37, 5), (3, 16, 3, 3, 3), 2, 1),
    Case("tall_and_wide", (1, 2, 5, 33, 70), (2, 8, 4, 3, 2), 2, 1),
    Case("unbatched", (3, 2, 3, 4), (3, 16, 3, 3, 3), 2, 1),
]
BOUNDS = {"min": -0.3, "max": 0.5}
BY_NAME = {case.name: case for case in CHAIN_CASES}


def tensors(case, dtype, device, scale=1.0):
    """Input, weight, bias and subtrahend, for values that reach both bounds and all between them."""
    x, w, b = case.tensors(dtype, device)
    return x * scale, w, b, torch.tensor([0.25], dtype=dtype, device=device)


def outputs(case, arguments, device, skip=(), **bounds):
    """(candidate, output) for each of them but those to skip, made twice with the same bits."""
    op = getattr(torch.ops.fastconvt, CHAIN)

    def call():
        y, again = (op(*arguments, *case.args, **bounds) for _ in range(2))
        assert torch.equal(y.nan_to_num(), again.nan_to_num()), "other bits the second time"
        assert y.is_contiguous()
        return y

    return harness.on_every_candidate(case, call, arguments[0].dtype, device, op=CHAIN, skip=skip)


def check_forward(case, arguments, device, **bounds):
    rule = reference.chain_rule(*arguments, *case.args, **bounds)
    harness.check_every(outputs(case, arguments, device, **bounds), rule)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CHAIN_CASES, ids=str)
def test_forward(case, dtype, device):
    arguments = tensors(case, dtype, device)
    for bounds in (BOUNDS, {}, {"min": -torch.inf, "max": torch.inf}):
        check_forward(case, arguments, device, **bounds)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CHAIN_CASES, ids=str)
def test_backward(case, dtype, device):
    arguments = tensors(case, dtype, device)
    op = getattr(torch.ops.fastconvt, f"{CHAIN}_backward")
    shape = reference.logsumexp_hardswish(*arguments, *case.args).shape
    grad = torch.randn(shape, generator=torch.Generator().manual_seed(5)).to(device, dtype)
    grad = reference.away_from_bounds(grad, *arguments, *case.args, **BOUNDS)
    mask = [True, True, case.bias, True]
    rule = reference.chain_gradients_rule(grad, *arguments, *case.args, **BOUNDS)

    def call():
        grads, again = (op(grad, *arguments, *case.args, mask, **BOUNDS) for _ in range(2))
        assert all(map(torch.equal, grads, again)), "other bits the second time"
        return grads

    for _, grads in harness.on_every_candidate(case, call, dtype, device, op=f"{CHAIN}_backward"):
        rule([g if asked else None for g, asked in zip(grads, mask, strict=True)])


@pytest.mark.parametrize("alone", range(4))
def test_backward_computes_what_the_mask_asks(alone, device):
    case = BY_NAME["channels_17"]
    arguments = tensors(case, torch.float32, device)
    op = getattr(torch.ops.fastconvt, f"{CHAIN}_backward")
    grad = torch.ones(reference.logsumexp_hardswish(*arguments, *case.args).shape, device=device)
    grad = reference.away_from_bounds(grad, *arguments, *case.args)
    mask = [i == alone for i in range(4)]
    grads = [g if asked else None for g, asked in zip(op(grad, *arguments, *case.args, mask), mask, strict=True)]
    reference.assert_chain_gradients_accurate(grads, grad, *arguments, *case.args)


@pytest.mark.parametrize("view", harness.VIEWS, ids=lambda view: view.__name__)
def test_views(view, device):
    case = BY_NAME["channels_64_in_4_groups"]
    for dtype in (torch.float32, torch.bfloat16):
        x, w, b, _ = tensors(case, dtype, device)
        subtrahend = torch.tensor([9.0, 0.25, 9.0], dtype=dtype, device=device)[1:2]
        arguments = view(x), view(w), view(b), subtrahend
        check_forward(case, arguments, device, **BOUNDS)
    x, w = (t.contiguous(memory_format=torch.channels_last_3d) for t in tensors(case, torch.float32, device)[:2])
    check_forward(case, (x, w, b.float(), subtrahend.float()), device, **BOUNDS)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1, 1, 1)])
def test_subtrahend_of_any_shape(shape, device):
    case = BY_NAME["channels_3"]
    x, w, b, _ = tensors(case, torch.float32, device)
    arguments = x, w, b, torch.full(shape, -0.125, device=device)
    check_forward(case, arguments, device)
    x.requires_grad_()
    subtrahend = arguments[3].requires_grad_()
    getattr(fastconvt, CHAIN)(x, w, b, subtrahend, *case.args).sum().backward()
    assert subtrahend.grad.shape == shape and x.grad.shape == x.shape


# One channel has the value of the key, the other that of the bias; the convolution is the identity.
EXTREMES = {
    "nan": ([torch.nan, 1.0], 0.5),
    "inf": ([torch.inf, -1.0, -torch.inf], 0.5),
    "all minus inf": ([-torch.inf, 0.0], -torch.inf),
    "plus 900": ([900.0, 899.0, 1.0], 899.5),
    "minus 900": ([-900.0, -901.0, -3.0], -900.5),
    "both ends": ([900.0, -900.0, 0.0], 900.0),
    "30000": ([3e4, -3e4, 2.0], -3e4),
    "below exp's range": ([-88.0, -104.0, -150.0, -200.0], -95.0),
    "around zero": ([-3.5, -3.0, -1.0, -1e-4, 0.0, 1e-4, 3.0], -50.0),
}


@pytest.mark.parametrize("bounds", [{}, {"min": -torch.inf, "max": torch.inf}], ids=["clamped", "open"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", EXTREMES)
def test_extreme_values_are_those_of_torch(name, dtype, bounds, device):
    values, other = EXTREMES[name]
    x = torch.tensor(values, dtype=dtype, device=device).reshape(1, 1, 1, 1, -1)
    w = torch.tensor([1.0, 0.0], dtype=dtype, device=device).reshape(1, 2, 1, 1, 1)
    if not x.isfinite().all():  # 0 * inf would be NaN in the second channel as well: let it see the values
        w[0, 1] = 1
    b = torch.tensor([0.0, other], dtype=dtype, device=device)
    case = Case("identity", tuple(x.shape), tuple(w.shape))
    arguments = x, w, b, torch.tensor([0.25], dtype=dtype, device=device)
    check_forward(case, arguments, device, **bounds)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tap", [0, 1])
@pytest.mark.parametrize("channels", [1, 2, 16, 49])
def test_an_infinite_weight_reaches_its_own_phase_only(channels, tap, dtype, device):
    """Every second output has the tap. ATen's padding with zeros makes a NaN of the others."""
    case = Case("one_tap_a_phase", (1, channels, 20, 1, 15), (channels, 31, 1, 1, 2), (1, 1, 2), (0, 0, 5))
    for value in (torch.inf, -torch.inf):
        arguments = tensors(case, dtype, device)
        arguments[1][-1, 11, ..., tap] = value
        rule = reference.chain_rule(*arguments, *case.args, **BOUNDS)
        harness.check_every(outputs(case, arguments, device, skip=("aten",), **BOUNDS), rule)


@pytest.mark.parametrize("bounds", [{"min": 0.5, "max": -0.5}, {"min": 0.1, "max": 0.1}, {"min": torch.nan}])
def test_odd_bounds_are_those_of_torch(bounds, device):
    case = BY_NAME["channels_7"]
    arguments = tensors(case, torch.float32, device)
    expected = reference.logsumexp_hardswish(*arguments, *case.args, **bounds)
    for _, y in outputs(case, arguments, device, **bounds):
        torch.testing.assert_close(y, expected.float(), equal_nan=True)


def test_gradients_reach_every_argument(device):
    case = BY_NAME["channels_16"]
    leaves = [t.requires_grad_() for t in tensors(case, torch.float32, device)]
    y = getattr(fastconvt, CHAIN)(*leaves, *case.args, **BOUNDS)
    grad = reference.away_from_bounds(torch.ones_like(y), *leaves, *case.args, **BOUNDS)
    grads = torch.autograd.grad(y, leaves, grad)
    reference.assert_chain_gradients_accurate(grads, grad, *leaves, *case.args, **BOUNDS)


MEMORY = """
import resource
import torch
import fastconvt

x, w, b, s = torch.randn(128, 3, 16, 32, 32), torch.randn(3, 16, 3, 3, 3), torch.randn(16), torch.zeros(1)
op, backward = torch.ops.fastconvt.conv_transpose3d_logsumexp_hardswish, {backward}
args = [2], [1], [0], 1, [1]
if backward:
    backward = torch.ops.fastconvt.conv_transpose3d_logsumexp_hardswish_backward
    call = lambda n: backward(torch.ones(n, 1, 31, 63, 63), x[:n], w, b, s, *args, [True] * 4)
else:
    call = lambda n: op(x[:n], w, b, s, *args)
with fastconvt.force({name!r}):
    call(1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    call(128)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak of resident memory in KiB")
@pytest.mark.parametrize(("backward", "most"), [(False, 16), (True, 120)])
def test_memory_beyond_the_output_at_the_reference_size(backward, most):
    """In MB. The convolution's output, which must not exist, would be 1 GB."""
    case = Case("", (128, 3, 16, 32, 32), (3, 16, 3, 3, 3), 2, 1)
    names = [name for name in harness.candidates(case, torch.float32, "cpu", op=CHAIN) if name != "aten"]
    outputs = 128 * (3 * 16 * 32 * 32 + 31 * 63 * 63) * 4 if backward else 128 * 31 * 63 * 63 * 4
    for name in names[:1]:
        code = MEMORY.format(backward=backward, name=name)
        folder = Path(__file__).parent.parent
        done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-2000:]
        extra = int(done.stdout) * 1024 - outputs
        assert extra <= most * 1e6, f"{name}: {extra / 1e6:.0f} MB"
