"""What is installed: the library's instruction sets and dependencies, its behaviour where it cannot load, the build."""

import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

import fastconvt
from fastconvt import info
from fastconvt._library import LIBRARIES

ROOT = Path(__file__).parents[1]


def run(*command, **options):
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=300, **options)


@pytest.fixture(scope="module")
def disassembly():
    return run("objdump", "--disassemble", "--no-show-raw-insn", LIBRARIES["cpu"].path).stdout


@pytest.mark.skipif(info.platform.machine() != "x86_64", reason="other processors have one instruction set")
@pytest.mark.parametrize("register", ["zmm", "ymm"])
def test_every_instruction_set_is_in_the_library(disassembly, register):
    fused = re.compile(rf"vfn?m(add|sub)\d+p[sd] .*%{register}")
    assert sum(bool(fused.search(line)) for line in disassembly.splitlines()) > 50


def test_only_the_stable_libraries_are_needed():
    needed = run("readelf", "--dynamic", LIBRARIES["cpu"].path).stdout
    found = set(re.findall(r"\(NEEDED\).*\[(.*)\]", needed))
    assert "libtorch_cpu.so" in found
    assert not [name for name in found if "python" in name or "cuda" in name]


def test_the_operators_are_those_of_the_contents_page():
    names = {f"conv_transpose{n}d{suffix}" for n in (1, 2, 3) for suffix in ("", "_backward")}
    chain = "conv_transpose3d_logsumexp_hardswish"
    assert {*names, chain, f"{chain}_backward"} <= set(info.operators_by_backend()["Autograd"])
    assert all(hasattr(torch.ops.fastconvt, name) for name in names)


def test_info_tells_what_a_bug_report_needs():
    done = run(sys.executable, "-m", "fastconvt.info")
    assert done.returncode == 0, done.stderr
    for part in (
        fastconvt.__version__,
        torch.__version__,
        "_C.abi3.so, loaded, built for torch",
        "operators, CPU: conv",
    ):
        assert part in done.stdout
    assert "problems: none" in done.stdout or torch.cuda.is_available()


@pytest.fixture
def broken_package(tmp_path):
    """A copy of the package whose library has its mark and is no library."""
    package = tmp_path / "fastconvt"
    shutil.copytree(Path(fastconvt.__file__).parent, package, ignore=shutil.ignore_patterns("*.so"))
    (package / "_C.abi3.so").write_bytes(b"\0fastconvt built for torch 9.9.9\0")
    return tmp_path


def test_a_library_that_cannot_load_says_so_once_and_the_rest_works(broken_package):
    program = (
        "import torch, fastconvt, fastconvt.info\n"
        "print(fastconvt.info.report())\n"
        "try: fastconvt.conv_transpose2d(torch.ones(1, 1, 2, 2), torch.ones(1, 1, 2, 2))\n"
        "except RuntimeError as error: print('refused:', error)"
    )
    done = run(sys.executable, "-c", program, cwd=broken_package)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("cannot be loaded") == 1
    for text in (done.stderr, done.stdout.split("refused:")[1]):
        assert "built for torch 9.9.9" in text and f"this is torch {torch.__version__}" in text


@pytest.mark.skipif(int(version("setuptools").split(".")[0]) < 77, reason="pyproject.toml needs setuptools >= 77")
def test_a_build_without_torch_says_what_to_do(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')")
    environment = {"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin:/bin"}
    done = run(sys.executable, "setup.py", "build_ext", "--build-lib", tmp_path, cwd=ROOT, env=environment)
    assert done.returncode != 0
    assert "--no-build-isolation" in done.stderr and "Traceback" not in done.stderr
    metadata = run(sys.executable, "setup.py", "--version", cwd=ROOT, env=environment)
    assert metadata.stdout.strip().endswith(fastconvt.__version__), metadata.stderr


def test_force_refuses_unknown_candidates_and_puts_the_choice_back():
    with pytest.raises(ValueError, match="no candidate is called 'nothing'"), fastconvt.force("nothing"):
        pass
    arguments = ("conv_transpose2d", (1, 1, 4, 4), (1, 1, 2, 2))
    choice = fastconvt.plan(*arguments)["choice"]
    with fastconvt.force("aten"):
        assert fastconvt.plan(*arguments)["choice"] == "aten"
    assert fastconvt.plan(*arguments)["choice"] == choice


def test_autotune_needs_cuda_kernels_and_a_sound_environment():
    if not LIBRARIES["cuda"].loaded:
        with pytest.raises(RuntimeError, match="fastconvt"), fastconvt.autotune():
            pass
    program = [sys.executable, "-c", "import fastconvt"]
    assert run(*program, env={**os.environ, "FASTCONVT_AUTOTUNE": "0"}).returncode == 0
    done = run(*program, env={**os.environ, "FASTCONVT_AUTOTUNE": "maybe"})
    assert done.returncode != 0 and "FASTCONVT_AUTOTUNE must be 0 or 1, not 'maybe'" in done.stderr
