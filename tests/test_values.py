"""Every operator against the oracle: every case, dtype, layout and stride pattern, on every candidate of the plan."""

import functools

import pytest
import torch
from hypothesis import given, settings

import fastconvt
from tests import harness, reference
from tests.cases import BY_NAME, CASES, DTYPES, cases

pytestmark = pytest.mark.usefixtures("poison")
LAYOUTS = [(False, False), (True, False), (False, True), (True, True)]


def check_forward(case, x, w, b, device):
    """The call on every candidate: right, and the same bits when it is made again."""

    def call():
        y, again = (harness.forward(case, x, w, b) for _ in range(2))
        assert torch.equal(y.nan_to_num(), again.nan_to_num()), "other bits the second time"
        return y

    harness.check_every(
        harness.on_every_candidate(case, call, x.dtype, device), reference.output_rule(x, w, b, *case.args)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", [case for case in CASES if min(case.input) > 0], ids=str)
def test_what_is_not_finite_stays_where_it_belongs(case, dtype, device):
    """An infinite weight meets existing inputs only, a NaN among the inputs its own outputs. ATen pads with zeros."""
    x, w, b = case.tensors(dtype, device)
    w.view(-1)[0], x.view(-1)[-1] = torch.inf, torch.nan
    call = functools.partial(harness.forward, case, x, w, b)
    outputs = harness.on_every_candidate(case, call, dtype, device, skip=("aten",))
    harness.check_every(outputs, reference.output_rule(x, w, b, *case.args))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_forward(case, dtype, device):
    check_forward(case, *case.tensors(dtype, device), device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_backward(case, dtype, device):
    x, w, _ = case.tensors(dtype, device)
    grad = case.grad_output(dtype, device)
    rule = reference.gradients_rule(grad, x, w, *case.args)

    def call():
        grads, again = (harness.backward(case, grad, x, w) for _ in range(2))
        assert all(map(torch.equal, grads, again)), "other bits the second time"
        return grads

    for _, grads in harness.on_every_gradient(case, call, dtype, device):
        rule(grads)
    for i in range(3 * (dtype == torch.float32)):  # each of them alone, as the mask asks
        alone = harness.backward(case, grad, x, w, [j == i for j in range(3)])
        rule([g if j == i else None for j, g in enumerate(alone)])


@pytest.mark.parametrize("channels_last", LAYOUTS[1:], ids=["input", "weight", "both"])
@pytest.mark.parametrize("case", [case for case in CASES if case.ndim > 1 and case.batched], ids=str)
def test_channels_last(case, channels_last, device):
    for dtype in (torch.float32, torch.float16):
        x, w, b = case.tensors(dtype, device, channels_last=channels_last)
        expected = harness.expected_strides(case, x, w)
        grad = case.grad_output(dtype, device)
        call = functools.partial(harness.forward, case, x, w, b)
        last = harness.is_channels_last(x) or harness.is_channels_last(w)  # sizes of 1 may leave it open
        outputs = list(harness.on_every_candidate(case, call, dtype, device, channels_last=last))
        harness.check_every(outputs, reference.output_rule(x, w, b, *case.args))
        assert [y.stride() for _, y in outputs] == [expected] * len(outputs)
        same_layout = torch.empty_strided(case.output, expected, dtype=dtype, device=device).copy_(grad)
        call = functools.partial(harness.backward, case, same_layout, x, w)
        rule = reference.gradients_rule(grad, x, w, *case.args)
        for _, grads in harness.on_every_gradient(case, call, dtype, device, channels_last=last):
            rule(grads)


@pytest.mark.parametrize("case", [case for case in CASES if case.ndim > 1], ids=str)
def test_layout_of_the_output_is_one_rule(case, device):
    """The same strides in every dtype: those of PyTorch where it follows the rule itself, in 2D float32 on the CPU."""
    for channels_last in LAYOUTS if case.batched else LAYOUTS[:1]:
        for dtype in DTYPES:
            x, w, b = case.tensors(dtype, device, channels_last=channels_last)
            expected = harness.expected_strides(case, x, w)
            assert harness.forward(case, x, w, b).stride() == expected, (channels_last, dtype)
        if case.ndim == 2 and 0 not in case.input:
            x, w, b = case.tensors(channels_last=channels_last)
            assert harness.F_FUNCTIONS[2](x, w, b, *case.args).stride() == expected, channels_last


VIEW_CASES = [BY_NAME[name] for name in ("unequal_1d", "reference_2d", "unequal_2d", "unequal_3d", "unbatched_2d")]


@pytest.mark.parametrize("view", harness.VIEWS, ids=lambda view: view.__name__)
@pytest.mark.parametrize("which", ["input", "weight", "bias", "all"])
@pytest.mark.parametrize("case", VIEW_CASES, ids=str)
def test_forward_of_views(case, which, view, device):
    for dtype in DTYPES:
        x, w, b = case.tensors(dtype, device)
        x = view(x) if which in ("input", "all") else x
        w = view(w) if which in ("weight", "all") else w
        b = view(b) if which in ("bias", "all") and b is not None else b
        check_forward(case, x, w, b, device)


@pytest.mark.parametrize("view", harness.VIEWS, ids=lambda view: view.__name__)
@pytest.mark.parametrize("which", ["grad_output", "input", "weight", "all"])
@pytest.mark.parametrize("case", VIEW_CASES, ids=str)
def test_backward_of_views(case, which, view, device):
    for dtype in (torch.float32, torch.bfloat16):
        x, w, _ = case.tensors(dtype, device)
        grad = case.grad_output(dtype, device)
        x = view(x) if which in ("input", "all") else x
        w = view(w) if which in ("weight", "all") else w
        grad = view(grad) if which in ("grad_output", "all") else grad
        grads = harness.backward(case, grad, x, w)
        reference.assert_gradients_accurate(grads, grad, x, w, *case.args)


@settings(max_examples=60)
@given(case=cases())
def test_drawn_problems(case):
    for dtype in (torch.float32, torch.bfloat16):
        check_forward(case, *case.tensors(dtype), "cpu")
    x, w, _ = case.tensors()
    grad = case.grad_output()
    reference.assert_gradients_accurate(harness.backward(case, grad, x, w), grad, x, w, *case.args)


def test_force_selects_and_is_undone(device):
    case = BY_NAME["reference_2d"]
    x, w, b = case.tensors(device=device)
    before = harness.forward(case, x, w, b)
    with pytest.raises(ValueError, match="nonsense"), fastconvt.force("nonsense"):
        pass
    assert len(harness.candidates(case, x.dtype, device)) > 1, "one candidate proves nothing"
    for _ in harness.on_every_candidate(case, functools.partial(harness.forward, case, x, w, b), x.dtype, device):
        pass
    assert torch.equal(harness.forward(case, x, w, b), before)
