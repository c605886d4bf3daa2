"""Arguments that cannot be computed: RuntimeError with the same text from the operator, the function, the fake and
torch.compile. All of it runs in one other process, which must live to its end."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import fastconvt
from tests.cases import Case
from tests.illegal import CHAIN, INT64_MAX, INT64_MIN, legal_call, tensor_names

LEGAL = {n: Case("legal", (2, 4, *(5, 6, 7)[:n]), (4, 3, *(3, 2, 4)[:n]), 2, 1, 1, 2, (1, 2, 3)[:n]) for n in (1, 2, 3)}
PLAIN = [f"conv_transpose{n}d" for n in (1, 2, 3)]
OPS = [name + suffix for name in (*PLAIN, CHAIN) for suffix in ("", "_backward")]


def spatial_of(op):
    return int(op[len("conv_transpose")])


def set_list(key, first, *rest):
    """The last value goes to the remaining axes."""

    def spoil(call):
        values = (first, *rest)
        call.lists[key] = [values[min(i, len(rest))] for i in range(call.spatial)]

    return spoil


def set_groups(value):
    return lambda call: setattr(call, "groups", value)


def set_shape(name, change):
    def spoil(call):
        shape, *rest = call.tensors[name]
        call.tensors[name] = (tuple(change(list(shape))), *rest)

    return spoil


def set_dtype(*names, dtype=torch.float64):
    def spoil(call):
        for name in names or call.tensors:
            call.tensors[name] = (call.tensors[name][0], dtype)

    return spoil


def move(name):
    return lambda call: call.tensors.update({name: (*call.tensors[name], "meta")})


# What is spoilt, the text that must be in the message, and the tensor without which the case does not apply.
ILLEGAL = {
    "stride 0": (set_list("stride", 0), "non-positive stride is not supported"),
    "stride of one axis negative": (lambda call: call.lists["stride"].__setitem__(-1, -3), "non-positive stride"),
    "stride int64 min": (set_list("stride", INT64_MIN), "non-positive stride is not supported"),
    "dilation 0": (set_list("dilation", 0), "dilation should be greater than zero"),
    "dilation negative": (set_list("dilation", -1), "dilation should be greater than zero"),
    "padding negative": (set_list("padding", -1), "negative padding is not supported"),
    "output_padding negative": (set_list("output_padding", -1), "negative output_padding is not supported"),
    "output_padding too large": (
        set_list("output_padding", 3),
        "output padding must be smaller than either stride or dilation, but got",
    ),
    "groups 0": (set_groups(0), "non-positive groups is not supported"),
    "groups negative": (set_groups(-2), "non-positive groups is not supported"),
    "groups int64 min": (set_groups(INT64_MIN), "non-positive groups is not supported"),
    "groups do not divide": (set_groups(3), "expected weight to be divisible by 3 at dimension 0"),
    "output of size 0": (
        lambda call: (set_list("padding", 6, 1)(call), set_list("output_padding", 1)(call)),
        "Output size is too small",
    ),
    "output negative": (set_list("padding", 40), "Output size is too small"),
    "padding int64 max": (set_list("padding", INT64_MAX), "Output size is too small"),
    "stride int64 max": (set_list("stride", INT64_MAX), "Output size is too large"),
    "output beyond int64": (set_list("stride", 2**60), "Output size is too large"),
    "input of other channels": (
        set_shape("input", lambda s: [s[0], 3, *s[2:]]),
        "to have 4 channels, but got 3 channels instead",
    ),
    "input of too few axes": (set_shape("input", lambda s: s[2:]), "(unbatched) or"),
    "input of too many axes": (set_shape("input", lambda s: [1, *s, 1]), "(batched) input to conv_transpose"),
    "input axis of size 0": (set_shape("input", lambda s: [*s[:-1], 0]), "Only zero batch inputs are supported"),
    "weight of too few axes": (set_shape("weight", lambda s: s[:-1]), "D weight, but got weight of size [4, 3"),
    "weight of too many axes": (set_shape("weight", lambda s: [*s, 1]), "D weight, but got weight of size [4, 3"),
    "weight axis of size 0": (set_shape("weight", lambda s: [*s[:-1], 0]), "kernel size should be greater than zero"),
    "no output channels": (set_shape("weight", lambda s: [s[0], 0, *s[2:]]), "at least one output channel"),
    "bias too short": (
        set_shape("bias", lambda s: [3]),
        "expected bias to be 1-dimensional with 6 elements, but got bias of size [3] instead",
        "bias",
    ),
    "bias of two axes": (set_shape("bias", lambda s: [6, 1]), "expected bias to be 1-dimensional with 6", "bias"),
    "subtrahend of two": (set_shape("subtrahend", lambda s: [2]), "expected subtrahend to have one", "subtrahend"),
    "subtrahend of none": (set_shape("subtrahend", lambda s: [0]), "expected subtrahend to have one", "subtrahend"),
    "grad_output too short": (
        set_shape("grad_output", lambda s: [*s[:-1], s[-1] - 1]),
        "expected grad_output of size [2, ",
        "grad_output",
    ),
    "grad_output of too few axes": (set_shape("grad_output", lambda s: s[1:]), "grad_output of size", "grad_output"),
    "complex": (set_dtype(dtype=torch.complex64), "complex64"),
    "integers": (set_dtype(dtype=torch.int64), "int64"),
    "weight of another dtype": (set_dtype("weight"), "input of dtype float32 and weight of dtype float64"),
    "complex weight": (set_dtype("weight", dtype=torch.complex64), "float32 and weight of dtype complex64"),
    "bias of another dtype": (set_dtype("bias"), "input of dtype float32 and bias of dtype float64", "bias"),
    "subtrahend of another dtype": (set_dtype("subtrahend"), "and subtrahend of dtype float64", "subtrahend"),
    "grad_output of another dtype": (set_dtype("grad_output"), "and grad_output of dtype float64", "grad_output"),
    "weight on meta": (move("weight"), "Expected all tensors to be on the same device"),
    "bias on meta": (move("bias"), "input on cpu and bias on meta", "bias"),
    "subtrahend on meta": (move("subtrahend"), "input on cpu and subtrahend on meta", "subtrahend"),
    "grad_output on meta": (move("grad_output"), "input on cpu and grad_output on meta", "grad_output"),
}
for key in ("stride", "padding", "output_padding", "dilation"):
    text = f"expected {key} to be a single integer value or a list of"
    ILLEGAL[f"{key} list too long"] = (lambda call, key=key: call.lists[key].extend([1] * 3), text)
    ILLEGAL[f"{key} list empty"] = (lambda call, key=key: call.lists[key].clear(), text)
CASES = [(op, name) for op in OPS for name, (_, _, *needs) in ILLEGAL.items() if set(needs) <= set(tensor_names(op))]


def spoilt_call(op, name):
    call = legal_call(LEGAL[spatial_of(op)], op)
    ILLEGAL[name][0](call)
    return call


def run_modes(op, name):
    """What each way of making the call raises, as (type name, is RuntimeError, text)."""
    call = spoilt_call(op, name)
    operator = getattr(torch.ops.fastconvt, op)
    function = getattr(fastconvt, op, None)
    arguments = call.make()
    outcomes = {"eager": outcome(operator, arguments)}
    if function is not None:
        outcomes["function"] = outcome(function, arguments)
    if "meta" not in name:
        outcomes["meta"] = outcome(operator, call.make("meta"))
        with FakeTensorMode():
            outcomes["fake"] = outcome(operator, call.make())
    if op in ("conv_transpose2d", "conv_transpose2d_backward", CHAIN) and "meta" not in name:
        torch._dynamo.reset()
        compiled = torch.compile(lambda *args: operator(*args), fullgraph=True, backend="eager")
        outcomes["compiled"] = outcome(compiled, arguments)
    return outcomes


def outcome(function, arguments):
    try:
        result = function(*arguments)
    except Exception as error:
        return [type(error).__name__, isinstance(error, RuntimeError), str(error)]
    return ["nothing", False, f"returned {result!r:.200}"]


@pytest.fixture(scope="module")
def outcomes():
    """The outcomes by operator and case, from one process for all of them."""
    command = [sys.executable, "-m", "tests.test_arguments"]
    done = subprocess.run(command, cwd=Path(__file__).parent.parent, capture_output=True, text=True, timeout=600)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    last = lines[-1][:2] if lines else "before the first"
    assert done.returncode == 0, f"exit code {done.returncode} after {last}\n{done.stderr[-2000:]}"
    return {(op, name): result for op, name, result in lines}


@pytest.mark.parametrize(("op", "name"), CASES, ids=lambda value: value.replace(" ", "_"))
def test_refused_with_one_text(outcomes, op, name):
    expected = ILLEGAL[name][1]
    eager = outcomes[op, name]["eager"]
    for mode, (kind, is_runtime_error, text) in outcomes[op, name].items():
        assert is_runtime_error, f"{mode}: {kind}: {text}"
        assert expected in text, mode
        assert text.startswith(f"{op}: ") or mode == "compiled", mode
        if mode == "compiled":
            assert eager[2].splitlines()[0] in text
        else:
            assert text.replace("on meta", "on cpu") == eager[2].replace("on meta", "on cpu"), mode


def test_legal_calls_are_not_refused():
    """The calls that the cases above spoil."""
    for op in OPS:
        result = getattr(torch.ops.fastconvt, op)(*legal_call(LEGAL[spatial_of(op)], op).make())
        assert all(tensor.numel() > 0 for tensor in ([result] if isinstance(result, torch.Tensor) else result))


if __name__ == "__main__":
    for op, name in CASES:
        print(json.dumps([op, name, run_modes(op, name)]), flush=True)
