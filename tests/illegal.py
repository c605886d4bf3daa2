"""Calls that the operators must refuse: legal ones with an argument spoilt."""

import dataclasses

import torch

from tests.cases import draw_case

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
LISTS = ("stride", "padding", "output_padding", "dilation")


CHAIN = "conv_transpose3d_logsumexp_hardswish"


@dataclasses.dataclass
class Call:
    """An operator's arguments before any check: `tensors` are (shape, dtype) or (shape, dtype, device) by name."""

    op: str
    spatial: int
    tensors: dict
    lists: dict
    groups: int = 1

    def make(self, device="cpu"):
        """The operator's arguments in its order, with tensors of zeros."""
        made = dict.fromkeys(tensor_names(self.op))
        for name, (shape, dtype, *own_device) in self.tensors.items():
            made[name] = torch.zeros(shape, dtype=dtype, device=(own_device or [device])[0])
        stride, padding, output_padding, dilation = (self.lists[key] for key in LISTS)
        mask = [[True] * (4 if "subtrahend" in made else 3)] if "grad_output" in made else []
        return [*made.values(), stride, padding, output_padding, self.groups, dilation, *mask]


def tensor_names(op):
    """The names of the operator's tensors, in its order."""
    backward = op.endswith("_backward")
    chain = op.startswith(CHAIN)
    names = ["grad_output"] * backward + ["input", "weight"] + ["bias"] * (chain or not backward)
    return names + ["subtrahend"] * chain


def legal_call(case, op, dtype=torch.float32):
    """The call of a case, by any operator of its dimension."""
    output = case.output
    if op.startswith(CHAIN):
        output = (*output[:-4], 1, *output[-3:])
    shapes = {"grad_output": output, "input": case.input, "weight": case.weight, "subtrahend": (1,)}
    if case.bias:
        shapes["bias"] = (case.out_channels,)
    tensors = {name: (shapes[name], dtype) for name in tensor_names(op) if name in shapes}
    geometry = case.args
    lists = dict(zip(LISTS, (*geometry[:3], geometry[4]), strict=True))
    return Call(op, case.ndim, tensors, lists, case.groups)


def draw_call(integer, spoil=1):
    """A call of a drawn case (see cases.draw_case for `integer`) with this many of its arguments spoilt."""
    case = draw_case(integer, max_elements=2_000)
    op = CHAIN if case.ndim == 3 and integer(0, 1) else case.op
    call = legal_call(case, op + "_backward" * (integer(0, 3) == 0))
    chosen = {integer(0, len(SPOILERS) - 1) for _ in range(spoil)}
    for index in sorted(chosen):
        SPOILERS[index](call, integer)
    return call


def _one_of(integer, values):
    return values[integer(0, len(values) - 1)]


def _set(call, integer, key, values):
    call.lists[key][integer(0, len(call.lists[key]) - 1)] = _one_of(integer, values)


def _reshape(call, name, change):
    shape, *rest = call.tensors[name]
    call.tensors[name] = (tuple(change(list(shape))), *rest)


def stride_not_positive(call, integer):
    _set(call, integer, "stride", (0, -1, INT64_MIN))


def dilation_not_positive(call, integer):
    _set(call, integer, "dilation", (0, -2, INT64_MIN))


def padding_negative(call, integer):
    _set(call, integer, "padding", (-1, INT64_MIN))


def padding_too_large(call, integer):
    _set(call, integer, "padding", (10_000, 2**40, 2**62, INT64_MAX))


def output_padding_negative(call, integer):
    _set(call, integer, "output_padding", (-1, INT64_MIN))


def output_padding_too_large(call, integer):
    axis = integer(0, len(call.lists["stride"]) - 1)
    limit = max(call.lists["stride"][axis], call.lists["dilation"][axis])
    call.lists["output_padding"][axis] = _one_of(integer, (limit, limit + 3, INT64_MAX)) if limit < 2**60 else limit


def output_too_large(call, integer):
    axis = integer(1, call.spatial)
    _reshape(call, "input", lambda s: [*s[:-axis], max(s[-axis], 3), *s[len(s) - axis + 1 :]])
    call.lists["stride"][-axis] = _one_of(integer, (2**62, INT64_MAX))


def groups_not_positive(call, integer):
    call.groups = _one_of(integer, (0, -1, INT64_MIN))


def groups_do_not_divide(call, integer):
    call.groups = call.tensors["weight"][0][0] + integer(1, 3)


def list_of_wrong_length(call, integer):
    key = _one_of(integer, LISTS)
    call.lists[key] = _one_of(integer, ([], [1] * (call.spatial + 1), [1] * 5))


def input_channels_differ(call, integer):
    channels = len(call.tensors["input"][0]) - call.spatial - 1
    _reshape(call, "input", lambda s: [*s[:channels], s[channels] + 1, *s[channels + 1 :]])


def input_rank(call, integer):
    _reshape(call, "input", lambda s: _one_of(integer, (s[-call.spatial :], [1, 1, *s, 1])))


def input_axis_empty(call, integer):
    axis = integer(1, call.spatial)
    _reshape(call, "input", lambda s: [*s[:-axis], 0, *s[len(s) - axis + 1 :]])


def weight_rank(call, integer):
    _reshape(call, "weight", lambda s: _one_of(integer, (s[:-1], [*s, 1], s[:1], [])))


def weight_axis_empty(call, integer):
    axis = integer(1, call.spatial + 1)
    _reshape(call, "weight", lambda s: [*s[:-axis], 0, *s[len(s) - axis + 1 :]])


def last_tensor_shape(call, integer):
    """grad_output, or else the bias, which is added where there is none."""
    name = "grad_output" if "grad_output" in call.tensors else "bias"
    weight = call.tensors["weight"][0]
    call.tensors.setdefault(name, ((weight[1] * call.groups if len(weight) > 1 else 1,), torch.float32))
    _reshape(call, name, lambda s: _one_of(integer, ([n + 1 for n in s], [*s, 1], [*s, 2], [])))


def dtypes_differ(call, integer):
    name = _one_of(integer, list(call.tensors))
    call.tensors[name] = (call.tensors[name][0], _one_of(integer, (torch.float64, torch.float16, torch.bfloat16)))


def dtype_unsupported(call, integer):
    dtype = _one_of(integer, (torch.complex64, torch.int64, torch.bool))
    call.tensors = {name: (shape, dtype) for name, (shape, _) in call.tensors.items()}


# Those that change the number of axes come last: the others count on it.
SPOILERS = (
    stride_not_positive,
    dilation_not_positive,
    padding_negative,
    padding_too_large,
    output_padding_negative,
    output_padding_too_large,
    output_too_large,
    groups_not_positive,
    groups_do_not_divide,
    input_channels_differ,
    input_axis_empty,
    weight_axis_empty,
    dtypes_differ,
    dtype_unsupported,
    last_tensor_shape,
    input_rank,
    weight_rank,
    list_of_wrong_length,
)
