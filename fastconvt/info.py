"""``python -m fastconvt.info``: versions, libraries, operators, devices and problems; what a bug report pastes."""

import os
import platform
import sys

import torch

import fastconvt
from fastconvt._library import LIBRARIES


def operators_by_backend() -> dict[str, list[str]]:
    """The operators of the library, by the dispatch keys that have a kernel for them."""
    names = sorted({schema.name for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("fastconvt::")})
    keys = ("CPU", "CUDA", "Meta", "Autograd", "AutocastCPU", "AutocastCUDA", "CompositeExplicitAutograd")
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return {key: [name.removeprefix("fastconvt::") for name in names if has(name, key)] for key in keys}


def report() -> str:
    """The text that ``python -m fastconvt.info`` prints."""
    lines = [
        f"fastconvt {fastconvt.__version__}, torch {torch.__version__}, Python {sys.version.split()[0]}",
        f"platform: {platform.platform()}, {platform.machine()}, {torch.get_num_threads()} threads, "
        f"{torch.backends.cpu.get_cpu_capability()}",
    ]
    for key, library in LIBRARIES.items():
        state = "loaded" if library.loaded else "not loaded"
        lines.append(f"library {key}: {library.path.name}, {state}, built for {library.built_for()}")
    for key, names in operators_by_backend().items():
        lines.append(f"operators, {key}: {', '.join(names) or 'none'}")
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            lines.append(f"device cuda:{index}: {properties.name}, sm_{properties.major}{properties.minor}")
    else:
        lines.append("devices: cpu (torch sees no CUDA device)")
    settings = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith("FASTCONVT_")]
    lines.append(f"settings: {', '.join(settings) or 'none'}")
    problems = [library.problem for library in LIBRARIES.values() if library.problem]
    lines.append(f"problems: {'; '.join(problems) or 'none'}")
    return "\n".join(lines)


if __name__ == "__main__":
    print(report())
