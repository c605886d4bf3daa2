"""The contract of the registered operators: fakes, layouts, errors in every mode, autocast and FLOP counts."""

import functools
import itertools
import warnings

import pytest
import torch
from torch import distributed, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import fastconvt
from tests import harness, illegal, reference
from tests.cases import BY_NAME, Case, to_channels_last

OPS = torch.ops.fastconvt
CHAIN = illegal.CHAIN
CASES = [BY_NAME[name] for name in ("unequal_1d", "unequal_2d", "unequal_3d", "unbatched_2d", "batch_0")]
CHAIN_CASE = Case("chain", (2, 4, 2, 3, 4), (4, 3, 2, 3, 1), (2, 1, 3), (1, 0, 0), (1, 0, 2), 2, (1, 2, 1))
LAYOUTS = list(itertools.product((False, True), repeat=2))  # channels_last, of input and of weight


def chain_tensors(dtype=torch.float32, device="cpu", **kwargs):
    return *CHAIN_CASE.tensors(dtype, device, **kwargs), torch.tensor([0.1], dtype=dtype, device=device)


@pytest.fixture(autouse=True)
def forget_compiled():
    torch._dynamo.reset()


def opcheck(name, args, **kwargs):
    torch.library.opcheck(getattr(OPS, name).default, args, kwargs)


def with_grad(tensors):
    return tuple(tensor.requires_grad_() for tensor in tensors)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_opcheck_plain(case, layout):
    if case.ndim == 1 and any(layout):
        pytest.skip("one layout in 1D")
    opcheck(case.op, (*with_grad(case.tensors(channels_last=layout)), *case.args))


@pytest.mark.parametrize("mask", [(True, True, True), (True, False, False), (False, True, True)])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_opcheck_backward(case, mask):
    x, w, _ = case.tensors(channels_last=(True, True))
    opcheck(f"{case.op}_backward", (*with_grad((case.grad_output(), x, w)), *case.args, list(mask)))


@pytest.mark.parametrize("layout", [(False, False), (True, False)])
def test_opcheck_chain(layout):
    opcheck(CHAIN, (*with_grad(chain_tensors(channels_last=layout)), *CHAIN_CASE.args), min=-0.5, max=0.7)


@pytest.mark.parametrize("mask", [(True, True, True, True), (False, True, False, True)])
def test_opcheck_chain_backward(mask):
    tensors = chain_tensors(channels_last=(True, True))  # without requires_grad: it has no derivative
    grad = torch.randn_like(OPS.conv_transpose3d_logsumexp_hardswish(*tensors, *CHAIN_CASE.args))
    opcheck(f"{CHAIN}_backward", (grad, *tensors, *CHAIN_CASE.args, list(mask)), max=0.7)


def strided_pairs():
    """Dense inputs and weights of every order of axes, sizes of 1 among them."""
    shapes = [((2, 4, 3, 5), (4, 3, 2, 3)), ((1, 4, 1, 1), (4, 3, 1, 1)), ((2, 1, 3, 1), (1, 1, 2, 1))]
    for x, w in [*shapes, ((1, 1, 1, 5), (1, 2, 1, 3)), ((3, 1, 1, 1), (1, 1, 1, 1))]:
        for order in itertools.permutations(range(4)):
            yield in_order(x, order), torch.randn(w)
            yield torch.randn(x), in_order(w, order)


def in_order(shape, order):
    return torch.randn([shape[axis] for axis in order]).permute([order.index(axis) for axis in range(len(order))])


def test_layout_is_that_of_torch_real_and_fake():
    for x, w in strided_pairs():
        expected = torch.nn.functional.conv_transpose2d(x, w).stride()
        assert OPS.conv_transpose2d(x, w).stride() == expected, (x.stride(), w.stride())
        with FakeTensorMode() as mode:
            fake = OPS.conv_transpose2d(mode.from_tensor(x), mode.from_tensor(w))
        assert fake.stride() == expected, (x.stride(), w.stride())


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("shape", [(8, 8, 1, 1), (8, 8, 2, 2)])
def test_gradient_has_the_strides_of_the_weight(shape, memory_format):
    x = torch.randn(2, 8, 3, 5).contiguous(memory_format=torch.channels_last)
    w = torch.randn(shape).contiguous(memory_format=memory_format).requires_grad_()
    OPS.conv_transpose2d(x, w, None, [2]).sum().backward()
    assert w.grad.stride() == w.stride()


WEIGHT_LAYOUTS = [lambda w: w, to_channels_last, harness.axes_reversed, harness.last_axes_swapped]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["unequal_1d", "reference_2d", "dense_k3_s1", "depthwise_k4_s2", "one_pixel_3d"])
def test_weight_gradients_keep_the_layout_of_the_weight(name, dtype, device):
    """What DistributedDataParallel counts on, on every candidate and whatever the other tensors' layouts are."""
    case = BY_NAME[name]
    for weight_layout, last in itertools.product(WEIGHT_LAYOUTS, (False, True)):
        x, w, _ = case.tensors(dtype, device, channels_last=(last, False))
        w = weight_layout(w)
        grad = case.grad_output(dtype, device)
        grads_last = harness.is_channels_last(x) or harness.is_channels_last(w)
        for made_by, grads in harness.on_every_gradient(
            case, functools.partial(harness.backward, case, grad, x, w), dtype, device, channels_last=grads_last
        ):
            assert grads[1] is None or grads[1].stride() == w.stride(), made_by


def test_distributed_data_parallel_finds_the_layout_that_it_expects(tmp_path, device, monkeypatch):
    """A gradient of other strides than its parameter would be copied in every step."""
    layers = [nn.ConvTranspose2d(6, 4, 3, 2), nn.ConvTranspose2d(4, 6, 2).to(memory_format=torch.channels_last)]

    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(layers)

        def forward(self, x):
            for layer in self.layers:
                x = fastconvt.conv_transpose2d_act(x, layer.weight, layer.bias, layer.stride, activation="relu")
            return x

    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")  # whatever the machine's name resolves to
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        network, found = nn.parallel.DistributedDataParallel(Network().to(device)), []
        for parameter in network.parameters():
            parameter.register_hook(lambda grad, parameter=parameter: found.append((grad.stride(), parameter.stride())))
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*strides.*")
            for memory_format in (torch.contiguous_format, torch.channels_last):
                x = torch.randn(2, 6, 5, 7, device=device).contiguous(memory_format=memory_format)
                network(x).square().sum().backward()
        assert len(found) == 8 and all(grad == parameter for grad, parameter in found), found
        assert all(parameter.grad.any() for parameter in network.parameters())
    finally:
        distributed.destroy_process_group()


def real_call(call):
    return getattr(OPS, call.op)(*call.make())


def fake_call(call):
    with FakeTensorMode() as mode:
        args = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in call.make()]
        return getattr(OPS, call.op)(*args)


def compiled_call(call):
    op = getattr(OPS, call.op)
    return torch.compile(lambda *args: op(*args), backend="aot_eager", fullgraph=True)(*call.make())


def spoilt(op, key, value):
    case = CHAIN_CASE if op.startswith(CHAIN) else BY_NAME["unequal_2d"]
    call = illegal.legal_call(case, op)
    if key in call.tensors:
        call.tensors[key] = value
    elif key == "groups":
        call.groups = value
    else:
        call.lists[key] = value
    return call


ERRORS = [
    ("stride", [0], "non-positive stride is not supported"),
    ("dilation", [0], "dilation should be greater than zero"),
    ("padding", [-1], "negative padding is not supported"),
    ("padding", [1, 0, 0, 0], "expected padding to be a single integer value or a list of"),
    ("padding", [400], "Output size is too small"),
    ("output_padding", [7], "output padding must be smaller than either stride or dilation, but got"),
    ("groups", 0, "non-positive groups is not supported"),
    ("groups", -(2**63), "non-positive groups is not supported"),
    ("input", ((3, 4), torch.float32), "(unbatched) or"),
    ("input", ((2, 5, 5, 8, 3), torch.float32), "nput"),
    ("input", ((2, 6, 5, 8), torch.complex64), "complex64"),
    ("weight", ((6, 2, 3), torch.float32), "D weight, but got weight of size [6, 2, 3]"),
    ("weight", ((6, 2, 3, 4), torch.float64), "got input of dtype float32 and weight of dtype float64"),
    ("weight", ((6, 2, 3, 4), torch.float32, "meta"), "got input on cpu and weight on meta"),
]
OPERATORS = ["conv_transpose2d", "conv_transpose2d_backward", CHAIN, f"{CHAIN}_backward"]


@pytest.mark.parametrize("op", OPERATORS)
@pytest.mark.parametrize(("key", "value", "text"), ERRORS)
def test_errors_are_alike_in_every_mode(op, key, value, text):
    call = spoilt(op, key, value)
    with pytest.raises(RuntimeError) as real:
        real_call(call)
    assert str(real.value).startswith(f"{op}: ") and text in str(real.value)
    with pytest.raises(RuntimeError) as fake:
        fake_call(call)
    assert str(fake.value) == str(real.value).split("\n")[0]
    if op in ("conv_transpose2d", CHAIN):
        with pytest.raises(RuntimeError) as compiled:
            compiled_call(call)
        assert str(fake.value) in str(compiled.value)


@pytest.mark.parametrize("groups", [1, 8])
def test_output_of_no_size_is_an_error(groups):
    case = Case("", (1, 8, 14, 14), (8, 8 // groups, 3, 3), 1, (8, 0), 0, groups)
    call = illegal.legal_call(case, "conv_transpose2d")
    text = "size per channel: (14 x 14). Calculated output size per channel: (0 x 16). Output size is too small"
    for mode in (real_call, fake_call, compiled_call):
        with pytest.raises(RuntimeError) as error:
            mode(call)
        assert text in str(error.value)


@pytest.mark.parametrize(
    ("op", "name", "value"),
    [
        ("conv_transpose2d", "bias", (3,)),
        (CHAIN, "subtrahend", (2,)),
        ("conv_transpose2d_backward", "grad_output", (2, 4, 5, 5)),
        ("conv_transpose2d_backward", "input", (2, 5, 5, 8)),
        (f"{CHAIN}_backward", "grad_output", (2, 4, 5, 5)),
        (f"{CHAIN}_backward", "subtrahend", (0,)),
    ],
)
def test_errors_name_the_tensor_of_a_wrong_shape(op, name, value):
    call = spoilt(op, name, (value, torch.float32))
    for mode in (real_call, fake_call):
        with pytest.raises(RuntimeError, match=name):
            mode(call)


@pytest.mark.parametrize("op", OPERATORS)
def test_every_tensor_must_be_on_the_device_of_the_input(op):
    case = CHAIN_CASE if op.startswith(CHAIN) else BY_NAME["unequal_2d"]
    for name, (shape, dtype) in illegal.legal_call(case, op).tensors.items():
        call = spoilt(op, name, (shape, dtype, "meta"))
        for mode in (real_call, fake_call):
            with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device, but got input on"):
                mode(call)


AUTOCAST = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", AUTOCAST)
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("op", ["conv_transpose2d", CHAIN])
def test_autocast(op, compiled, dtype, device):
    case = CHAIN_CASE if op == CHAIN else BY_NAME["unequal_2d"]
    x, w, *others = chain_tensors(device=device) if op == CHAIN else case.tensors(device=device)
    x, w = with_grad((x, w))

    def call(x, enabled=True):
        with torch.autocast(device, dtype=dtype, enabled=enabled):
            return getattr(OPS, op)(x, w, *others, *case.args)

    function = torch.compile(call, backend="aot_eager", fullgraph=True) if compiled else call
    y = function(x)
    half = [tensor.detach().to(dtype) for tensor in (x, w, *others)]
    assert y.dtype == dtype and torch.equal(y, getattr(OPS, op)(*half, *case.args))
    y.sum().backward()
    assert x.grad.dtype == w.grad.dtype == torch.float32
    assert function(x.detach().to(dtype)).dtype == dtype  # a half input meets float32 weights
    assert function(x, enabled=False).dtype == torch.float32


def test_autocast_leaves_float64_and_regions_where_it_is_disabled():
    case = BY_NAME["unequal_2d"]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert harness.forward(case, *case.tensors(torch.float64)).dtype == torch.float64
        with torch.autocast("cpu", enabled=False):
            assert harness.forward(case, *case.tensors()).dtype == torch.float32
        with FakeTensorMode() as mode:
            assert harness.forward(case, *map(mode.from_tensor, case.tensors())).dtype == torch.bfloat16


def flop(function):
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


def test_flop_are_counted_as_those_of_torch():
    x, w = with_grad((torch.empty(1, 192, 30, 96, device="meta"), torch.empty(192, 384, 2, 2, device="meta")))
    counts = [
        flop(lambda op=op: op(x, w, None, [2]).sum().backward())
        for op in (OPS.conv_transpose2d, torch.nn.functional.conv_transpose2d)
    ]
    assert counts[0] == counts[1] == 3 * 2 * 192 * 384 * 4 * 30 * 96


@pytest.mark.parametrize("name", ["unequal_1d", "unequal_3d", "unbatched_2d"])
def test_flop_of_groups(name):
    case = BY_NAME[name]
    x, w, b = case.tensors()
    batch = case.input[0] if case.batched else 1
    macs = batch * torch.Size(case.input[-case.ndim :]).numel() * torch.Size(case.weight).numel()
    assert flop(lambda: harness.forward(case, x, w, b)) == 2 * macs
    assert flop(lambda: harness.backward(case, case.grad_output(), x, w, (False, True, True))) == 2 * macs


def test_flop_of_the_chain_count_its_recomputation():
    tensors = with_grad(chain_tensors())
    forward = flop(lambda: getattr(OPS, CHAIN)(*tensors, *CHAIN_CASE.args))
    assert forward == 2 * 2 * 2 * 3 * 4 * torch.Size(CHAIN_CASE.weight).numel()
    assert flop(lambda: getattr(OPS, CHAIN)(*tensors, *CHAIN_CASE.args).sum().backward()) == 4 * forward


def test_values_of_the_cases_used_here():
    for case in CASES:
        x, w, b = case.tensors()
        reference.assert_accurate(harness.forward(case, x, w, b), x, w, b, *case.args)
