"""The benchmark on problems that take no time: what it writes, that it checks what it times, and what it refuses."""

import csv
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("rich")
pytest.importorskip("matplotlib")

import fastconvt
from fastconvt.bench import accuracy, chart, floor, report, summary, timing, tune
from fastconvt.bench.__main__ import main
from fastconvt.bench.contestants import build_calls, flipped, pytorch
from fastconvt.bench.layers import DTYPES, REFERENCE, Layer, load_suite, make_tensors, with_relu

ROOT = Path(__file__).parents[1]
AXES = ("input", "kernel", "stride", "padding", "output_padding", "dilation")


def entry(name, batch, channels, groups, *axes, **extra):
    in_channels, out_channels = channels
    sizes = {"N": batch, "in_channels": in_channels, "out_channels": out_channels, "groups": groups}
    return {"name": name, **sizes, **dict(zip(AXES, axes, strict=True)), "bias": True, **extra}


SUITE = [
    entry("one", 8, (4, 6), 2, [9], [4], [2], [1], [0], [1]),
    entry("two", 8, (4, 6), 2, [5, 7], [4, 3], [2, 3], [1, 0], [0, 1], [1, 2], bias=False),
    entry("three", 8, (2, 3), 1, [3, 4, 2], [2, 3, 2], [1, 2, 2], [0, 1, 0], [0, 1, 0], [1, 1, 2]),
    entry(
        *("fused", 8, (2, 5), 1, [3, 4, 5], [3, 3, 3], [2, 2, 2], [1, 1, 1], [0, 0, 0], [1, 1, 1]),
        operator="conv_transpose3d_logsumexp_hardswish",
    ),
]
LAYERS = [Layer.from_json(each) for each in SUITE]


@pytest.fixture
def suite(tmp_path):
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(SUITE))
    return path


def run(suite, tmp_path, *arguments):
    """The exit status and the rows that were written."""
    file = tmp_path / "rows.csv"
    status = main(["--suite", str(suite), "--device", "cpu", "--seconds", "0.01", "--csv", str(file), *arguments])
    with file.open(newline="") as opened:
        return status, list(csv.DictReader(opened))


@pytest.mark.parametrize("mode", ["forward", "backward", "train", "forward_relu", "train_relu"])
def test_rows_table_and_chart(suite, tmp_path, capsys, mode):
    chart = tmp_path / "chart.png"
    status, rows = run(suite, tmp_path, "--mode", mode, "--plot", str(chart))
    assert status == 0
    assert list(rows[0]) == report.COLUMNS
    assert [row["layer"] for row in rows] == ["one", "two", "three"] + ["fused"] * ("relu" not in mode)
    for row in rows:
        assert (row["suite"], row["mode"], row["precision"], row["layout"]) == ("tiny", mode, "fp32", "contiguous")
        assert float(row["ours_ms"]) >= float(row["ours_min_ms"]) > 0
        assert float(row["eager_ms"]) > 0
        assert 0 < float(row["ours_err"]) <= max(2**-20, 2 * float(row["eager_err"]))
        assert row["plan"]
        assert bool(row["eager_other_layout_ms"]) == (row["layer"] != "one")
        assert row["flipped_ms"] == row["floor_ms"] == row["driver"] == ""
    assert chart.read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "speed-up" in printed
    assert str(tmp_path / "rows.csv") in printed.replace("\n", "")


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_channels_last_and_half_precision(suite, tmp_path, precision):
    status, rows = run(suite, tmp_path, "--layout", "channels_last", "--precision", precision)
    assert status == 0
    assert [row["layer"] for row in rows] == ["two", "three", "fused"]  # there is no channels_last in one dimension
    assert all(row["layout"] == "channels_last" for row in rows)


def test_rows_are_appended_but_never_to_another_kind_of_file(suite, tmp_path):
    run(suite, tmp_path, "--filter", "one")
    _, rows = run(suite, tmp_path, "--filter", "two", "--batch", "3", "--peers", "eager")
    assert [row["layer"] for row in rows] == ["one", "two"]
    assert rows[1]["eager_other_layout_ms"] == ""
    (tmp_path / "rows.csv").write_text("some,other,columns\n")
    with pytest.raises(SystemExit, match="other columns"):
        run(suite, tmp_path)
    assert (tmp_path / "rows.csv").read_text() == "some,other,columns\n"


def test_several_modes_and_precisions_in_one_run(suite, tmp_path, capsys):
    options = ("--mode", "forward,train", "--precision", "fp32,bf16", "--layout", "contiguous,channels_last")
    status, rows = run(suite, tmp_path, *options, "--filter", "one|two", "--peers", "eager,fill")
    assert status == 0
    assert len(rows) == 2 * 2 * (2 + 1)  # there is no channels_last in one dimension
    assert len({(row["layer"], row["mode"], row["precision"], row["layout"]) for row in rows}) == len(rows)
    printed = capsys.readouterr().out
    assert "fill" in printed and "Geometric means" in printed


def test_the_commit_where_git_does_not_know(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert report.commit() == f"v{fastconvt.__version__}"
    monkeypatch.setenv("FASTCONVT_COMMIT", "1234567")
    assert report.commit() == "1234567"


def test_wrong_results_are_told(suite, tmp_path, monkeypatch, capsys):
    right = fastconvt.conv_transpose2d
    monkeypatch.setattr(fastconvt, "conv_transpose2d", lambda *args, **kwargs: right(*args, **kwargs) + 1e-3)
    status, rows = run(suite, tmp_path, "--filter", "two")
    assert status == 1
    assert float(rows[0]["ours_err"]) > 2**-20
    assert ">" in capsys.readouterr().out


def test_a_failure_is_told_and_the_others_still_run(suite, tmp_path, monkeypatch, capsys):
    def fail(*args, **kwargs):
        raise RuntimeError("out of luck")

    monkeypatch.setattr(fastconvt, "conv_transpose1d", fail)
    status, rows = run(suite, tmp_path, "--filter", "one|two")
    assert status == 1
    assert rows[0]["ours_ms"] == "" and float(rows[0]["eager_ms"]) > 0
    assert float(rows[1]["ours_ms"]) > 0
    assert "out of luck" in capsys.readouterr().out


def test_explain_prints_plans_and_times_nothing(suite, tmp_path, capsys):
    options = ["--suite", str(suite), "--device", "cpu", "--explain", "--csv", str(tmp_path / "rows.csv")]
    assert main([*options, "--mode", "forward,train_relu"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("*") == len(SUITE) + 3 * (len(SUITE) - 1)
    assert "aten" in printed and "  conv_transpose3d_act\n" in printed
    assert not (tmp_path / "rows.csv").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--suite", "nowhere.json"], "no such file"),
        (["--suite", "relatives,nowhere.json"], "no such file"),
        (["--filter", "nothing"], "no layer is left"),
        (["--precision", "tf32", "--device", "cpu"], "TF32"),
    ],
)
def test_refusals_say_why(arguments, message, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit, match=message):
        main(["--device", "cpu", *arguments])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_tune_needs_a_gpu(tmp_path):
    with pytest.raises(SystemExit, match="autotune needs a GPU"):
        tune.main([str(tmp_path)])
    assert not list(tmp_path.iterdir())


@pytest.mark.gpu
def test_tune_times_each_problem_once(suite, tmp_path):
    folder = tmp_path / "table"
    for _ in range(2):
        tune.main([str(folder), "--suites", str(suite), "--precision", "fp32", "--layout", "contiguous"])
    (file,) = folder.iterdir()
    problems = [line.split("\t")[0] for line in file.read_text().splitlines()]
    assert len(problems) == len(set(problems)) and sum(p.startswith("forward ") for p in problems) >= 3


@pytest.mark.parametrize("mode", ["forward", "backward", "train"])
@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.name)
def test_errors_are_zero_for_exact_results_and_see_a_wrong_element(layer, mode, monkeypatch):
    monkeypatch.setattr(accuracy, "CHUNK_ELEMENTS", 1)  # one sample at a time
    tensors = make_tensors(layer, torch.float64, "contiguous", torch.device("cpu"))
    exact = build_calls(layer, tensors, "contiguous", mode, ["eager"])["eager"]()
    assert accuracy.errors(layer, tensors, mode, {"exact": exact})["exact"] < 1e-15
    for index in range(len(exact)):
        for wrong in (1e-2, math.nan):
            results = [t.clone() for t in exact]
            results[index].view(-1)[-1] += wrong * (1 + results[index].abs().max())
            found = accuracy.errors(layer, tensors, mode, {"wrong": results})["wrong"]
            assert found > 1e-5 if wrong == 1e-2 else found == math.inf


@pytest.mark.parametrize("layer", [with_relu(layer) for layer in LAYERS[:3]], ids=lambda layer: layer.name)
def test_a_relu_lets_pass_what_the_checked_output_does(layer):
    tensors = make_tensors(layer, torch.float64, "contiguous", torch.device("cpu"))
    found = build_calls(layer, tensors, "contiguous", "train", ["eager"])
    torch.testing.assert_close(found["ours"](), found["eager"]())
    conv = pytorch(replace(layer, relu=False), tensors)
    assert torch.equal(found["eager"]()[0], conv.relu())
    # The largest rounding that turns an output's sign: both signs are right, with their own gradients.
    at = conv.abs().argmin()
    tensors.bias[at // conv[0, 0].numel() % layer.out_channels] -= conv.flatten()[at]
    sides = []
    for sign in (-1, 1):
        moved = replace(tensors, bias=tensors.bias + sign * 1e-15)
        sides.append(build_calls(layer, moved, "contiguous", "train", ["eager"])["eager"]())
    assert not torch.equal(sides[0][3], sides[1][3])
    errors = accuracy.errors(layer, tensors, "train", {str(i): side for i, side in enumerate(sides)})
    assert max(errors.values()) < 1e-13
    mixed = accuracy.errors(layer, tensors, "train", {"": (sides[0][0], *sides[1][1:])})
    assert mixed[""] > 1e-5


def test_data_is_random_and_inside_the_clamp():
    for layer in LAYERS:
        tensors = make_tensors(layer, torch.float32, "contiguous", torch.device("cpu"))
        assert all(t.abs().min() > 0 for t in tensors.leaves)
    fused = build_calls(LAYERS[-1], tensors, "contiguous", "forward", ["eager"])["eager"]()[0]
    assert fused.abs().max() < 1
    assert fused.std() > 0.02


def test_the_reference_suite_and_the_layer_list(monkeypatch):
    assert [layer.name for layer in load_suite("reference")] == ["reference_2d", "reference_3d_chain"]
    assert REFERENCE[0].output_shape == (16, 64, 257, 766)
    assert REFERENCE[1].output_shape == (128, 1, 31, 63, 63)
    assert set(DTYPES) == {"fp32", "tf32", "bf16", "fp16"}
    monkeypatch.chdir(ROOT)
    for suite, least in (("layers", 70), ("relatives", 15)):
        layers = load_suite(suite)
        assert len(layers) >= least
        assert len({layer.name for layer in layers}) == len(layers)
    assert {layer.fused for layer in layers if layer.name.startswith("relative_chain_")} == {True}


H200 = torch.device("cuda")


@pytest.fixture
def on_h200(monkeypatch):
    monkeypatch.setattr(floor, "device_name", lambda device: "NVIDIA H200")


def test_the_floors_of_the_reference_layers(on_h200):
    plain, chain = REFERENCE
    assert floor.multiply_adds(plain) == 3_993_042_944
    assert floor.multiply_adds(chain) == 2_497_265_664
    operands = 16 * 32 * 128 * 256 + 32 * 16 * 15
    output = 16 * 64 * 257 * 766
    forward = 4e3 * (operands + output) / 4.3e12
    assert floor.floor_ms(plain, "fp32", "forward", H200) == pytest.approx(forward)
    assert floor.floor_ms(plain, "bf16", "forward", H200) == pytest.approx(forward / 2)
    backward = 4 * 3_993_042_944e3 / 55e12  # two products are more than the bytes in float32
    assert floor.floor_ms(plain, "fp32", "backward", H200) == pytest.approx(backward)
    assert floor.floor_ms(plain, "tf32", "backward", H200) == pytest.approx(4e3 * (2 * operands + output) / 4.3e12)
    assert floor.floor_ms(plain, "fp32", "train", H200) == pytest.approx(forward + backward)
    relu = floor.floor_ms(with_relu(plain), "tf32", "backward", H200)
    assert relu == pytest.approx(4e3 * (2 * (operands + 64) + 2 * output) / 4.3e12)
    chain_bytes = 4 * (128 * 3 * 16 * 32 * 32 + 3 * 16 * 27 + 16 + 128 * 31 * 63 * 63)  # its output has one channel
    assert floor.floor_ms(chain, "tf32", "forward", H200) == pytest.approx(1e3 * chain_bytes / 4.3e12)
    assert floor.floor_ms(chain, "fp32", "forward", H200) == pytest.approx(2 * 2_497_265_664e3 / 55e12)


def test_no_floor_where_the_device_is_not_known():
    assert floor.floor_ms(REFERENCE[0], "fp32", "forward", torch.device("cpu")) is None


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.name)
def test_multiply_adds_are_those_of_pairs_in_range(layer):
    """With ones everywhere, the sum of the outputs counts the products."""
    tensors = make_tensors(replace(layer, bias=False), torch.float64, "contiguous", torch.device("cpu"))
    ones = replace(tensors, input=torch.ones_like(tensors.input), weight=torch.ones_like(tensors.weight))
    plain = replace(layer, operator=f"conv_transpose{layer.dimensions}d", bias=False)
    assert floor.multiply_adds(layer) == pytorch(plain, ones).sum().item()


FLIPPED = [
    entry("groups", 2, (4, 6), 2, [6, 7], [3, 2], [1, 1], [1, 0], [0, 0], [1, 1]),
    entry("cropped", 2, (2, 3), 1, [7], [2], [1], [3], [0], [1]),
    entry("cropped_longer", 2, (2, 3), 1, [7, 8], [2, 3], [1, 1], [3, 1], [1, 2], [2, 3], bias=False),
    entry("three", 2, (2, 3), 1, [3, 4, 5], [3, 1, 2], [1, 1, 1], [1, 0, 0], [0, 0, 1], [1, 1, 2]),
    entry("chain", 2, (2, 3), 1, [3, 4, 5], [3, 3, 3], [1, 1, 1], [1, 1, 1], [0, 0, 0], [1, 1, 1])
    | {"operator": "conv_transpose3d_logsumexp_hardswish"},
]


@pytest.mark.parametrize("layer", [Layer.from_json(each) for each in FLIPPED], ids=lambda layer: layer.name)
def test_flipped_convolution_is_the_transposed_one_at_stride_one(layer):
    tensors = make_tensors(layer, torch.float64, "contiguous", torch.device("cpu"))
    calls = build_calls(layer, tensors, "contiguous", "train", ["eager", "flipped"])
    torch.testing.assert_close(calls["flipped"](), calls["eager"]())
    assert flipped(replace(layer, stride=(2,) * layer.dimensions), tensors, "contiguous") is None


class FakeTimer:
    """A GPU's timer whose calls take as long as they say; a replayed graph takes half of it."""

    graphs = True

    def __init__(self, captures=True):
        self.captures = captures

    def time(self, call):
        return call()

    def capture(self, call):
        if not self.captures:
            raise RuntimeError("cannot do that\nwhile capturing")
        return lambda: call() / 2

    def clock_ghz(self):
        return 1.98


@pytest.mark.parametrize(("ours", "graph"), [(0.019, True), (0.021, False)])
def test_what_is_shorter_than_20_microseconds_is_replayed_from_graphs(ours, graph):
    calls = {"ours": lambda: ours, "eager": lambda: 0.1}
    measured = timing.measure(calls | {"fill": lambda: 0.001}, FakeTimer(), 0.01, yardsticks=["fill"])
    assert measured.graph == graph and measured.clock_ghz == 1.98 and measured.note == ""
    factor = 0.5 if graph else 1.0
    del measured.times["fill"]
    assert measured.times == {"ours": timing.Times(*2 * [factor * ours]), "eager": timing.Times(*2 * [factor * 0.1])}


def test_all_or_none_are_replayed_from_graphs():
    measured = timing.measure({"ours": lambda: 0.01, "eager": lambda: 0.1}, FakeTimer(captures=False), 0.01)
    assert not measured.graph
    assert measured.note == "no CUDA graphs: ours cannot be captured: cannot do that"
    assert measured.times["ours"].median == 0.01


def result(layer, ours, eager, compiled=None, **extra):
    keys = {"gpu": "NVIDIA H200", "torch": "2.11", "suite": "relatives", "layer": layer, "mode": "forward"}
    times = {"ours_ms": ours, "eager_ms": eager, "compile_ms": compiled, "floor_ms": 0.2, "plan": "rows"}
    return keys | {"precision": "fp32", "layout": "contiguous", "ours_err": 1e-7, "eager_err": 1e-7} | times | extra


@pytest.fixture
def results(tmp_path):
    """A file of results; the first row was measured again later."""
    path = tmp_path / "results.csv"
    for row in (
        result("a", 9.0, 10.0),
        result("b", 0.4, 3.6, 0.3),
        result("c", 0.5, 5.0, precision="bf16", ours_err=1e-2, graph=1, ours_peak_mb=3.0, eager_peak_mb=3.0),
        result("a", 0.4, 1.6, 6.4, ours_peak_mb=3.0, eager_peak_mb=2.0),
        result("d", 0.4, 0.4, mode="backward", plan="aten+aten"),
        result("e", 0.4, 0.8, mode="backward", plan="gemm_dgrad+aten", eager_other_layout_ms=0.2),
    ):
        report.append(path, row)
    return path


def test_summary_of_a_file(results, capsys):
    assert summary.main([str(results)]) == 0
    lines = capsys.readouterr().out.splitlines()
    cells = [line.split() for line in lines]
    # a: 4 and 16 times as fast, b: 9 and 0.75 times; both reach half of the floor
    means = {(cell[1], cell[2]): " ".join(cell[4:]) for cell in cells if cell[0] == "relatives"}
    assert means["forward", "fp32"] == "2 6.00 x 6.00 x 3.46 x 1.73 x 50%"
    assert means["forward", "bf16"] == "1 10.00 x 10.00 x - 10.00 x 40%"
    # d is left to ATen and counts 0.97, e is twice as fast as eager and half as fast as the other layout
    assert means["backward", "fp32"] == "2 1.39 x 0.70 x - 0.70 x 50%"
    losing = [line for line in lines if line.startswith("Slower")]
    assert losing == [
        "Slower than the fastest peer: e, backward, fp32, contiguous: 0.50 x other layout (0.4 / 0.2 ms)",
        "Slower than the fastest peer: b, forward, fp32, contiguous: 0.75 x torch.compile (0.4 / 0.3 ms)",
    ]
    assert [line for line in lines if "memory" in line] == [
        "More memory than PyTorch: a, forward, fp32, contiguous: 3 / 2 MB"
    ]
    assert [line for line in lines if "rule" in line] == [
        "Outside the rule of accuracy: c, forward, bf16, contiguous: 0.01"
    ]
    assert summary.main([str(results), "--layer", "a|c", "--precision", "fp32"]) == 0
    assert "Slower than the fastest peer: none" in capsys.readouterr().out


def test_charts_are_drawn_from_a_file(results, tmp_path):
    image = tmp_path / "docs" / "chart.png"
    assert summary.main([str(results), "--plot", str(image), "--title", "A title", "--peers", "compile"]) == 0
    assert image.read_bytes().startswith(b"\x89PNG")
    chart.draw([], image)  # nothing to compare is no error


@pytest.mark.parametrize(
    ("arguments", "message"), [(["nowhere.csv"], "nowhere.csv"), (["{file}", "--gpu", "A100"], "no row is left")]
)
def test_a_summary_of_nothing_says_why(results, arguments, message):
    with pytest.raises(SystemExit, match=message):
        summary.main([argument.format(file=results) for argument in arguments])


def test_costs_against_a_table(tmp_path, capsys, monkeypatch):
    pytest.importorskip("pybind11")
    costs = pytest.importorskip("benchmarks.costs")
    if not costs.CORE.exists():
        pytest.skip("csrc/core is not beside the tests")
    core, lines = costs.load_core(), []
    for i in range(1, 12):
        axes = f"axis 1 1 1 0 0 1 axis 1 1 1 0 0 1 axis {64 * i} 4 2 1 0 1"
        key = f"forward bfloat16 channels_last weight channels_last batch {i} channels 64 {16 * i} groups 1 bias {axes}"
        choice, _ = costs.Measured(core, f"{key}\taten").plan(core, 90)
        # cuDNN at 2, 3 and 1 times what bandwidth allows its inputs, outputs and products, and 0.1 ms
        inputs, outputs = (2 * i * n / 4.3e9 for n in (64 * 64 * i, 16 * i * 128 * i))
        products = 2 * i * 64 * -(-16 * i // 32) * 32 * (4 * 64 * i - 2) / 780e9
        aten = 0.1 + 2 * inputs + 3 * outputs + products
        lines.append(f"{key}\taten\tgather\t{aten / 2}\t{choice}\t{aten / 1.5}\taten\t{aten}")
    table = tmp_path / "table.tsv"
    table.write_text("\n".join(lines) + "\n")
    monkeypatch.setattr("sys.argv", ["costs", str(table), "--fit", "--worst", "1"])
    costs.main()
    printed = capsys.readouterr().out
    assert "regret of  11 problems 1.333, at most 1.33: forward, bfloat16, channels_last" in printed
    assert "{0.1, 1, 2, 3} [1. 1. 1.] 11: forward, bfloat16, channels_last" in printed


def test_gradient_costs_against_results(tmp_path, capsys, monkeypatch):
    pytest.importorskip("pybind11")
    costs = pytest.importorskip("benchmarks.gradient_costs")
    if not costs.CORE.exists():
        pytest.skip("csrc/core is not beside the tests")
    core, table = costs.load_core(), tmp_path / "results.csv"
    columns = ("suite", "layer", "mode", "precision", "layout", "ours_ms", "plan", "eager_ms", "eager_other_layout_ms")
    rows = [",".join(columns)]
    layers = [layer for layer in costs.load_suite("layers") if layer.dimensions == 2][:16]
    for layer in layers:
        expected = costs.Measured(core, layer, "bf16", "channels_last")
        start = f"layers,{layer.name},backward,bf16,channels_last"
        cost = expected.aten_cost
        rows.append(f"{start},{2 * cost},{expected.choice},{cost},{3 * cost}")
    table.write_text("\n".join(rows) + "\n")
    monkeypatch.setattr("sys.argv", ["gradient_costs", str(table), "--fit"])
    costs.main()
    printed = capsys.readouterr().out
    assert "[1. 1. 1.] 100% of  16: bf16, channels_last" in printed
    slower = [layer for layer in layers if f"  {layer.name} bf16 channels_last: " in printed]
    left = [layer for layer in layers if costs.Measured(core, layer, "bf16", "channels_last").choice == "aten+aten"]
    assert len(slower) + len(left) == 16
    assert " of  16: bf16, contiguous" in printed  # from the other layout's column
