"""The operators that end with an activation: values, special values, derivatives, compilation and what is refused."""

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import gradcheck, gradgradcheck

import fastconvt
from fastconvt._shapes import ACTIVATIONS
from tests import harness, reference
from tests.cases import BY_NAME, DTYPES, Case

OPS = torch.ops.fastconvt
FUNCTIONS = reference.ACTIVATIONS
VALUES = [
    Case("wide_rows", (2, 3, 9, 70), (3, 5, 4, 4), 2, 1),
    Case("rows_without_taps", (2, 4, 3, 5), (4, 3, 2, 2), (4, 3), 0, (3, 2), 2),
    Case("stride_of_seven", (2, 3, 40), (3, 2, 9), 7, 2),
    *map(BY_NAME.get, ("unequal_1d", "unequal_2d", "unequal_3d", "unbatched_2d", "depthwise_k4_s2", "batch_0")),
    *map(BY_NAME.get, ("reference_2d", "dilation_gcd_2", "channels_512_to_67", "gan_first_layer")),
]
SMALL = [
    Case("small_1d", (2, 4, 3), (4, 1, 2), 3, 1, 2, 2, 2),
    Case("small_2d", (2, 2, 2, 3), (2, 1, 3, 2), (2, 3), (1, 0), (1, 2), 1, (2, 1)),
    Case("small_3d", (1, 2, 1, 2, 2), (2, 1, 2, 1, 2), (1, 2, 3), (0, 0, 1), (0, 1, 2), 2, (2, 1, 1)),
    Case("small_unbatched", (2, 2, 3), (2, 3, 2, 2), 2, 1, 1),
]
SETTINGS = [(name, 0.01) for name in ACTIVATIONS] + [("leaky_relu", -0.3), ("leaky_relu", 0.0)]


@pytest.fixture(autouse=True)
def forget_compiled():
    torch._dynamo.reset()


def by_torch(case, x, w, b, activation, alpha=0.01):
    return FUNCTIONS[activation](harness.F_FUNCTIONS[case.ndim](x, w, b, *case.args), alpha)


def leaves(case, dtype=torch.float64, bias=True):
    tensors = [t.requires_grad_() for t in case.tensors(dtype)]
    return tensors if bias else tensors[:2]


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("case", VALUES, ids=str)
def test_values(case, activation, dtype, channels_last, device, poison):
    if channels_last and case.ndim == 1:
        pytest.skip("one layout in 1D")
    x, w, b = case.tensors(dtype, device, channels_last=(channels_last, channels_last))
    rule = reference.activation_rule(activation, 0.01, x, w, b, *case.args)
    call = lambda: harness.forward_act(case, x, w, b, activation)  # noqa: E731
    outputs = list(harness.on_every_candidate(case, call, dtype, device, channels_last=channels_last))
    assert {y.stride() for _, y in outputs} == {harness.expected_strides(case, x, w)}
    harness.check_every(outputs, rule)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_outputs_without_taps_are_that_of_the_bias(activation, dtype, device, poison):
    case = Case("no_taps", (2, 4, 3, 5), (4, 3, 1, 2), (4, 3), 0, (3, 2), 2)
    x, w, b = case.tensors(dtype, device)
    expected = FUNCTIONS[activation](b.double(), 0.01).to(dtype)
    for _, y in harness.on_every_candidate(case, lambda: harness.forward_act(case, x, w, b, activation), dtype, device):
        for row in (1, 2, 3, 7):
            torch.testing.assert_close(y[:, :, row], expected[:, None].expand_as(y[:, :, row]))


def special_values(dtype, device):
    """Exact numbers of the dtype, through all ranges of the activations, and what is not a number."""
    values = [torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1e-6, -1e-6, 200.0, -200.0, 3e4, -3e4]
    if dtype not in (torch.float16,):
        values += [1e-30, -1e-30, 1e38, -1e38]
    return torch.cat([torch.tensor(values), torch.linspace(-20, 20, 1601), torch.linspace(-1, 1, 999)]).to(
        device, dtype
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("activation", "alpha"), SETTINGS)
def test_special_values(activation, alpha, dtype, device):
    x = special_values(dtype, device)
    case = Case("identity", (1, 1, x.numel()), (1, 1, 1), 1, bias=False)
    w = torch.ones(1, 1, 1, device=device, dtype=dtype)
    expected = FUNCTIONS[activation](x.double(), alpha)
    call = lambda: harness.forward_act(case, x.reshape(1, 1, -1), w, None, activation, alpha)  # noqa: E731
    rule = {torch.float32: 2.0**-20, torch.float64: 2.0**-48}.get(dtype, 2 * torch.finfo(dtype).eps)
    for name, y in harness.on_every_candidate(case, call, dtype, device):
        torch.testing.assert_close(
            y.flatten(),
            expected.to(dtype),
            rtol=rule,
            atol=2.0**-21 if dtype == torch.float32 else rule / 2,
            equal_nan=True,
            msg=lambda text, name=name: f"{name}: {text}",
        )


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("activation", "alpha"), SETTINGS)
@pytest.mark.parametrize("case", SMALL, ids=str)
def test_first_and_second_derivatives(case, activation, alpha, bias):
    def function(x, w, b=None):
        return harness.forward_act(case, x, w, b, activation, alpha)

    assert gradcheck(function, leaves(case, bias=bias), fast_mode=True)
    assert gradgradcheck(function, leaves(case, bias=bias), fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("activation", "alpha"), SETTINGS)
def test_gradients_are_those_of_the_composition(activation, alpha, dtype, device):
    case = BY_NAME["unequal_2d"]
    ours, others = ([t.requires_grad_() for t in case.tensors(dtype, device)] for _ in range(2))
    grad = case.grad_output(dtype, device)
    harness.forward_act(case, *ours, activation, alpha).backward(grad)
    FUNCTIONS[activation](harness.forward(case, *others), alpha).backward(grad)
    relative, absolute = (0.03, 0.15) if dtype == torch.bfloat16 else (1e-4, 1e-4)
    for mine, right in zip(ours, others, strict=True):
        torch.testing.assert_close(mine.grad, right.grad, rtol=relative, atol=absolute)


@pytest.mark.parametrize(("activation", "alpha"), SETTINGS)
def test_what_is_saved(activation, alpha):
    """Input, weight, and one tensor of the output's size or, for "none", none."""
    case = BY_NAME["unequal_2d"]
    x, w, b = leaves(case, torch.float32)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = harness.forward_act(case, x, w, b, activation, alpha)
    assert [t.shape for t in saved] == [x.shape, w.shape, *([] if activation == "none" else [y.shape])]
    of_output = activation in ("relu", "tanh", "sigmoid") or (activation == "leaky_relu" and alpha >= 0)
    if activation != "none":
        assert torch.equal(saved[2], y) == of_output


@pytest.mark.parametrize(("activation", "alpha"), SETTINGS)
@pytest.mark.parametrize("name", ["unequal_1d", "unequal_2d", "unequal_3d", "unbatched_2d", "batch_0"])
def test_opcheck(name, activation, alpha):
    case = BY_NAME[name]
    op = getattr(OPS, f"{case.op}_act").default
    args = (*(t.requires_grad_() for t in case.tensors(channels_last=(True, False))), *case.args)
    torch.library.opcheck(op, args, {"activation": activation, "alpha": alpha})


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_compiled(activation):
    case = BY_NAME["unequal_2d"]
    function = lambda x, w, b: fastconvt.conv_transpose2d_act(x, w, b, *case.args, activation=activation)  # noqa: E731
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    ours, expected = leaves(case, torch.float32), leaves(case, torch.float32)
    torch.testing.assert_close(compiled(*ours), function(*expected))
    compiled(*ours).sin().sum().backward()
    function(*expected).sin().sum().backward()
    for mine, right in zip(ours, expected, strict=True):
        torch.testing.assert_close(mine.grad, right.grad)
    with torch.no_grad():
        torch.testing.assert_close(compiled(*ours), function(*expected))


@pytest.mark.parametrize("spatial", [1, 2, 3])
def test_functions(spatial):
    case = SMALL[spatial - 1]
    x, w, b = case.tensors()
    function = getattr(fastconvt, f"conv_transpose{spatial}d_act")
    for activation, alpha in SETTINGS:
        y = function(x, w, b, *case.args, activation=activation, alpha=alpha)
        torch.testing.assert_close(y, by_torch(case, x, w, b, activation, alpha))
    assert torch.equal(function(x, w, activation="relu"), F.relu(getattr(fastconvt, f"conv_transpose{spatial}d")(x, w)))


@pytest.mark.parametrize("activation", ["relu", "silu"])
@pytest.mark.parametrize("in_dims", [(0, None, None), (0, 0, 0), (None, None, 0)], ids=str)
def test_transforms(activation, in_dims):
    case = SMALL[1]
    generator = torch.Generator().manual_seed(0)
    shapes = (case.input, case.weight, (case.out_channels,))
    tensors = [
        torch.randn(shape if dim is None else (3, *shape), generator=generator, dtype=torch.float64)
        for shape, dim in zip(shapes, in_dims, strict=True)
    ]
    for function in (harness.forward_act, by_torch):
        call = lambda *t, function=function: function(case, *t, activation)  # noqa: E731
        gradient = torch.func.grad(lambda *t, call=call: call(*t).sin().sum(), (0, 1, 2))
        second = torch.func.grad(lambda x, *t, gradient=gradient: gradient(x, *t)[0].square().sum())
        found = [torch.vmap(transform, in_dims)(*tensors) for transform in (call, gradient, second)]
        if function is harness.forward_act:
            ours = found
    torch.testing.assert_close(ours, found)


def test_autocast():
    case = SMALL[1]
    x, w, b = case.tensors()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = harness.forward_act(case, x, w, b, "relu")
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, harness.forward_act(case, x.bfloat16(), w.bfloat16(), b.bfloat16(), "relu"))


def test_refusals():
    case = SMALL[1]
    x, w, b = case.tensors()
    text = (
        "conv_transpose2d_act: expected activation to be one of none, relu, leaky_relu, silu, gelu, gelu_tanh, tanh, "
    )
    for requires_grad in (False, True):
        with pytest.raises(RuntimeError, match=text + "sigmoid, hardswish, but got swish"):
            harness.forward_act(case, x.requires_grad_(requires_grad), w, b, "swish")
    mode = FakeTensorMode()
    fakes = [mode.from_tensor(t) for t in (x.detach(), w, b)]
    with mode, pytest.raises(RuntimeError, match=text + "sigmoid, hardswish, but got swish"):
        harness.forward_act(case, *fakes, "swish")
    with pytest.raises(RuntimeError, match="conv_transpose2d_act: expected 4D weight"):
        harness.forward_act(case, x, w[0], b, "relu")
    with pytest.raises(RuntimeError, match="conv_transpose2d_act has no forward-mode derivative"):
        torch.func.jvp(lambda x: harness.forward_act(case, x, w, b, "silu"), (x.detach(),), (x.detach(),))


def test_plan():
    plain = fastconvt.plan("conv_transpose2d", (1, 4, 8, 8), (4, 4, 4, 4), stride=2)
    with_relu = fastconvt.plan("conv_transpose2d_act", (1, 4, 8, 8), (4, 4, 4, 4), stride=2, activation="relu")
    for before, after in zip(plain["candidates"], with_relu["candidates"], strict=True):
        assert before["name"] == after["name"]
        if before["supported"]:
            assert (after["cost_ms"] > before["cost_ms"]) == (before["name"] == "aten")
    with pytest.raises(RuntimeError, match="expected activation to be one of"):
        fastconvt.plan("conv_transpose2d_act", (1, 4, 8, 8), (4, 4, 4, 4), activation="swish")
