"""Inputs that broke other implementations of transposed convolution, and what is right for them."""

import copy
import functools
import math
import random

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import fastconvt
from tests import harness, reference
from tests.cases import Case, draw_case, to_channels_last
from tests.illegal import CHAIN

pytestmark = pytest.mark.usefixtures("poison")


def on_every_candidate(device, x, w, b=None, *geometry):
    """(candidate, output) of the operator for these tensors and F's geometry arguments."""
    case = Case("", tuple(x.shape), tuple(w.shape), *geometry, bias=b is not None)
    call = functools.partial(harness.forward, case, x, w, b)
    return harness.on_every_candidate(case, call, x.dtype, device)


def check(device, x, w, b, *geometry):
    harness.check_every(on_every_candidate(device, x, w, b, *geometry), reference.output_rule(x, w, b, *geometry))


def ramp(*shape, **kwargs):
    return torch.arange(1.0, math.prod(shape) + 1, **kwargs).view(shape)


EXACT = {
    "output_padding is computed, not filled with zeros": (
        (torch.ones(1, 1, 1, 1), ramp(1, 1, 3, 3) - 1, None, 2, 1, 1),
        [[[[4, 5], [7, 8]]]],
    ),
    "padding rotates the taps where kernel and stride are equal": (
        (torch.ones(1, 1, 4, 4), ramp(1, 1, 2, 2), None, 2, 1, 1),
        [[[[4, 3, 4, 3, 4, 3, 4], [2, 1, 2, 1, 2, 1, 2]] * 3 + [[4, 3, 4, 3, 4, 3, 4]]]],
    ),
    "output_padding between stride and dilation": (
        (torch.full((1, 1, 8, 8), 0.5), torch.ones(1, 3, 2, 2), None, 1, 3, 1, 1, 2),
        [[[[2.0] * 5] * 5] * 3],
    ),
    "outputs without a tap are the bias": (
        (torch.ones(1, 1, 2, 2), torch.ones(1, 1, 1, 1), torch.tensor([5.0]), 3),
        [[[[6, 5, 5, 6], [5, 5, 5, 5], [5, 5, 5, 5], [6, 5, 5, 6]]]],
    ),
    "padding crops all but the middle": (
        (ramp(1, 1, 3, 3), torch.full((1, 1, 1, 1), 2.0), None, 1, 1),
        [[[[10]]]],
    ),
    "dilation before a single pixel": (
        (torch.ones(1, 4, 1, 1), torch.ones(4, 1, 3, 3), None, 1, 0, 1, 1, 2),
        [[[[4, 0, 4, 0, 4, 0], [0] * 6] * 3]],
    ),
}


@pytest.mark.parametrize("name", EXACT)
def test_exact(name, device):
    (*arguments,), expected = EXACT[name]
    x, w, b = (t.to(device) if t is not None else None for t in arguments[:3])
    for candidate, y in on_every_candidate(device, x, w, b, *arguments[3:]):
        assert y.tolist() == expected, candidate


def test_last_rows_that_no_tap_reaches_are_the_bias(device):
    b = torch.tensor([7.0], device=device)
    for candidate, y in on_every_candidate(
        device, torch.ones(1, 1, 2, 2, device=device), torch.ones(1, 1, 2, 2, device=device), b, 4, 0, 3
    ):
        assert y.shape == (1, 1, 9, 9), candidate
        assert (y[..., -1, :] == 7).all() and (y[..., -1] == 7).all() and y[0, 0, 0, 0] == 8, candidate
    x, b = torch.randn(1, 1, 1, 3, device=device), torch.tensor([9.0], device=device)
    for candidate, y in on_every_candidate(device, x, torch.randn(1, 1, 2, 2, device=device), b, 1, 0, 2, 1, 4):
        assert y.shape == (1, 1, 7, 9), candidate
        assert (y[..., 5:, :] == 9).all() and (y[..., 7:] == 9).all(), candidate


SHAPES = {
    "doubling in 2D": ((1, 256, 7, 7), (256, 4, 3, 3), (2, 1, 1), (1, 4, 14, 14)),
    "doubling in 3D": ((1, 64, 6, 15, 20), (64, 3, 3, 3, 3), (2, 1, 1), (1, 3, 12, 30, 40)),
    "2 H - 1 in 3D": ((1, 64, 6, 15, 20), (64, 3, 3, 3, 3), (2, 1), (1, 3, 11, 29, 39)),
    "output_padding of one axis": ((1, 8, 6, 5, 4), (8, 3, 3, 3, 3), (2, 1, (0, 1, 0)), (1, 3, 11, 10, 7)),
    "output_padding of the others": ((1, 8, 6, 5, 4), (8, 3, 3, 3, 3), (2, 1, (1, 0, 1)), (1, 3, 12, 9, 8)),
    "height of one": ((1, 16, 1, 8), (16, 5, 1, 3), ((1, 2), (0, 1), (0, 1)), (1, 5, 1, 16)),
    "stride of one along depth": ((4, 8, 5, 6, 6), (8, 4, 1, 3, 3), ((1, 2, 2), (0, 1, 1)), (4, 4, 5, 11, 11)),
    "groups before dilation": ((1, 2, 3, 3), (2, 2, 3, 3), (1, 0, 0, 1, 2), (1, 2, 7, 7)),
    "output channels are weight.size(1) * groups": ((1, 4, 2, 2), (4, 3, 2, 2), (1, 0, 0, 2), (1, 6, 3, 3)),
    "odd and not square": ((2, 16, 128, 80), (16, 8, 2, 2), (2,), (2, 8, 256, 160)),
    "decoder from one pixel": ((2, 64, 1, 1), (64, 16, 5, 5), (2,), (2, 16, 5, 5)),
}


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_and_values(name, device):
    x_shape, w_shape, geometry, expected = SHAPES[name]
    case = Case("", x_shape, w_shape, *geometry)
    assert case.output == expected
    check(device, *case.tensors(device=device), *geometry)


@pytest.mark.parametrize("ndim", [2, 3])
def test_adjoint_of_the_convolution(ndim, device):
    """<conv(x), z> == <x, conv_transpose(z)> with the output_padding that gives x's size back."""
    source = random.Random(ndim)
    conv = (F.conv2d, F.conv3d)[ndim - 2]
    for _ in range(20):
        groups, (c_in, c_out) = source.choice([1, 2, 3]), (source.randint(1, 3), source.randint(1, 3))
        kernel, stride, padding, dilation = ([source.randint(lo, 3) for _ in range(ndim)] for lo in (1, 1, 0, 1))
        size = [d * (k - 1) + 1 + source.randint(0, 5) for d, k in zip(dilation, kernel, strict=True)]
        axes = zip(size, kernel, stride, padding, dilation, strict=True)
        output_padding = [(n + 2 * p - d * (k - 1) - 1) % s for n, k, s, p, d in axes]
        x = torch.randn(2, groups * c_in, *size, dtype=torch.float64, device=device)
        w = torch.randn(groups * c_out, c_in, *kernel, dtype=torch.float64, device=device)
        y = conv(x, w, None, stride, padding, dilation, groups)
        z = torch.randn_like(y)
        for name, back in on_every_candidate(device, z, w, None, stride, padding, output_padding, groups, dilation):
            assert back.shape == x.shape, name
            torch.testing.assert_close((y * z).sum(), (x * back).sum(), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    "geometry", [(2, 0, 0, 1, 1), (1, 0, 0, 1, 2), ((2, 3), 0, 0, 1, (3, 1)), ((2, 3), 1, 1, 2, 2)]
)
def test_gradcheck_with_stride_and_dilation_that_differ(geometry, device):
    groups = geometry[3]
    shapes = (1, 4, 4, 3), (4, 3, 2, 3), (3 * groups,)
    tensors = [torch.randn(s, dtype=torch.float64, device=device, requires_grad=True) for s in shapes]
    assert torch.autograd.gradcheck(lambda x, w, b: fastconvt.conv_transpose2d(x, w, b, *geometry), tensors)


@pytest.mark.parametrize("layouts", [(False, True), (True, False), (True, True)])
@pytest.mark.parametrize("ndim", [2, 3])
def test_channels_last_of_one_input_channel(ndim, layouts, device):
    case = Case("", (1, 1, *[2] * ndim), (1, 2, *[5] * ndim), bias=False)
    x, w, _ = case.tensors(device=device, channels_last=layouts)
    x.fill_(1)
    w.fill_(1)
    line = torch.tensor([1.0, 2, 2, 2, 2, 1], device=device)
    expected = torch.einsum("i,j->ij", line, line) if ndim == 2 else torch.einsum("i,j,k->ijk", line, line, line)
    for name, y in on_every_candidate(device, x, w, None):
        assert (y == expected).all(), name


def test_slices_of_larger_tensors(device):
    base = torch.randn(3, 10, 9, 9, device=device)
    w = torch.randn(6, 4, 3, 3, device=device).transpose(2, 3)[:, ::2]
    check(device, base[1:, 1:7, ::2, 1::2], w, torch.randn(2, 5, device=device)[:, 1], 2)
    w5d = torch.randn(3, 16, 3, 3, 3, device=device)
    check(device, torch.randn(2, 3, 16, 32, device=device), w5d[:, :, 1], None)
    check(device, base[:1, :1].expand(2, 6, 9, 9), w[:1].expand(6, 2, 3, 3), None, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_infinite_weights_give_nan_only_where_taps_cancel(dtype, device):
    inf, nan = torch.inf, torch.nan
    x = torch.tensor([[[[1.0, -1], [2, 3]]]], dtype=dtype, device=device)
    expected = torch.tensor([[inf, nan, -inf], [inf, nan, nan], [inf, inf, inf]], dtype=dtype)
    for name, y in on_every_candidate(device, x, torch.full_like(x, inf), None):
        if name != "aten" or device == "cpu":  # cuDNN multiplies by zeros that are not there
            torch.testing.assert_close(y[0, 0].cpu(), expected, equal_nan=True, rtol=0, atol=0)
    x, w = torch.tensor([[[nan, 1.0]]], dtype=dtype, device=device), torch.ones(1, 1, 1, dtype=dtype, device=device)
    for _, y in on_every_candidate(device, x, w, None, 2):
        torch.testing.assert_close(y.cpu(), torch.tensor([[[nan, 0, 1.0]]], dtype=dtype), equal_nan=True)


def test_halves_are_accumulated_in_float32(device):
    draw = np.random.default_rng(1146)
    x = torch.from_numpy(draw.uniform(-1, 13, (9, 9, 20, 52))).to(device, torch.float16)
    w = torch.from_numpy(draw.uniform(-2, -1, (9, 11, 12, 84))).to(device, torch.float16)
    expected = reference.conv_transpose(x, w, None, 1, 12)
    assert round(expected[4, 8, 2, 70].item(), 2) == -50783.57
    for name, y in on_every_candidate(device, x, w, None, 1, 12):
        assert y.shape == (9, 11, 7, 111) and y[4, 8, 2, 70] == -50784, name
        # Half a unit of 32 and a bit; matrix units round their partial sums as well.
        assert (y - expected).abs().max() < (33 if name in ("aten", "phase_tma") else 17), name


def eager_and_compiled(name):
    torch._dynamo.reset()
    function = getattr(fastconvt, name)
    return function, torch.compile(function, fullgraph=True, dynamic=False, backend="eager")


@pytest.mark.parametrize("groups", [1, 8])
def test_empty_output_is_one_error_for_every_backend(groups, device):
    x, w = torch.randn(1, 8, 14, 14, device=device), torch.randn(8, 8 // groups, 3, 3, device=device)
    text = (
        r"Given input size per channel: \(14 x 14\)\. Calculated output size per channel: \(0 x 16\)\. Output size is"
    )
    pixel = torch.ones(1, 1, 2, 2, device=device)
    for call in eager_and_compiled("conv_transpose2d"):
        with pytest.raises(RuntimeError, match=text):
            call(x, w, None, 1, (8, 0), 0, groups)
        with pytest.raises(RuntimeError, match=r"\(-5 x -5\)"):
            call(pixel, pixel, None, 1, 4)


def test_fused_operator_has_the_checks_of_the_plain_one(device):
    x, w = torch.randn(1, 1, 1, 1, 1, device=device), torch.randn(1, 1, 2, 2, 2, device=device)
    for name in ("conv_transpose3d", CHAIN):
        arguments = (x, w, None) if name != CHAIN else (x, w, None, torch.zeros(1, device=device))
        for call in eager_and_compiled(name):
            with pytest.raises(RuntimeError, match=r"\(0 x 0 x 0\)"):
                call(*arguments, 1, 1)


def test_batch_of_zero_after_another_call(device):
    shapes = (2, 3, 3, 3), (3,)
    for batch in (2, 0):
        x = torch.randn(batch, 2, 4, 4, device=device, requires_grad=True)
        w, b = (torch.randn(s, device=device, requires_grad=True) for s in shapes)
        y = fastconvt.conv_transpose2d(x, w, b, 2)
        y.sum().backward()
        assert y.shape == (batch, 3, 9, 9) and x.grad.shape == x.shape
    assert (w.grad == 0).all() and w.grad.shape == w.shape and (b.grad == 0).all() and b.grad.shape == (3,)


def test_gradients_of_cropped_inputs_are_zero(device):
    x = ramp(1, 1, 3, 3, device=device).requires_grad_()
    w = torch.full((1, 1, 1, 1), 2.0, device=device, requires_grad=True)
    y = fastconvt.conv_transpose2d(x, w, None, 1, 1)
    y.sum().backward()
    assert y.tolist() == [[[[10]]]] and w.grad.tolist() == [[[[5]]]]
    assert x.grad.tolist() == [[[[0, 0, 0], [0, 2, 0], [0, 0, 0]]]]
    x, w = torch.ones(1, 1, 1, 4, device=device), torch.ones(1, 1, 5, 5, device=device)
    _, grad_w, _ = harness.backward(Case("", (1, 1, 1, 4), (1, 1, 5, 5), 1, 2), torch.ones_like(x), x, w)
    assert grad_w.tolist() == [[[[0] * 5, [0] * 5, [2, 3, 4, 3, 2], [0] * 5, [0] * 5]]]


def test_backward_with_dilation_and_output_padding(device):
    x = torch.ones(1, 4, 1, 1, device=device, requires_grad=True)
    w = torch.ones(4, 1, 3, 3, device=device, requires_grad=True)
    fastconvt.conv_transpose2d(x, w, None, 1, 0, 1, 1, 2).sum().backward()
    assert (x.grad == 9).all() and (w.grad == 1).all()


@pytest.mark.parametrize(
    "case",
    [
        Case("", (1, 7, 3, 6, 2), (7, 1, 14, 5, 4), (2, 4, 2), (3, 2, 1)),
        Case("", (2, 8, 6, 3, 3), (8, 3, 6, 2, 2), (2, 1, 1), (5, 0, 0)),
        Case("", (2, 59, 6, 6, 4), (59, 3, 12, 4, 9), (4, 1, 3), (11, 1, 8)),
        Case("", (2, 1, 4, 6, 3), (1, 1, 14, 1, 3), (2, 1, 3), (6, 0, 0), (1, 0, 1)),
        Case("", (2, 6, 32), (6, 3, 5), 4, 15, 0, 1, 4),
        Case("", (3, 66, 38), (66, 58, 5), 4, 16, 1, 1, 4),
    ],
    ids=lambda case: "x".join(map(str, case.weight)),
)
def test_weight_gradient_where_much_is_padded(case, device):
    """oneDNN leaves the bounds of its tensors here: values of 1e20, other ones the next time, or a corrupt heap."""
    x, w, _ = case.tensors(device=device)
    grad = case.grad_output(device=device)
    rule = reference.gradients_rule(grad, x, w, *case.args)
    for _ in range(5):
        rule(harness.backward(case, grad, x, w))


@pytest.mark.parametrize(
    "case",
    [
        Case("", (3, 6, 1, 6, 1), (6, 1, 4, 13, 3), (4, 1, 3), (1, 8, 1), (1, 0, 2)),
        Case("", (2, 2, 3, 1), (2, 1, 4, 4), (1, 2), (2, 1), 0, 1, (2, 1)),
    ],
    ids=["3d", "2d"],
)
def test_input_gradient_in_channels_last(case, device):
    """oneDNN reads memory that nobody wrote here, which is full of garbage in these tests."""
    x, w, _ = case.tensors(device=device)
    x = to_channels_last(x)
    grad = case.grad_output(device=device)
    with harness.poisoned_memory(device):
        reference.assert_gradients_accurate(harness.backward(case, grad, x, w), grad, x, w, *case.args)


def test_nothing_remembers_old_weights(device):
    module = torch.nn.ConvTranspose2d(3, 5, 3, 2, device=device)
    x = torch.randn(2, 3, 4, 5, device=device)

    def call():
        w, b = module.weight, module.bias
        y = fastconvt.conv_transpose2d(x, w, b, 2)
        reference.assert_accurate(y, x, w, b, 2)
        return y

    call()
    module.weight.data.copy_(torch.randn_like(module.weight))
    call().sum().backward()
    torch.optim.SGD(module.parameters(), 0.5).step()
    call()
    module.load_state_dict(copy.deepcopy(torch.nn.ConvTranspose2d(3, 5, 3, 2).state_dict()))
    call()
    for _ in range(20):  # where the last one lay, most likely
        module.weight = torch.nn.Parameter(torch.randn(3, 5, 3, 3, device=device))
        call()


LONG = {
    "batch of 65536": Case("", (65536, 1, 2, 2), (1, 1, 2, 2), 2),
    "70000 rows": Case("", (1, 1, 70000, 2), (1, 1, 2, 2), 2),
    "70000 columns": Case("", (1, 1, 2, 70000), (1, 1, 2, 3), 2, 1, 1),
    "65536 groups": Case("", (1, 65536, 2, 2), (65536, 1, 2, 2), 2, 0, 0, 65536),
    "batch of 70000 pixels in 3D": Case("", (70000, 1, 1, 1, 1), (1, 1, 2, 2, 1), 2),
    "65537 output channels": Case("", (1, 2, 2, 2), (2, 65537, 1, 2), 2),
    "65537 input channels": Case("", (1, 65537, 2, 2), (65537, 2, 1, 2), 2),
    "70000 planes": Case("", (1, 1, 70000, 1, 2), (1, 1, 2, 1, 2), (2, 1, 1)),
}


@pytest.mark.parametrize("name", LONG)
def test_more_than_65535_along(name, device):
    case = LONG[name]
    dtype = torch.float16 if "batch" in name else torch.float32
    x, w, b = case.tensors(dtype, device)
    check(device, x, w, b, *case.args)
    grad = case.grad_output(dtype, device)
    reference.assert_gradients_accurate(harness.backward(case, grad, x, w), grad, x, w, *case.args)


def test_same_bits_run_to_run(device):
    cases = [
        Case("", (1, 24, 19, 27), (24, 24, 5, 5), 2),
        Case("", (1, 12, 5, 9, 7), (12, 8, 3, 3, 3), 2, 1),
        Case("", (8, 16, 9, 11), (16, 1, 4, 4), 2, 1, 0, 16),
    ]
    for case in cases:
        x, w, b = case.tensors(device=device)
        grad = case.grad_output(device=device)
        for name in harness.candidates(case, torch.float32, device):
            with fastconvt.force(name):
                first = harness.forward(case, x, w, b), *harness.backward(case, grad, x, w)
                for _ in range(20):
                    again = harness.forward(case, x, w, b), *harness.backward(case, grad, x, w)
                    assert all(map(torch.equal, first, again)), name


def test_gradients_are_there(device):
    """An operator whose body detaches gives outputs that require a gradient which never comes."""
    source = random.Random(3)
    for _ in range(10):
        case = draw_case(source.randint, 500)
        leaves = [t.requires_grad_() for t in case.tensors(device=device) if t is not None]
        getattr(fastconvt, case.op)(*leaves, *[None] * (not case.bias), *case.args).sum().backward()
        assert all(t.grad is not None and t.grad.shape == t.shape for t in leaves)
