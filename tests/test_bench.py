"""The benchmark on problems that take no time: what it writes, that it checks what it times, and what it refuses."""

import csv
import json
import math

import pytest
import torch

pytest.importorskip("rich")
pytest.importorskip("matplotlib")

import fastconvt
from fastconvt.bench import accuracy, report
from fastconvt.bench.__main__ import main
from fastconvt.bench.contestants import build_calls
from fastconvt.bench.layers import DTYPES, REFERENCE, Layer, load_suite, make_tensors

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


@pytest.mark.parametrize("mode", ["forward", "backward", "train"])
def test_rows_table_and_chart(suite, tmp_path, capsys, mode):
    chart = tmp_path / "chart.png"
    status, rows = run(suite, tmp_path, "--mode", mode, "--plot", str(chart))
    assert status == 0
    assert list(rows[0]) == report.COLUMNS
    assert [row["layer"] for row in rows] == ["one", "two", "three", "fused"]
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
    assert main(["--suite", str(suite), "--device", "cpu", "--explain", "--csv", str(tmp_path / "rows.csv")]) == 0
    printed = capsys.readouterr().out
    assert printed.count("*") == len(SUITE)
    assert "aten" in printed
    assert not (tmp_path / "rows.csv").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--suite", "nowhere.json"], "no such file"),
        (["--filter", "nothing"], "no layer is left"),
        (["--precision", "tf32", "--device", "cpu"], "TF32"),
    ],
)
def test_refusals_say_why(arguments, message):
    with pytest.raises(SystemExit, match=message):
        main(["--device", "cpu", *arguments])


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
    monkeypatch.chdir(__file__.rsplit("/", 2)[0])
    layers = load_suite("layers")
    assert len(layers) > 70
    assert len({layer.name for layer in layers}) == len(layers)
