"""Derivatives of the operators: first and second ones in reverse mode, torch.func, vmap, and what is refused."""

import warnings

import pytest
import torch
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fastconvt
from fastconvt import _gradients, _shapes
from tests import harness, reference
from tests.cases import BY_NAME, Case

OPS = torch.ops.fastconvt
CHAIN_NAME = "conv_transpose3d_logsumexp_hardswish"
CHAIN = getattr(OPS, CHAIN_NAME)
CHAIN_CASE = Case("chain", (3, 4, 2, 3, 2), (4, 3, 2, 3, 1), (2, 1, 3), (1, 0, 0), (1, 0, 2), 2, (1, 2, 1))
NAMES = ("unequal_1d", "unequal_2d", "unequal_3d", "unbatched_2d", "dilation_gcd_2", "output_padding_beyond_stride")
SMALL = [
    Case("second_1d", (2, 4, 2), (4, 1, 2), 3, 1, 2, 2, 2),
    Case("second_2d", (1, 4, 2, 2), (4, 2, 2, 2), 2, 0, 1, 2, 2),
    Case("second_2d_unequal", (2, 2, 2, 3), (2, 1, 3, 2), (2, 3), (1, 0), (1, 2), 1, (2, 1)),
    Case("second_3d", (1, 2, 1, 2, 2), (2, 1, 2, 1, 2), (1, 2, 3), (0, 0, 1), (0, 1, 2), 2, (2, 1, 1)),
    Case("second_unbatched", (2, 2, 3), (2, 3, 2, 2), 2, 1, 1),
]


def leaves(case, bias=True, device="cpu"):
    x, w, b = (None if t is None else t.requires_grad_() for t in case.tensors(torch.float64, device))
    return (x, w, b) if bias and case.bias else (x, w)


def call(case):
    return lambda x, w, b=None: harness.forward(case, x, w, b)


@pytest.mark.parametrize("name", NAMES)
def test_gradcheck(name, device):
    case = BY_NAME[name]
    assert gradcheck(call(case), leaves(case, device=device), fast_mode=True)


@pytest.mark.parametrize("activation", ["none", "tanh", "gelu"])
@pytest.mark.parametrize("case", SMALL, ids=str)
def test_first_and_second_derivatives_on_every_candidate(case, activation, device):
    """Of the forward and of both gradients, where they take float64; tests/test_gpu.py has the others."""
    function = call(case)
    if activation != "none":
        function = lambda x, w, b=None: harness.forward_act(case, x, w, b, activation)  # noqa: E731
    ops = case.op, f"{case.op}_input_gradient", f"{case.op}_weight_gradient"
    for name in dict.fromkeys(name for op in ops for name in harness.candidates(case, torch.float64, device, op)):
        with fastconvt.force(name):
            assert gradcheck(function, leaves(case, device=device), fast_mode=True), name
            assert gradgradcheck(function, leaves(case, device=device), fast_mode=True), name


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("case", SMALL, ids=str)
def test_first_and_second_derivatives(case, bias):
    assert gradcheck(call(case), leaves(case, bias), fast_mode=True)
    assert gradgradcheck(call(case), leaves(case, bias), fast_mode=case is not SMALL[0])


def test_third_derivative_is_that_of_torch():
    case = Case("third", (1, 4, 2, 2), (4, 2, 2, 2), 2, 1, 0, 2, 2)  # PyTorch's own refuses an output padding

    def third(function):
        x, w, b = leaves(case)
        y = function(x, w, b, *case.args)
        total = y.sin().sum()
        for _ in range(3):
            grads = torch.autograd.grad(total, (x, w, b), create_graph=True)
            total = sum(grad.square().sum() for grad in grads)
        return grads

    ours, torchs = third(OPS.conv_transpose2d), third(torch.nn.functional.conv_transpose2d)
    for ours_, torchs_ in zip(ours, torchs, strict=True):
        torch.testing.assert_close(ours_, torchs_)


def test_second_derivative_outside_autocast_of_the_first():
    case = SMALL[1]
    x, w, _ = (t.requires_grad_() for t in case.tensors())
    y = harness.forward(case, x, w, None).sin().sum()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        grad_x, grad_w = torch.autograd.grad(y, (x, w), create_graph=True)
        total = grad_x.square().sum() + grad_w.square().sum()
        grads = torch.autograd.grad(total, (x, w))
    y = harness.forward(case, x, w, None).sin().sum()
    grad_x, grad_w = torch.autograd.grad(y, (x, w), create_graph=True)
    expected = torch.autograd.grad(grad_x.square().sum() + grad_w.square().sum(), (x, w))
    for grad, exact in zip(grads, expected, strict=True):
        torch.testing.assert_close(grad, exact)


def test_gradients_of_an_empty_batch_are_zero():
    x, w, b = (t.requires_grad_() for t in BY_NAME["batch_0"].tensors())
    y = OPS.conv_transpose2d(x, w, b, [2])
    y.sum().backward()
    assert y.shape == (0, 3, 9, 9) and x.grad.shape == x.shape
    assert torch.equal(w.grad, torch.zeros_like(w)) and torch.equal(b.grad, torch.zeros_like(b))


def test_gradient_of_inputs_that_are_cropped_away_is_zero(poison):
    x, w = torch.arange(1.0, 10).reshape(1, 1, 3, 3).requires_grad_(), torch.full((1, 1, 1, 1), 2.0)
    y = OPS.conv_transpose2d(x, w, None, [1], [1])
    y.sum().backward()
    assert y.item() == 10 and x.grad.flatten().tolist() == [0, 0, 0, 0, 2, 0, 0, 0, 0]


def test_gradient_with_output_padding_from_dilation():
    x, w = (torch.ones(1, 4, 1, 1, requires_grad=True), torch.ones(4, 1, 3, 3, requires_grad=True))
    y = OPS.conv_transpose2d(x, w, None, [1], [0], [1], 1, [2])
    y.sum().backward()
    expected = torch.zeros(6, 6)
    expected[::2, ::2] = 4
    assert torch.equal(y[0, 0], expected)
    assert torch.equal(x.grad, torch.full_like(x, 9)) and torch.equal(w.grad, torch.ones_like(w))


@pytest.mark.parametrize("mask", [(True, False, False), (False, True, False), (False, False, True), (False,) * 3])
@pytest.mark.parametrize("name", ["unequal_1d", "unequal_2d", "unbatched_2d", "unequal_3d"])
def test_backward_computes_what_the_mask_asks(name, mask):
    case = BY_NAME[name]
    x, w, _ = case.tensors()
    grads = harness.backward(case, case.grad_output(), x, w, mask)
    assert [grad.shape for grad, asked in zip(grads, mask, strict=True) if not asked] == [(0,)] * mask.count(False)
    asked = [grad if asked else None for grad, asked in zip(grads, mask, strict=True)]
    reference.assert_gradients_accurate(asked, case.grad_output(), x, w, *case.args)


def test_frozen_weight_and_input_changed_in_place():
    case = SMALL[0]
    x, w, b = case.tensors()
    harness.forward(case, x.requires_grad_(), w, b).sum().backward()
    assert x.grad is not None and w.grad is None
    y = harness.forward(case, x.detach(), w.requires_grad_(), b).sum()
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_checkpointing():
    case = BY_NAME["unequal_2d"]
    x, w, b = leaves(case)
    run = torch.utils.checkpoint.checkpoint
    expected = torch.autograd.grad(call(case)(x, w, b).sin().sum(), (x, w, b))
    actual = torch.autograd.grad(run(call(case), x, w, b, use_reentrant=False).sin().sum(), (x, w, b))
    assert all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True))


# The fused chain


def chain_leaves(dtype=torch.float64, bias=True, device="cpu"):
    x, w, b = CHAIN_CASE.tensors(dtype, device)
    return [t.requires_grad_() for t in (x, w, b if bias else None) if t is not None] + [
        torch.tensor([[0.1]], dtype=dtype, device=device, requires_grad=True)
    ]


def chain(*tensors, **kwargs):
    x, w, *bias, subtrahend = tensors
    return CHAIN(x, w, bias[0] if bias else None, subtrahend, *CHAIN_CASE.args, **kwargs)


def torch_chain(x, w, b, subtrahend, min=-1.0, max=1.0):
    conv = torch.nn.functional.conv_transpose3d(x, w, b, *CHAIN_CASE.args)
    return reference.chain_tail(conv, subtrahend.reshape(()), min, max)


@pytest.mark.parametrize("bias", [True, False])
def test_chain_gradcheck(bias, device):
    ops = CHAIN_NAME, f"{CHAIN_NAME}_backward"
    for name in {name for op in ops for name in harness.candidates(CHAIN_CASE, torch.float64, device, op)}:
        with fastconvt.force(name):
            assert gradcheck(chain, chain_leaves(bias=bias, device=device), fast_mode=True), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("chunk", [1, 700, 2**26])
def test_chain_gradients_in_chunks_of_the_batch(dtype, chunk, monkeypatch):
    monkeypatch.setattr(_gradients, "_CHUNK_BYTES", chunk)
    tensors = chain_leaves(dtype)
    bounds = {"min": -0.05, "max": 0.3}
    y = chain(*tensors, **bounds)
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(5)).to(dtype)
    grad = reference.away_from_bounds(grad, *tensors, *CHAIN_CASE.args, **bounds)
    grads = torch.autograd.grad(y, tensors, grad)
    tensors = [t.detach() for t in tensors]
    reference.assert_chain_gradients_accurate(grads, grad, *tensors, *CHAIN_CASE.args, **bounds)


def test_chain_gradients_at_the_bounds_of_clamp():
    # One channel of zeros: logsumexp and h are exactly 0, and the value before the clamp is exactly 0 - 0.25. On a
    # bound the gradient passes; PyTorch's own did so before 2.14 and does not since.
    shapes = ((2, 1, 1, 2, 2), (1, 1, 1, 1, 1), (1,))
    tensors = [torch.zeros(shape, dtype=torch.float64) for shape in shapes]
    subtrahend = torch.tensor([0.25], dtype=torch.float64, requires_grad=True)
    for bounds in ((-0.25, 1.0), (-1.0, -0.25), (-0.24, 1.0), (-1.0, -0.26), (0.5, -0.5)):
        y = CHAIN(*tensors, subtrahend, min=bounds[0], max=bounds[1])
        (grad,) = torch.autograd.grad(y.sum(), subtrahend)
        assert grad.item() == (-8 if bounds[0] <= -0.25 <= bounds[1] else 0)


def test_chain_gradients_of_nan_and_inf():
    for special in (torch.nan, torch.inf, -torch.inf):
        tensors = chain_leaves()
        with torch.no_grad():
            tensors[0][0, 1, 1, 1, 1] = special
        ours = torch.autograd.grad(chain(*tensors).sum(), tensors)
        torchs = torch.autograd.grad(torch_chain(*tensors).sum(), tensors)
        torch.testing.assert_close(ours, torchs, equal_nan=True)


def test_chain_backward_of_unbatched_and_empty_inputs():
    x, w, b, subtrahend = chain_leaves()
    single = chain(x[1], w, b, subtrahend)
    assert torch.equal(single, chain(x, w, b, subtrahend)[1])
    grads = torch.autograd.grad(single.sum(), (x, w, subtrahend))
    expected = torch.autograd.grad(chain(x, w, b, subtrahend)[1].sum(), (x, w, subtrahend))
    torch.testing.assert_close(grads, expected)
    grads = torch.autograd.grad(chain(x[:0], w, b, subtrahend).sum(), (w, b, subtrahend))
    assert not any(grad.any() for grad in grads) and grads[2].shape == (1, 1)


class Largest(TorchDispatchMode):
    """The bytes of the largest tensor that any operator returns."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.bytes = max(self.bytes, *(t.numel() * t.element_size() for t in tensors), 0)
        return result


def test_chain_backward_never_holds_the_whole_convolution(monkeypatch):
    case = Case("", (40, 3, 4, 4, 4), (3, 16, 3, 3, 3), 2, 1)
    x, w, b = case.tensors()
    full = 4 * torch.Size(case.output).numel()
    monkeypatch.setattr(_gradients, "_CHUNK_BYTES", full // 10)
    subtrahend, grad = torch.zeros(()), torch.ones(case.output)[:, :1]
    tensors = {"input": x, "weight": w, "bias": b, "subtrahend": subtrahend, "grad_output": grad}
    checked = _shapes.check_call("", 3, tensors, *case.args)
    with Largest() as largest:
        _gradients.chain_backward(grad, (x, w, b, subtrahend), checked, [True] * 4, -1.0, 1.0, False)
    assert 0 < largest.bytes <= full // 10


def test_second_derivative_of_the_chain_raises():
    tensors = chain_leaves()
    grads = torch.autograd.grad(chain(*tensors).sum(), tensors, create_graph=True)
    with pytest.raises(RuntimeError, match="conv_transpose3d_logsumexp_hardswish has no second derivative"):
        grads[0].sum().backward()


# Forward mode


def test_forward_mode_raises():
    case = BY_NAME["unequal_2d"]
    x, w, b = case.tensors()
    text = "fastconvt::conv_transpose2d has no forward-mode derivative"
    with pytest.raises(RuntimeError, match=text):
        torch.func.jvp(lambda x: harness.forward(case, x, w, b), (x,), (x,))
    with pytest.raises(RuntimeError, match=text):
        torch.func.jacfwd(lambda b: harness.forward(case, x, w, b))(b)
    gradient = torch.func.grad(lambda x: harness.forward(case, x, w, b).square().sum())
    for transform in (lambda x: torch.func.jvp(gradient, (x,), (x,)), torch.func.jacfwd(gradient)):
        with pytest.raises(RuntimeError, match="has no forward-mode derivative"):
            transform(x)
    for index in range(3):
        with forward_ad.dual_level(), pytest.raises(RuntimeError, match=text):
            tensors = [x, w.requires_grad_(), b]
            tensors[index] = forward_ad.make_dual(tensors[index].detach(), torch.ones_like(tensors[index]))
            harness.forward(case, *tensors)
    with forward_ad.dual_level():
        assert harness.forward(case, x, w, b).requires_grad


@pytest.mark.parametrize("name", ["conv_transpose2d_backward", "conv_transpose3d_logsumexp_hardswish"])
def test_forward_mode_of_the_others_raises(name):
    case = BY_NAME["unequal_2d"] if name.endswith("backward") else CHAIN_CASE
    x, w, b = case.tensors()
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match=f"fastconvt::{name} has no forward-mode"):
        w = forward_ad.make_dual(w, w)
        if name.endswith("backward"):
            harness.backward(case, case.grad_output(), x, w)
        else:
            chain(x, w, b, torch.zeros(1))


# torch.func


@pytest.fixture
def no_fallback():
    """vmap has a rule of ours for every operator inside: PyTorch warns where it has none and loops."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*performance drop.*")
        yield


def mapped_tensors(case, in_dims, size=3):
    torch.manual_seed(0)
    shapes = (case.input, case.weight, (case.out_channels,))
    full = [
        shape if dim is None else (*shape[:dim], size, *shape[dim:]) for shape, dim in zip(shapes, in_dims, strict=True)
    ]
    return [torch.randn(shape, dtype=torch.float64) for shape in full]


def loop(function, in_dims, tensors, size=3):
    rows = [
        [t if dim is None else t.select(dim, i) for t, dim in zip(tensors, in_dims, strict=True)] for i in range(size)
    ]
    results = [function(*row) for row in rows]
    if isinstance(results[0], torch.Tensor):
        return torch.stack(results)
    return tuple(torch.stack(parts) for parts in zip(*results, strict=True))


MAPPED = [
    Case("vmap", (2, 6, 5, 5), (6, 2, 3, 3), 2, 0, 0, 3),
    Case("vmap_unbatched", (4, 3, 2), (4, 3, 2, 3), (1, 2), (1, 0), (0, 1), 2, (2, 1)),
    Case("vmap_empty", (0, 2, 3), (2, 3, 2), 2),
    Case("vmap_1d", (2, 4, 5), (4, 3, 3), 2, 1, 1),
    Case("vmap_3d", (1, 2, 2, 3, 2), (2, 3, 2, 1, 2), (2, 1, 2)),
]
IN_DIMS = [(0, None, None), (1, None, None), (None, 0, None), (0, 1, None), (0, 0, 0), (None, None, 0), (1, None, 1)]


@pytest.mark.parametrize("in_dims", IN_DIMS, ids=str)
@pytest.mark.parametrize("case", MAPPED, ids=str)
def test_vmap_is_a_loop(case, in_dims, no_fallback):
    tensors = mapped_tensors(case, in_dims)
    actual = torch.vmap(call(case), in_dims)(*tensors)
    torch.testing.assert_close(actual, loop(call(case), in_dims, tensors))


@pytest.mark.parametrize("argnums", [(0,), (1,), (0, 1, 2)], ids=str)
@pytest.mark.parametrize("in_dims", IN_DIMS, ids=str)
@pytest.mark.parametrize("case", MAPPED[:3], ids=str)
def test_vmap_of_gradients_is_a_loop(case, in_dims, argnums, no_fallback):
    tensors = mapped_tensors(case, in_dims)
    gradient = torch.func.grad(lambda *t: call(case)(*t).sin().sum(), argnums)
    actual = torch.vmap(gradient, in_dims)(*tensors)
    torch.testing.assert_close(actual, loop(gradient, in_dims, tensors))


def test_nested_transforms_are_those_of_torch():
    case = SMALL[1]
    x, w, b = case.tensors(torch.float64)
    torch_call = lambda x, w, b: torch.nn.functional.conv_transpose2d(x, w, b, *case.args)  # noqa: E731

    def results(function):
        yield torch.func.jacrev(function, 1)(x, w, b)
        yield torch.func.vjp(function, x, w, b)[1](function(x, w, b))
        yield torch.func.grad(lambda w: torch.vmap(lambda x: function(x, w, b))(torch.stack([x, 2 * x])).sin().sum())(w)
        inner = torch.func.grad(lambda x: function(x, w, b).sin().sum())
        yield torch.func.grad(lambda x: inner(x).square().sum())(x)
        yield torch.vmap(torch.vmap(lambda x, w: function(x, w, b), (0, None)), (None, 0))(
            torch.stack([x, 2 * x]), torch.stack([w, -w, w])
        )

    for ours, torchs in zip(results(call(case)), results(torch_call), strict=True):
        torch.testing.assert_close(ours, torchs)


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # the chain has no rule for vmap
def test_chain_under_func():
    x, w, b, subtrahend = (t.detach() for t in chain_leaves())
    gradient = torch.func.grad(lambda x, w: chain(x, w, b, subtrahend).sum(), (0, 1))
    expected = torch.func.grad(lambda x, w: torch_chain(x, w, b, subtrahend).sum(), (0, 1))
    torch.testing.assert_close(gradient(x, w), expected(x, w))
    xs = torch.stack([x, 2 * x])
    torch.testing.assert_close(torch.vmap(gradient, (0, None))(xs, w), torch.vmap(expected, (0, None))(xs, w))
