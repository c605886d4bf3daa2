"""fastconvt.functional: PyTorch's signatures, and PyTorch's setting of TF32 at every call."""

import inspect
import threading

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import fastconvt
from fastconvt import _precision
from tests import reference
from tests.cases import BY_NAME

NAMES = ("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
CHAIN = "conv_transpose3d_logsumexp_hardswish"


@pytest.mark.parametrize("name", NAMES)
def test_the_order_of_arguments_is_that_of_torch(name):
    ours = inspect.signature(getattr(fastconvt, name)).parameters
    documented = getattr(F, name).__doc__.split("\n", 2)[1].partition("(")[2].partition(")")[0].split(", ")
    assert list(ours) == [argument.partition("=")[0] for argument in documented]
    for argument in documented[2:]:
        parameter, _, default = argument.partition("=")
        assert repr(ours[parameter].default) == default


def test_groups_come_before_dilation():
    x, w = torch.ones(1, 2, 3, 3), torch.ones(2, 2, 3, 3)
    assert fastconvt.conv_transpose2d(x, w, None, 1, 0, 0, 1, 2).shape == (1, 2, 7, 7)


@pytest.mark.parametrize("name", NAMES)
def test_ints_tuples_lists_and_numpy_ints(name):
    spatial = int(name[-2])
    x, w = torch.randn(2, 3, *[4] * spatial), torch.randn(3, 2, *[3] * spatial)
    expected = getattr(F, name)(x, w, None, 2, 1, 1, 1, 1)
    for make in (int, lambda v: (v,), lambda v: [v], lambda v: (v,) * spatial, lambda v: torch.Size([v]), numpy.int64):
        y = getattr(fastconvt, name)(x, w, None, make(2), make(1), make(1), dilation=make(1))
        torch.testing.assert_close(y, expected)
    by_name = {"stride": 2, "padding": 1, "output_padding": 1, "groups": 1, "dilation": 1, "bias": None}
    torch.testing.assert_close(getattr(fastconvt, name)(weight=w, input=x, **by_name), expected)


@pytest.mark.parametrize("name", ["unequal_1d", "unequal_2d", "unequal_3d", "unbatched_2d"])
def test_values_and_gradients(name):
    case = BY_NAME[name]
    x, w, b = case.tensors()
    leaves = [t.requires_grad_() for t in (x, w, b)]
    y = getattr(fastconvt, case.op)(*leaves, *case.args)
    grad = case.grad_output()
    grads = torch.autograd.grad(y, leaves, grad)
    x, w, b = (t.detach() for t in leaves)
    reference.assert_accurate(y.detach(), x, w, b, *case.args, tf32=True)
    reference.assert_gradients_accurate(grads, grad, x, w, *case.args, tf32=True)


def test_the_chain():
    case = BY_NAME["unequal_3d"]
    tensors = (*case.tensors(), torch.tensor([0.2]))
    y = fastconvt.conv_transpose3d_logsumexp_hardswish(*tensors, *case.args, min=-0.1, max=0.4)
    reference.assert_chain_accurate(y, *tensors, *case.args, min=-0.1, max=0.4, tf32=True)


def test_modes_in_which_nothing_is_differentiated():
    x, w = torch.randn(2, 3, 4, 5, requires_grad=True), torch.randn(3, 2, 3, 3, requires_grad=True)
    expected = fastconvt.conv_transpose2d(x, w)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            y = fastconvt.conv_transpose2d(x, w)
        assert not y.requires_grad and torch.equal(y, expected)
    y = fastconvt.conv_transpose2d(x.detach(), w.detach())
    assert not y.requires_grad and torch.equal(y, expected)
    with FakeTensorMode() as mode, torch.no_grad():
        assert fastconvt.conv_transpose2d(*map(mode.from_tensor, (x, w))).shape == expected.shape
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert fastconvt.conv_transpose2d(x, w).dtype == torch.bfloat16
    with torch.no_grad():
        mapped = torch.vmap(lambda row: fastconvt.conv_transpose2d(row, w))(x)
        torch.testing.assert_close(mapped, expected)
        with pytest.raises(RuntimeError, match="no forward-mode derivative"):
            torch.func.jvp(lambda x: fastconvt.conv_transpose2d(x, w.detach()), (x.detach(),), (x.detach(),))


def test_missing_operators_are_explained(monkeypatch):
    library = fastconvt._library.LIBRARIES["cpu"]
    monkeypatch.setattr(library, "loaded", False)
    monkeypatch.setattr(library, "problem", "it was built for another torch")
    monkeypatch.setattr(torch.ops, "fastconvt", torch.ops.no_such_namespace)
    with pytest.raises(RuntimeError, match="it was built for another torch"):
        fastconvt.conv_transpose2d(torch.ones(1, 1, 2, 2), torch.ones(1, 1, 2, 2))


# TF32. Both settings exist on any machine; what is passed on is seen by what the operators receive.


class Recorder(TorchDispatchMode):
    """The ``allow_tf32`` that our operators were called with."""

    def __init__(self):
        super().__init__()
        self.allowed = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "fastconvt":
            self.allowed.append((kwargs or {}).get("allow_tf32", False))
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def settings():
    """The settings are PyTorch's defaults again after every test."""
    yield
    torch.backends.fp32_precision = "none"
    torch.backends.cudnn.fp32_precision = "none"
    torch.backends.cudnn.allow_tf32 = True  # and with it the newer settings of conv and rnn
    torch.backends.cudnn.deterministic = False
    torch.use_deterministic_algorithms(False)


def set_neither():
    pass


def set_old(allowed):
    torch.backends.cudnn.allow_tf32 = allowed


def set_new(allowed):
    torch.backends.cudnn.conv.fp32_precision = "tf32" if allowed else "ieee"


def set_both(allowed):
    set_old(not allowed)
    set_new(allowed)


def set_parent(allowed):
    torch.backends.cudnn.conv.fp32_precision = "none"
    torch.backends.cudnn.fp32_precision = "tf32" if allowed else "ieee"


def set_generic(allowed):
    torch.backends.cudnn.conv.fp32_precision = "none"
    torch.backends.fp32_precision = "tf32" if allowed else "ieee"


STATES = {
    f"{f.__name__}_{v}": (f, v) for f in (set_old, set_new, set_both, set_parent, set_generic) for v in (True, False)
}


def passed_on():
    """What the forward and the backward operators of every function receive."""
    tensors = {
        name: (torch.randn(1, 1, *[2] * int(name[-2])), torch.randn(1, 1, *[2] * int(name[-2]))) for name in NAMES
    }
    with Recorder() as recorder:
        for name, (x, w) in tensors.items():
            getattr(fastconvt, name)(x.requires_grad_(), w).sum().backward()
        x, w = tensors[NAMES[2]]
        getattr(fastconvt, CHAIN)(x, w, None, torch.zeros(1)).sum().backward()
    assert len(recorder.allowed) == 8
    return set(recorder.allowed)


def test_tf32_is_passed_on_with_no_setting():
    assert passed_on() == {True}  # PyTorch's default


@pytest.mark.parametrize("state", STATES)
def test_tf32_is_passed_on(state):
    change, allowed = STATES[state]
    change(allowed)
    assert passed_on() == {allowed}
    change(not allowed)
    assert passed_on() == {not allowed}


def everything():
    """Every setting as it reads, alone and as a parent changes it, so that what is inherited shows too."""
    read = lambda: [t.fp32_precision for t in (torch.backends, cudnn, cudnn.conv, cudnn.rnn)]  # noqa: E731
    cudnn = torch.backends.cudnn
    found = [read(), cudnn.enabled, cudnn.benchmark, cudnn.deterministic]
    try:
        found.append(cudnn.allow_tf32)
    except RuntimeError:
        found.append("raises")
    return found


@pytest.mark.parametrize("state", ["set_neither", *STATES])
def test_aten_runs_without_tf32_and_settings_are_put_back(state):
    change, *allowed = STATES.get(state, (set_neither,))
    change(*allowed)
    torch.backends.cudnn.deterministic = False
    before = everything()
    cudnn = torch.backends.cudnn
    device = torch.device("cuda")  # settings are process-wide: no GPU is needed to change them
    with _precision.aten_convolutions(device, allow_tf32=False):
        assert cudnn.conv.fp32_precision != "tf32" and cudnn.enabled and not cudnn.deterministic
        with _precision.aten_convolutions(device, allow_tf32=False):
            pass
        assert cudnn.conv.fp32_precision != "tf32"
    assert everything() == before
    with _precision.aten_convolutions(device, allow_tf32=True):
        assert cudnn.conv.fp32_precision == before[0][2]
    assert everything() == before
    if state.startswith(("set_parent", "set_generic")):  # conv still inherits
        change(not allowed[0])
        assert (cudnn.conv.fp32_precision == "tf32") == (not allowed[0])
    elif state.startswith(("set_new", "set_both")):  # conv still does not
        cudnn.fp32_precision = "ieee" if allowed[0] else "tf32"
        assert (cudnn.conv.fp32_precision == "tf32") == allowed[0]


def test_what_is_handed_over_follows_the_setting_of_determinism():
    deterministic = torch.ops.fastconvt._deterministic
    assert not deterministic()
    torch.backends.cudnn.deterministic = True
    assert deterministic()
    torch.backends.cudnn.deterministic = False
    torch.use_deterministic_algorithms(True)
    assert deterministic()


def test_an_own_setting_that_equals_its_parents_stays_its_own():
    cudnn = torch.backends.cudnn
    torch.backends.fp32_precision = cudnn.fp32_precision = cudnn.conv.fp32_precision = "tf32"
    with _precision.aten_convolutions(torch.device("cuda"), allow_tf32=False):
        assert cudnn.conv.fp32_precision == "ieee" and cudnn.fp32_precision == torch.backends.fp32_precision == "tf32"
    assert cudnn.conv.fp32_precision == "tf32"
    cudnn.fp32_precision = "none"
    torch.backends.fp32_precision = "ieee"
    assert (cudnn.fp32_precision, cudnn.conv.fp32_precision) == ("ieee", "tf32")


def test_no_thread_gets_tf32_while_another_holds_it_away():
    inside, leave = threading.Event(), threading.Event()

    def first():
        with _precision.aten_convolutions(torch.device("cuda"), allow_tf32=False):
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=first)
    thread.start()
    inside.wait(10)
    with _precision.aten_convolutions(torch.device("cuda"), allow_tf32=False):
        leave.set()
        thread.join()
        assert torch.backends.cudnn.conv.fp32_precision == "ieee"
    assert torch.backends.cudnn.conv.fp32_precision == "tf32"
