"""The budget of the CUDA kernels' registers: what is read from cuobjdump, what breaks it, and what is skipped."""

import importlib.util
import sys
import zipfile
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "ci" / "registers.py"
specification = importlib.util.spec_from_file_location("registers", SCRIPT)
registers = importlib.util.module_from_spec(specification)
sys.modules["registers"] = registers
specification.loader.exec_module(registers)
Usage = registers.Usage

DUMP = """
Fatbin elf code:
================
arch = sm_80
code version = [1,8]

Resource usage:
 Common:
  GLOBAL:0
 Function _Z1aN2ns6ParamsE:
  REG:255 STACK:99 SHARED:99 LOCAL:99 CONSTANT[0]:928 TEXTURE:0 SURFACE:0 SAMPLER:0

Fatbin elf code:
================
arch = sm_90a

Resource usage:
 Common:
  GLOBAL:0
 Function _Z1aN2ns6ParamsE:
  REG:128 STACK:16 SHARED:1184 LOCAL:8 CONSTANT[0]:928 TEXTURE:0 SURFACE:0 SAMPLER:0
 Function _Z1bIfEvv:
  REG:32 STACK:0 SHARED:0 LOCAL:0 CONSTANT[0]:928 TEXTURE:0 SURFACE:0 SAMPLER:0
"""


def test_usage_is_read_for_one_architecture():
    expected = {"_Z1aN2ns6ParamsE": Usage(128, 24, 1184), "_Z1bIfEvv": Usage(32, 0, 0)}
    assert registers.parse(DUMP, "sm_90a") == expected
    assert registers.parse(DUMP, "sm_100") == {}


@pytest.mark.parametrize(
    ("demangled", "name"),
    [
        ("void fastconvt::cuda::(anonymous namespace)::k<float, 4>(fastconvt::cuda::P)", "k<float, 4>"),
        ("fastconvt::cuda::probe_kernel()", "probe_kernel"),
        ("void k<fastconvt::cuda::T<(fastconvt::Kind)1> >(int)", "k<T<(fastconvt::Kind)1> >"),
    ],
)
def test_names_are_short(demangled, name):
    assert registers.readable(demangled) == name


def test_what_grows_or_is_new_breaks_the_budget():
    budget = {"k": Usage(128, 0, 1024), "gone": Usage(1, 1, 1)}
    assert list(registers.compare(budget, {"k": Usage(120, 0, 512)})) == []
    assert list(registers.compare(budget, {"k": Usage(128, 8, 1024)})) == ["k: stack 0 -> 8: it spills"]
    worse = list(registers.compare(budget, {"k": Usage(129, 0, 1025)}))
    assert worse == ["k: registers 128 -> 129", "k: shared 1024 -> 1025"]
    assert "new: is not in the budget" in next(registers.compare(budget, {"new": Usage(7, 0, 0)}))


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A library that says what it was built with, a cuobjdump that prints DUMP, and a budget of our own."""
    path = tmp_path / "_C_cuda.abi3.so"
    path.write_bytes(b"\0fastconvt built for torch 2.13.0, CUDA 13.0, GPU architectures 9.0a\0")
    demangled = "ns::a(ns::Params)\nvoid b<float>()"
    monkeypatch.setattr(registers, "BUDGET", tmp_path / "budget.csv")
    monkeypatch.setattr(registers, "find_cuobjdump", lambda: "cuobjdump")
    monkeypatch.setattr(registers.shutil, "which", lambda name: name)
    monkeypatch.setattr(registers, "output_of", lambda command, text=None: DUMP if text is None else demangled)
    return path


def test_update_then_check(library, capsys):
    assert registers.check(library, update=True) == 0
    assert registers.BUDGET.read_text() == (
        "# CUDA 13.0, sm_90a\nkernel,registers,stack,shared\nb<float>,32,0,0\nns::a,128,24,1184\n"
    )
    assert registers.check(library, update=False) == 0
    registers.BUDGET.write_text(registers.BUDGET.read_text().replace("128,24", "128,16"))
    assert registers.check(library, update=False) == 1
    assert "ns::a: stack 16 -> 24: it spills" in capsys.readouterr().out


def test_nothing_is_compared_where_figures_cannot_be(library, capsys, monkeypatch):
    registers.check(library, update=True)
    library.write_bytes(library.read_bytes().replace(b"CUDA 13.0", b"CUDA 12.8"))
    assert registers.check(library, update=False) == 0
    assert "not checked: the budget is of CUDA 13.0, sm_90a, the library of CUDA 12.8" in capsys.readouterr().out
    monkeypatch.setattr(registers, "find_cuobjdump", lambda: None)
    assert registers.check(library, update=False) == 0
    assert "pip install nvidia-cuda-cuobjdump" in capsys.readouterr().out


def test_a_wheel_without_cuda_is_skipped(tmp_path, capsys, monkeypatch):
    wheel = tmp_path / "cpu.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("fastconvt/_C.abi3.so", "")
    monkeypatch.setattr(sys, "argv", ["registers.py", str(wheel)])
    assert registers.main() == 0
    assert "the wheel has no CUDA kernels" in capsys.readouterr().out


def test_the_committed_budget_can_be_read():
    compiler, budget = registers.read_budget()
    assert compiler.startswith("CUDA ") and compiler.endswith(registers.ARCHITECTURE)
    assert budget and all(0 < usage.registers <= 255 for usage in budget.values())
