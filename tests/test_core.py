"""csrc/core against brute force, and against the Python functions that fakes use."""

import itertools
import json
import random

import pytest
import torch
from hypothesis import given, settings, strategies

from fastconvt import _shapes
from tests.cases import BY_NAME, CASES, cases
from tests.core_module import CORE, load_core
from tests.illegal import CHAIN, INT64_MAX, INT64_MIN, LISTS, draw_call, legal_call

integers = strategies.integers


@pytest.fixture(scope="session")
def core():
    pytest.importorskip("pybind11")
    if not CORE.exists():
        pytest.skip("csrc/core is not beside the tests")
    return load_core()


@strategies.composite
def axes(draw):
    size, kernel, stride, dilation = (draw(integers(1, n)) for n in (9, 7, 9, 9))
    output_padding = draw(integers(0, max(stride, dilation) - 1))
    span = (size - 1) * stride + dilation * (kernel - 1) + output_padding
    return size, kernel, stride, draw(integers(0, span // 2)), output_padding, dilation


@settings(max_examples=300)
@given(axes())
def test_phases_cover_every_output_once(core, parameters):
    axis = core.Axis(*parameters)
    size, kernel, stride, padding, output_padding, dilation = parameters
    assert axis.out() == (size - 1) * stride - 2 * padding + dilation * (kernel - 1) + output_padding + 1
    covered = []
    for r in range(stride):
        outputs = [axis.first_output(r) + j * stride for j in range(axis.num_outputs(r))]
        assert all(axis.phase(o) == r and axis.base(o) * stride + r == o + padding for o in outputs)
        covered += outputs
    assert sorted(covered) == list(range(axis.out()))


@settings(max_examples=300)
@given(axes())
def test_taps_and_offsets_of_every_output(core, parameters):
    axis = core.Axis(*parameters)
    _, kernel, stride, padding, _, dilation = parameters
    for o in range(axis.out()):
        r = axis.phase(o)
        expected = [t for t in range(kernel) if (o + padding - t * dilation) % stride == 0]
        assert list(range(axis.first_tap(r), kernel, axis.tap_step())) == expected
        assert axis.num_taps(r) == len(expected)
        for t in expected:
            assert axis.base(o) + axis.offset(r, t) == (o + padding - t * dilation) // stride


def count_pairs(parameters, out):
    size, kernel, stride, padding, _, dilation = parameters
    pairs = itertools.product(range(size), range(kernel))
    return sum(0 <= i * stride - padding + t * dilation < out for i, t in pairs)


@settings(max_examples=300)
@given(axes())
def test_pairs_are_the_useful_multiplications(core, parameters):
    axis = core.Axis(*parameters)
    assert axis.num_pairs() == count_pairs(parameters, axis.out())


def check_in_python(op, spatial, tensors, lists, groups):
    """The output's shape or the text of the error."""
    meta = {name: torch.empty(shape, dtype=dtype, device=device) for name, (shape, dtype, device) in tensors.items()}
    stride, padding, output_padding, dilation = (lists[key] for key in LISTS)
    try:
        call = _shapes.check_call(op, spatial, meta, stride, padding, output_padding, groups, dilation)
    except RuntimeError as error:
        return str(error)
    return tuple(call.shape)


def check_in_cpp(core, op, spatial, tensors, lists, groups):
    described = [
        (name, list(shape), str(dtype).removeprefix("torch."), device)
        for name, (shape, dtype, device) in tensors.items()
    ]
    stride, padding, output_padding, dilation = (lists[key] for key in LISTS)
    try:
        problem = core.check_arguments(op, spatial, described, stride, padding, output_padding, groups, dilation)
    except RuntimeError as error:
        return str(error)
    batch = (problem.batch,) * (len(tensors["input"][0]) == spatial + 2)
    return (*batch, problem.out_channels, *(axis.out() for axis in problem.axis[3 - spatial :]))


def arguments_of(call):
    tensors = {name: (shape, dtype, "meta") for name, (shape, dtype) in call.tensors.items()}
    return call.op, call.spatial, tensors, call.lists, call.groups


@settings(max_examples=200)
@given(cases())
def test_python_and_cpp_agree_on_legal_calls(core, case):
    arguments = arguments_of(legal_call(case, case.op))
    assert check_in_python(*arguments) == check_in_cpp(core, *arguments) == case.output


@pytest.mark.parametrize("seed", range(4))
def test_python_and_cpp_agree_on_illegal_calls(core, seed):
    source = random.Random(seed)
    for _ in range(400):
        call = draw_call(source.randint, spoil=source.randint(1, 2))
        call.op = call.op.removesuffix("_backward")
        call.tensors.pop("grad_output", None)  # which only Python checks
        arguments = arguments_of(call)
        tensors = arguments[2]
        if source.randint(0, 9) == 0:
            name = source.choice(sorted(tensors))
            tensors[name] = (*tensors[name][:2], "cpu")
        in_python, in_cpp = check_in_python(*arguments), check_in_cpp(core, *arguments)
        if call.op == CHAIN and not isinstance(in_cpp, str):
            in_cpp = (*in_cpp[:-4], 1, *in_cpp[-3:])
        assert in_python == in_cpp, arguments


@pytest.mark.parametrize("key", [*LISTS, "groups"])
@pytest.mark.parametrize("value", [INT64_MIN, INT64_MIN + 1, -1, 2**31, 2**62, INT64_MAX - 1, INT64_MAX])
def test_python_and_cpp_agree_on_huge_values(core, key, value):
    for case in (BY_NAME["unequal_2d"], BY_NAME["one_pixel_3d"], BY_NAME["unbatched_1d"]):
        call = legal_call(case, case.op)
        if key == "groups":
            call.groups = value
        else:
            call.lists[key][0] = value
        arguments = arguments_of(call)
        assert check_in_python(*arguments) == check_in_cpp(core, *arguments)


@pytest.mark.parametrize("subtrahend", [(), (1,), (1, 1, 1), (2,), (0,), (1, 3)])
def test_python_and_cpp_agree_on_the_subtrahend(core, subtrahend):
    call = legal_call(BY_NAME["reference_3d"], CHAIN)
    call.tensors["subtrahend"] = (subtrahend, torch.float32)
    arguments = arguments_of(call)
    in_python, in_cpp = check_in_python(*arguments), check_in_cpp(core, *arguments)
    if isinstance(in_python, str):
        assert in_python == in_cpp
    else:
        assert in_python == (2, 1, *in_cpp[2:])


@pytest.mark.parametrize("case", [case for case in CASES if case.batched], ids=str)
def test_counts_of_a_problem(core, case):
    op, spatial, tensors, lists, groups = arguments_of(legal_call(case, case.op))
    described = [(name, list(shape), "float32", "cpu") for name, (shape, _, _) in tensors.items()]
    ordered = [lists["stride"], lists["padding"], lists["output_padding"], groups, lists["dilation"]]
    problem = core.check_arguments(op, spatial, described, *ordered)
    pairs = 1
    for i in range(spatial):
        parameters = (case.input[2 + i], case.weight[2 + i], *(lists[key][i] for key in LISTS))
        pairs *= count_pairs(parameters, case.output[2 + i])
    assert problem.macs() == case.input[0] * case.input[1] * case.weight[1] * pairs
    elements = sum(torch.Size(shape).numel() for shape in (case.input, case.weight, case.output))
    assert problem.bytes() == 4 * elements


def problem(core, name, dtype="float32", tf32=False, channels_last=False):
    """A case as csrc/core has it."""
    case = BY_NAME[name]
    tensors = [("input", list(case.input), dtype, ""), ("weight", list(case.weight), dtype, "")]
    stride, padding, output_padding, groups, dilation = case.args
    made = core.check_arguments(case.op, case.ndim, tensors, stride, padding, output_padding, groups, dilation)
    made.allow_tf32, made.channels_last = tf32, channels_last
    return made


def plan_on_gpu(core, operation, problem, capability=90, refusal="", forced=""):
    return json.loads(core.plan_on_gpu(getattr(core.Operation, operation), problem, capability, refusal, forced))


# An operation, a call, candidates of our own that can make it, and those that can on a GPU of compute capability 7.5.
OWN = [
    (
        "CONV_TRANSPOSE",
        ("reference_2d",),
        ["row_tile", "gather", "rows_persistent", "flat_gemm"],
        ["gather"],
    ),
    ("CONV_TRANSPOSE", ("reference_2d", "float32", False, True), ["rows", "gather"], ["gather"]),
    ("CONV_TRANSPOSE", ("reference_2d", "float32", True), ["row_tile", "rows_persistent"], ["gather"]),
    ("CONV_TRANSPOSE", ("reference_2d", "bfloat16"), ["rows_persistent", "gather"], ["gather"]),
    ("CONV_TRANSPOSE", ("reference_2d", "bfloat16", False, True), ["rows_mma"], ["gather"]),
    ("CONV_TRANSPOSE", ("audio_k6_s3_depthwise",), ["depthwise"], ["gather", "depthwise"]),
    ("CONV_TRANSPOSE", ("many_inputs_one_output", "bfloat16", False, True), ["heads"], ["gather"]),
    ("CONV_TRANSPOSE", ("unet_k2_s2", "bfloat16"), ["pixel_shuffle", "direct"], ["gather", "direct"]),
    ("CONV_TRANSPOSE", ("dense_k2_s2", "bfloat16"), ["shuffle_gemm", "pixel_shuffle"], ["gather", "direct"]),
    ("CONV_TRANSPOSE", ("dense_k2_s2_of_12", "float16"), ["shuffle_planes"], ["gather"]),
    ("CONV_TRANSPOSE", ("head_3d_k4_s2", "float32", True), ["heads_gemm", "overlap_add"], ["gather", "direct"]),
    ("CONV_TRANSPOSE", ("fsrcnn_k9_s3",), ["phase_direct"], ["gather"]),
    ("CONV_TRANSPOSE", ("vocoder_k16_s8", "bfloat16"), ["overlap_add"], ["gather"]),
    ("CONV_TRANSPOSE", ("filter_bank_k64_s16", "bfloat16"), ["filter_bank", "overlap_add"], ["gather"]),
    ("CONV_TRANSPOSE", ("dilation_of_the_stride", "bfloat16"), ["phase_tma", "dense"], ["gather", "direct"]),
    ("CONV_TRANSPOSE", ("dense_k3_s1", "bfloat16", False, True), ["phase_pixels", "phase_tma"], ["gather"]),
    ("CONV_TRANSPOSE", ("channels_512_to_67", "float32", True, True), ["phase_tf32", "dense"], ["gather"]),
    ("CONV_TRANSPOSE", ("unequal_1d",), ["long_rows"], ["gather"]),
    ("CONV_TRANSPOSE", ("dilation_of_the_stride", "float32", False, True), ["pixel_rows"], ["gather", "direct"]),
    ("INPUT_GRADIENT", ("reference_2d",), ["rows_dgrad", "heads_dgrad", "dense_dgrad"], ["direct_dgrad"]),
    ("WEIGHT_GRADIENT", ("reference_2d",), ["rows_wgrad", "heads_wgrad", "dense_wgrad"], []),
    ("INPUT_GRADIENT", ("bilinear_head_k16_s8",), ["depthwise_dgrad"], ["depthwise_dgrad"]),
    ("WEIGHT_GRADIENT", ("bilinear_head_k16_s8",), ["depthwise_wgrad"], ["depthwise_wgrad"]),
    ("INPUT_GRADIENT", ("depthwise_k4_s2_in_vectors",), ["depthwise_gradients"], ["depthwise_dgrad", "direct_dgrad"]),
    ("WEIGHT_GRADIENT", ("depthwise_k4_s2_in_vectors",), ["depthwise_gradients"], ["depthwise_wgrad"]),
    ("INPUT_GRADIENT", ("dense_k3_s1", "bfloat16"), ["mirrored_dgrad", "gemm_dgrad", "dense_dgrad"], ["direct_dgrad"]),
    ("WEIGHT_GRADIENT", ("dense_k3_s1", "bfloat16"), ["gemm_wgrad", "dense_wgrad"], []),
    ("INPUT_GRADIENT", ("dense_k2_s2_of_64", "bfloat16"), ["pairs_dgrad"], ["direct_dgrad"]),
    ("WEIGHT_GRADIENT", ("dense_k2_s2_of_64", "bfloat16"), ["pairs_wgrad"], []),
    ("INPUT_GRADIENT", ("dense_k4_s2", "bfloat16"), ["pairs_dgrad"], ["direct_dgrad"]),
    ("WEIGHT_GRADIENT", ("dense_k2_s2_of_12", "float16"), ["pairs_wgrad"], []),
    ("INPUT_GRADIENT", ("dense_k2_s2_of_64", "float32", True), ["pairs_tf32_gradients"], ["direct_dgrad"]),
    ("WEIGHT_GRADIENT", ("dense_k2_s2_of_64", "float32", True), ["pairs_tf32_gradients"], []),
    ("INPUT_GRADIENT", ("dense_k3_s1", "float32", True), ["boxes_tf32_gradients"], ["direct_dgrad"]),
    ("WEIGHT_GRADIENT", ("dense_k3_s1", "float32", True), ["boxes_tf32_gradients"], []),
    ("INPUT_GRADIENT", ("channels_512_to_67", "float32", True), ["few_dgrad"], ["direct_dgrad"]),
    ("WEIGHT_GRADIENT", ("channels_512_to_67",), ["few_wgrad"], []),
    ("INPUT_GRADIENT", ("groups_2_of_12",), ["direct_dgrad"], ["direct_dgrad"]),
    ("WEIGHT_GRADIENT", ("groups_2_of_12",), ["direct_wgrad"], []),
    ("CHAIN", ("reference_3d",), ["fused_mma", "fused"], ["fused"]),
    ("CHAIN_GRADIENTS", ("reference_3d",), ["fused_mma", "fused"], ["fused"]),
]


@pytest.mark.parametrize("operation, call, own, _", OWN)
def test_every_own_candidate_can_make_its_reference_layer(core, operation, call, own, _):
    made = problem(core, *call)
    plan = plan_on_gpu(core, operation, made)
    assert {row["name"] for row in plan["candidates"] if row["supported"]} >= {*own, "aten"}
    assert all(row["cost_ms"] > 0 for row in plan["candidates"] if row["supported"])
    for forced in (*own, "aten"):
        assert plan_on_gpu(core, operation, made, forced=forced)["choice"] == forced


def test_every_candidate_of_a_gpu_has_a_layer_of_its_own(core):
    calls = {operation: call for operation, call, _, _ in OWN}
    plans = [plan_on_gpu(core, operation, problem(core, *call)) for operation, call in calls.items()]
    names = {row["name"] for plan in plans for row in plan["candidates"]}
    assert names == {"aten", *(name for _, _, own, _ in OWN for name in own)}


@pytest.mark.parametrize("_, call, own, __", [row for row in OWN if row[0] == "CONV_TRANSPOSE"])
def test_a_pass_for_the_activation_counts_where_the_kernel_does_not_apply_it(core, _, call, own, __):
    made = problem(core, *call)
    plain = plan_on_gpu(core, "CONV_TRANSPOSE", made)["candidates"]
    for made.activation in ("relu", "gelu"):
        for before, after in zip(plain, plan_on_gpu(core, "CONV_TRANSPOSE", made)["candidates"], strict=True):
            name = before["name"]
            assert (name, before["supported"]) == (after["name"], after["supported"])
            if before["supported"]:
                applied = name == "gather" or (made.activation == "relu" and name != "aten")
                assert (after["cost_ms"] == before["cost_ms"]) == applied


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_case_has_a_plan_on_a_gpu(core, case):
    for dtype, tf32, last in itertools.product(("float32", "bfloat16", "float64"), (False, True), (False, True)):
        for operations in (("CONV_TRANSPOSE",), ("INPUT_GRADIENT", "WEIGHT_GRADIENT")):
            chosen = by_aten = 0
            for operation in operations:
                plan = plan_on_gpu(core, operation, problem(core, case.name, dtype, tf32, last))
                costs = {row["name"]: row["cost_ms"] for row in plan["candidates"] if row["supported"]}
                chosen, by_aten = chosen + costs[plan["choice"]], by_aten + costs["aten"]
            assert by_aten >= chosen >= 0


@pytest.mark.parametrize("operation, call, own, _", OWN)
def test_a_gpu_that_our_kernels_cannot_serve_is_left_to_aten(core, operation, call, own, _):
    made = problem(core, *call)
    plan = plan_on_gpu(core, operation, made, refusal="the driver is too old")
    assert plan["choice"] == "aten"
    reasons = {row["name"]: row["reason"] for row in plan["candidates"]}
    assert {reasons[name] for name in own} == {"the driver is too old"}
    with pytest.raises(RuntimeError, match=f"{own[0]} cannot make this call: the driver is too old"):
        plan_on_gpu(core, operation, made, refusal="the driver is too old", forced=own[0])


@pytest.mark.parametrize("operation, call, own, on_older", OWN)
def test_an_older_gpu_is_left_to_the_kernels_that_it_can_run(core, operation, call, own, on_older):
    plan = plan_on_gpu(core, operation, problem(core, *call), capability=75)
    assert [row["name"] for row in plan["candidates"] if row["supported"]] == [*on_older, "aten"]


# The whole layers of docs/design.md, section 5, and what is planned for them on an H200.
PLANNED = [
    ("CONV_TRANSPOSE", "float32", False, "rows_persistent"),
    ("CONV_TRANSPOSE", "float32", True, "rows_persistent"),
    ("CONV_TRANSPOSE", "bfloat16", False, "rows_persistent"),
    ("INPUT_GRADIENT", "float32", False, "rows_dgrad"),
    ("WEIGHT_GRADIENT", "float32", False, "rows_wgrad"),
    ("CHAIN", "float32", False, "fused_mma"),
    ("CHAIN_GRADIENTS", "float32", False, "fused_mma"),
]


@pytest.mark.parametrize("operation, dtype, tf32, choice", PLANNED)
def test_plans_of_the_reference_layers(core, operation, dtype, tf32, choice):
    if operation.startswith("CHAIN"):
        sizes, geometry = ([128, 3, 16, 32, 32], [3, 16, 3, 3, 3]), ([2], [1], [0], 1, [1])
    else:
        sizes, geometry = ([16, 32, 128, 256], [32, 16, 3, 5]), ([2, 3], [1, 2], [0], 4, [2, 1])
    tensors = [(name, size, dtype, "") for name, size in zip(("input", "weight"), sizes, strict=True)]
    spatial = len(sizes[0]) - 2
    made = core.check_arguments(f"conv_transpose{spatial}d", spatial, tensors, *geometry)
    made.allow_tf32 = tf32
    assert plan_on_gpu(core, operation, made)["choice"] == choice


def test_a_forced_candidate_of_another_operation_or_device_changes_nothing(core):
    made = problem(core, "reference_2d")
    choice = plan_on_gpu(core, "CONV_TRANSPOSE", made)["choice"]
    for forced in ("fused", "phase_portable", "rows_dgrad"):
        assert plan_on_gpu(core, "CONV_TRANSPOSE", made, forced=forced)["choice"] == choice


@pytest.fixture
def tuning(core, tmp_path):
    """core while it measures into ``tmp_path``."""
    core.set_autotune_folder(str(tmp_path))
    yield core
    core.set_autotune_folder("")


def test_measurements_are_kept_by_problem_and_device(tuning, tmp_path):
    forward, made = tuning.Operation.CONV_TRANSPOSE, problem(tuning, "reference_2d")
    others = [problem(tuning, "reference_2d", "float16"), problem(tuning, "unequal_2d")]
    assert tuning.wants_measurement(forward, made, "GPU A")
    tuning.keep_measurement(forward, made, "GPU A", "rows", {"gather": 1.5, "rows": 0.5})
    assert tuning.tuned_candidate(forward, made, "GPU A") == "rows"
    assert not tuning.wants_measurement(forward, made, "GPU A")
    unknown = [(forward, made, "GPU B"), (tuning.Operation.INPUT_GRADIENT, made, "GPU A")]
    for call in unknown + [(forward, other, "GPU A") for other in others]:
        assert tuning.tuned_candidate(*call) is None and tuning.wants_measurement(*call)
    lines = (tmp_path / "gpu-a.tsv").read_text().splitlines()
    assert [line.split("\t")[1:] for line in lines] == [["rows", "gather", "1.5", "rows", "0.5"]]
    tuning.set_autotune_folder("")
    assert tuning.tuned_candidate(forward, made, "GPU A") == "rows"
    assert not tuning.wants_measurement(*unknown[0])


def test_measurements_are_read_from_the_file(tuning, tmp_path):
    """The last line of a problem counts; what is no line of ours is passed over."""
    forward, made = tuning.Operation.CONV_TRANSPOSE, problem(tuning, "unequal_3d")
    for candidate in ("gather", "direct"):
        tuning.keep_measurement(forward, made, "GPU C", candidate, {candidate: 1.0})
    written = (tmp_path / "gpu-c.tsv").read_text()
    (tmp_path / "gpu-d.tsv").write_text("no tab\n\n" + written + "cut of")
    assert tuning.tuned_candidate(forward, made, "GPU D") == "direct"


def test_a_folder_that_cannot_be_written_loses_nothing_else(tuning, tmp_path, capfd):
    tuning.set_autotune_folder(str(tmp_path / "missing"))
    forward, made = tuning.Operation.CONV_TRANSPOSE, problem(tuning, "unequal_1d")
    tuning.keep_measurement(forward, made, "GPU E", "gather", {"gather": 1.0})
    assert tuning.tuned_candidate(forward, made, "GPU E") == "gather"
    assert "autotune cannot write" in capfd.readouterr().err
