"""csrc/core as a Python module, for the tests and for benchmarks.costs."""

import hashlib
import importlib.util
import os
import subprocess
import sysconfig
import tempfile
from pathlib import Path
from types import ModuleType

CORE = Path(__file__).parent.parent / "csrc" / "core"
SOURCES = (Path(__file__).with_name("core_binding.cpp"), *sorted(CORE.glob("*.cpp")))


def load_core() -> ModuleType:
    """Compiled once for each version of the sources."""
    import pybind11

    text = b"".join(path.read_bytes() for path in (SOURCES[0], *sorted(CORE.glob("*"))))
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    folder = Path(tempfile.gettempdir()) / f"fastconvt_core_{os.getuid()}_{hashlib.sha256(text).hexdigest()[:16]}"
    library = folder / f"core_binding{suffix}"
    if not library.exists():
        folder.mkdir(exist_ok=True)
        includes = [f"-I{pybind11.get_include()}", f"-I{sysconfig.get_path('include')}"]
        fresh = folder / f"{os.getpid()}{suffix}"
        command = [os.environ.get("CXX", "g++"), "-std=c++17", "-O1", "-shared", "-fPIC", *includes, *SOURCES]
        subprocess.run([*map(str, command), "-o", str(fresh)], check=True)
        fresh.replace(library)
    spec = importlib.util.spec_from_file_location("core_binding", library)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
