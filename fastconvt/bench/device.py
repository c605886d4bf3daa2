"""Which device to run on, and what it is called."""

import platform
import re
from pathlib import Path

import torch

import fastconvt


def choose_device(requested: str | None = None) -> tuple[torch.device, str]:
    """The device to run on, and why: the requested one, else a GPU that fastconvt serves, else the CPU."""
    if requested:
        return torch.device(requested), "as asked"
    if not torch.cuda.is_available():
        return torch.device("cpu"), "torch sees no GPU"
    device = torch.device("cuda", torch.cuda.current_device())
    try:
        tiny = torch.ones(1, 1, 1, 1, device=device)
        fastconvt.conv_transpose2d(tiny, tiny)
    except (RuntimeError, NotImplementedError) as error:
        first_line = str(error).splitlines()[0]
        return torch.device("cpu"), f"fastconvt does not serve {device_name(device)}: {first_line}"
    return device, "a GPU that fastconvt serves"


def device_name(device: torch.device) -> str:
    """The name of the GPU or the processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        found = None
    return found.group(1).strip() if found else platform.processor() or platform.machine()


def file_stem(device: torch.device) -> str:
    """The device's name as a file name."""
    return re.sub(r"[^a-z0-9]+", "-", device_name(device).lower()).strip("-")
