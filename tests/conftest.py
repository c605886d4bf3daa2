"""The marker `gpu`, the device to test on, and memory that is full of garbage."""

import hypothesis
import pytest
import torch

from tests import harness

# The tests draw the same examples every time; the fuzzer is what explores.
hypothesis.settings.register_profile("fastconvt", derandomize=True, deadline=None)
hypothesis.settings.load_profile("fastconvt")

_skipped = []


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    _skipped.extend(item for item in items if item.get_closest_marker("gpu"))
    for item in _skipped:
        item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


def pytest_terminal_summary(terminalreporter):
    if _skipped:
        terminalreporter.write_line(f"{len(_skipped)} tests need a CUDA GPU and did not run: there is none here")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    return request.param


@pytest.fixture
def poison(request):
    """Fresh memory is NaN for the length of the test."""
    with harness.poisoned_memory(request.getfixturevalue("device") if "device" in request.fixturenames else "cpu"):
        yield
