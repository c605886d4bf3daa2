"""Loads the compiled libraries. One that cannot load says so once and is remembered; the rest keeps working."""

import re
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch

_MARK = rb"fastconvt built for ([ -~]+)"


@dataclass
class Library:
    """A compiled library beside this file, whether it is ``loaded``, and the ``problem`` where it could not be."""

    path: Path
    loaded: bool = False
    problem: str = ""

    def built_for(self) -> str:
        """What the library was compiled against, read from the file, so that it can be told without loading it."""
        if not self.path.exists():
            return "not built"
        found = re.search(_MARK, self.path.read_bytes())
        return found.group(1).decode() if found else "unknown"


LIBRARIES = {
    "cpu": Library(Path(__file__).with_name("_C.abi3.so")),
    "cuda": Library(Path(__file__).with_name("_C_cuda.abi3.so")),
}


def load_all() -> bool:
    """Load what this torch can use; whether there are operators at all."""
    cpu, cuda = LIBRARIES["cpu"], LIBRARIES["cuda"]
    if _load(cpu) and torch.backends.cuda.is_built():
        if cuda.path.exists():
            _load(cuda)
        elif torch.cuda.is_available():
            cuda.problem = "this build has no CUDA kernels: install a CUDA toolkit and build with FASTCONVT_CUDA=1"
    return cpu.loaded


def _load(library: Library) -> bool:
    try:
        torch.ops.load_library(library.path)
        library.loaded = True
    except (OSError, ImportError) as error:
        library.problem = (
            f"{library.path.name} cannot be loaded: it was built for {library.built_for()}, and this is "
            f"torch {torch.__version__}; its operators are missing ({error.__cause__ or error})"
        )
        warnings.warn(f"fastconvt: {library.problem}", stacklevel=4)
    return library.loaded


def require_operators(device: str = "cpu") -> None:
    """Raise RuntimeError with the reason where the operators, or the kernels for ``device``, are missing."""
    for key in ("cpu", device):
        library = LIBRARIES.get(key)
        if library is None or not library.loaded:
            reason = library.problem if library and library.problem else f"this build has no library for {key}"
            raise RuntimeError(f"fastconvt: {reason}")
