"""The oracle against PyTorch and numbers worked out by hand; the rule of accuracy against faults that it must find."""

import pytest
import torch

from tests import harness, reference
from tests.cases import BY_NAME, CASES

DOUBLE = torch.float64


def leaves(case):
    return [None if t is None else t.requires_grad_() for t in case.tensors(DOUBLE)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_values_and_gradients_equal_pytorch(case):
    x, w, b = leaves(case)
    y = harness.F_FUNCTIONS[case.ndim](x, w, b, *case.args)
    torch.testing.assert_close(reference.conv_transpose(x, w, b, *case.args), y.detach(), rtol=0, atol=1e-10)
    assert y.shape == case.output
    grad = case.grad_output(DOUBLE)
    expected = torch.autograd.grad(y, [x, w] + [b] * case.bias, grad)
    actual = reference.conv_transpose_backward(grad, x, w, *case.args)
    for a, e in zip(actual, expected, strict=False):
        torch.testing.assert_close(a, e, rtol=0, atol=1e-9)


@pytest.mark.parametrize("case", [case for case in CASES if case.batched and case.input[0]], ids=str)
def test_gathered_elements_equal_the_scatter(case):
    x, w, b = case.tensors(DOUBLE)
    y = reference.conv_transpose(x, w, b, *case.args)
    generator = torch.Generator().manual_seed(2)
    index = torch.stack([torch.randint(n, (50,), generator=generator) for n in y.shape], 1)
    gathered = reference.conv_transpose_at(index, x, w, b, *case.args)
    torch.testing.assert_close(gathered, y[tuple(index.T)], rtol=0, atol=1e-10)


@pytest.mark.parametrize("case", [case for case in CASES if case.ndim == 3], ids=str)
def test_chain_equals_pytorch(case):
    x, w, b = leaves(case)
    subtrahend = torch.tensor(0.1, dtype=DOUBLE, requires_grad=True)
    bounds = {"min": -0.2, "max": 0.4}
    conv = harness.F_FUNCTIONS[3](x, w, b, *case.args)
    y = reference.chain_tail(conv, subtrahend, **bounds)
    actual = reference.logsumexp_hardswish(x, w, b, subtrahend, *case.args, **bounds)
    torch.testing.assert_close(actual, y.detach(), rtol=0, atol=1e-10)
    grad = torch.randn(y.shape, dtype=DOUBLE, generator=torch.Generator().manual_seed(3))
    expected = torch.autograd.grad(y, [x, w] + [b] * case.bias + [subtrahend], grad)
    actual = reference.logsumexp_hardswish_backward(grad, x, w, b, subtrahend, *case.args, **bounds)
    for a, e in zip(actual if case.bias else actual[:2] + actual[3:], expected, strict=True):
        torch.testing.assert_close(a, e, rtol=0, atol=1e-9)


def test_numbers_worked_out_by_hand():
    x, w = torch.ones(1, 1, 1, 1), torch.arange(9.0).view(1, 1, 3, 3)
    assert reference.conv_transpose(x, w, None, 2, 1, 1).tolist() == [[[[4, 5], [7, 8]]]]
    bias = torch.tensor([9.0])
    assert reference.conv_transpose(x, x, bias, 3, 0, 2).tolist() == [[[[10, 9, 9], [9, 9, 9], [9, 9, 9]]]]


def test_nan_reaches_only_its_own_outputs():
    x = torch.tensor([[[torch.nan, 1.0]]])
    y = reference.conv_transpose(x, torch.ones(1, 1, 1), None, 2)
    assert y.isnan().tolist() == [[[True, False, False]]] and y[0, 0, 1:].tolist() == [0, 1]


def test_slopes_of_h_are_within_the_constants():
    value = torch.linspace(-40, 40, 800_001, dtype=DOUBLE)
    slope = reference.hardswish_slope(value)
    assert slope.abs().max() < reference.HARDSWISH_SLOPE
    assert (slope.diff() / value.diff()).abs().max() < reference.HARDSWISH_CURVATURE


FAULTS = {
    "one element wrong": lambda y: y[1, 5, 3, 4].mul_(1.01),
    "one element NaN": lambda y: y[0, 0, 0, 0].fill_(torch.nan),
    "one element inf": lambda y: y[0, 1, 2, 3].fill_(torch.inf),
    "tail not written": lambda y: y[..., -1].zero_(),
}


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
@pytest.mark.parametrize("fault", FAULTS)
def test_rule_of_accuracy_finds(fault, dtype):
    case = BY_NAME["reference_2d"]
    x, w, b = case.tensors(dtype)
    y = harness.F_FUNCTIONS[2](x, w, b, *case.args)
    reference.assert_accurate(y, x, w, b, *case.args)
    FAULTS[fault](y)
    with pytest.raises(AssertionError, match="output"):
        reference.assert_accurate(y, x, w, b, *case.args)


def test_rule_of_accuracy_wants_nan_where_the_definition_has_it():
    x, w = torch.tensor([[[torch.nan, 1.0]]]), torch.ones(1, 1, 1)
    with pytest.raises(AssertionError, match="isnan"):
        reference.assert_accurate(torch.tensor([[[0.0, 0.0, 1.0]]]), x, w, None, 2)
    with pytest.raises(AssertionError, match="float16"):
        reference.assert_accurate(torch.zeros(1, 1, 3, dtype=torch.float16), x, w, None, 2)
    with pytest.raises(AssertionError, match=r"\(1, 1, 2\)"):
        reference.assert_accurate(torch.zeros(1, 1, 2), x, w, None, 2)


def test_rule_of_accuracy_for_gradients_finds_a_wrong_element():
    case = BY_NAME["unequal_3d"]
    x, w, _ = case.tensors()
    grad = case.grad_output()
    for i, name in enumerate(("grad_input", "grad_weight", "grad_bias")):
        grads = [g.float() for g in reference.conv_transpose_backward(grad, x, w, *case.args)]
        reference.assert_gradients_accurate(grads, grad, x, w, *case.args)
        grads[i].view(-1)[-1] += 0.01
        with pytest.raises(AssertionError, match=name):
            reference.assert_gradients_accurate(grads, grad, x, w, *case.args)


def test_gradients_below_the_range_of_float32_are_not_measured():
    conv, grad = torch.tensor([0.5, -3.0, -12.5, -13.8, torch.nan]), torch.ones(1).expand(5)
    through = reference.activation_gradient("gelu", 0.0, grad, conv, None)
    through[2:4] = torch.tensor([-3e-33, -1e-41])  # on a GPU; the CPU's is 0
    assert reference.away_from_underflow(grad, through).tolist() == [1, 1, 0, 0, 1]
    assert reference.away_from_underflow(grad, through[:2].repeat_interleave(5)[:5]) is grad


def test_rule_of_accuracy_for_the_chain_finds_a_wrong_element():
    case = BY_NAME["reference_3d"]
    x, w, b = case.tensors()
    subtrahend = torch.tensor([0.3])
    y = reference.logsumexp_hardswish(x, w, b, subtrahend, *case.args).float()
    reference.assert_chain_accurate(y, x, w, b, subtrahend, *case.args)
    y[1, 0, 3, 4, 5] += 1e-4
    with pytest.raises(AssertionError, match="output"):
        reference.assert_chain_accurate(y, x, w, b, subtrahend, *case.args)


def test_fresh_memory_is_poisoned(poison):
    for size in (3, 100, 10_000, 10_000_000):
        block = torch.empty(size)
        assert (block.isnan() | (block.abs() > 1e30)).all()
