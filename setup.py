"""Builds the operator library into one cp310-abi3 wheel that serves every torch >= 2.10 (LibTorch stable ABI).

Two libraries are in it: ``_C`` (schemas and CPU kernels) and, where there is a CUDA compiler, ``_C_cuda``. Neither is
tied to the torch of its build: a CPU-only torch serves to build both. What the build reads from the environment:

    FASTCONVT_CUDA        auto (the default: CUDA where nvcc is found), 1 (CUDA, or stop) or 0 (no CUDA)
    CUDA_HOME             where the CUDA toolkit is, if it is not where torch or /usr/local/cuda says
    TORCH_CUDA_ARCH_LIST  GPUs to build for; the default is the present ones, or 9.0a where there is none
    MAX_JOBS              parallel compilations; the default is one for every 4 GB of free memory
"""

import os
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent
NO_TORCH = """
fastconvt is compiled against the torch that is installed, and this build sees none: pip builds in isolation by default.
Install torch >= 2.10 and the build requirements, then build without isolation:

    pip install "torch>=2.10" "setuptools>=77" ninja
    pip install --no-build-isolation fastconvt      # or, in a checkout: pip install --no-build-isolation .
"""
NO_NVCC = """
FASTCONVT_CUDA=1 asks for CUDA kernels, and no nvcc was found (in $CUDA_HOME, torch's CUDA_HOME, /usr/local/cuda).
Install the CUDA toolkit, 12.8 or later, and set CUDA_HOME to it; or leave FASTCONVT_CUDA unset to build for the CPU.
"""

SHARED = ["call.cpp", "planning.cpp", "core/*.cpp"]  # in both libraries
DEFINES = ["-DTORCH_TARGET_VERSION=0x020a000000000000", "-DPy_LIMITED_API=0x030A0000"]
CXX_FLAGS = ["-O3", "-std=c++17", "-fno-math-errno", "-fno-trapping-math", "-fopenmp-simd", "-fvisibility=hidden"]
NVCC_FLAGS = ["-O3", "-std=c++17", "-Xcompiler", "-fvisibility=hidden"]


class RefusingBuild(build_ext):
    """Stands in for torch's build_ext where there is no torch: metadata can be read, compiling stops with advice."""

    def run(self):
        sys.exit(NO_TORCH)


def sources(*patterns):
    return sorted(str(path.relative_to(ROOT)) for pattern in patterns for path in (ROOT / "csrc").glob(pattern))


def cuda_home(cpp_extension):
    """The folder of the CUDA toolkit to build with, or None for a build without CUDA."""
    wanted = os.environ.get("FASTCONVT_CUDA", "auto")
    if wanted not in ("auto", "0", "1"):
        sys.exit(f"FASTCONVT_CUDA must be auto, 1 or 0, not {wanted!r}")
    for home in (os.environ.get("CUDA_HOME"), cpp_extension.CUDA_HOME, "/usr/local/cuda"):
        if wanted != "0" and home and (Path(home) / "bin" / "nvcc").exists():
            return home
    if wanted == "1":
        sys.exit(NO_NVCC)
    return None


def architectures(torch):
    """The GPUs to build for, in the form of TORCH_CUDA_ARCH_LIST."""
    if "TORCH_CUDA_ARCH_LIST" not in os.environ:
        present = {torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())}
        names = {(9, 0): "9.0a"}
        os.environ["TORCH_CUDA_ARCH_LIST"] = " ".join(names.get(c, f"{c[0]}.{c[1]}") for c in sorted(present)) or "9.0a"
    return os.environ["TORCH_CUDA_ARCH_LIST"]


def built_for_flag(text):
    return f'-DFASTCONVT_BUILT_FOR="{text}"'


def torch_cuda_stub():
    """A folder with an empty libtorch_cuda.so: the library needs that name, which a CPU-only torch does not have."""
    folder = ROOT / "build" / "stub"
    folder.mkdir(parents=True, exist_ok=True)
    stub = ["-shared", "-Wl,-soname,libtorch_cuda.so", "-o", str(folder / "libtorch_cuda.so"), "-x", "c", os.devnull]
    subprocess.run([os.environ.get("CC", "cc"), *stub], check=True)
    return folder


def cuda_extension(torch, cpp_extension, home):
    cpp_extension.CUDA_HOME = home
    built_for = f"torch {torch.__version__}, CUDA {nvcc_version(home)}, GPU architectures {architectures(torch)}"
    libraries = [f"-L{home}/lib64", "-lcudart_static", "-ldl", "-lrt", "-lpthread"]
    extension = cpp_extension.CUDAExtension(
        "fastconvt._C_cuda",
        sources(*SHARED, "cuda/*.cpp", "cuda/*.cu"),
        extra_compile_args={
            "cxx": [*DEFINES, "-DUSE_CUDA", built_for_flag(built_for), *CXX_FLAGS],
            "nvcc": NVCC_FLAGS,
        },
        extra_link_args=[f"-L{torch_cuda_stub()}", "-Wl,--no-as-needed", "-ltorch_cuda", "-Wl,--as-needed", *libraries],
        py_limited_api=True,
    )
    extension.libraries = [name for name in extension.libraries if name not in ("cudart", "c10_cuda", "torch_cuda")]
    return extension


def nvcc_version(home):
    text = subprocess.run([f"{home}/bin/nvcc", "--version"], capture_output=True, text=True, check=True).stdout
    return text.split("release ")[1].split(",")[0]


def remove_older_objects(build_temp):
    """Of CUDA files, those that are older than a header: they are compiled again."""
    headers = [path for pattern in ("*.h", "*.cuh") for path in (ROOT / "csrc").rglob(pattern)]
    newest = max(path.stat().st_mtime for path in headers)
    for path in build_temp.rglob("cuda/*.o"):
        if path.stat().st_mtime < newest:
            path.unlink()


def free_memory_gb():
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) / 2**20


def torch_build(torch, cpp_extension):
    """The arguments of setup() where there is a torch to build with."""
    os.environ.setdefault("MAX_JOBS", str(max(1, min(os.cpu_count() or 1, int(free_memory_gb() / 4)))))
    home = cuda_home(cpp_extension)
    cpu = cpp_extension.CppExtension(
        "fastconvt._C",
        sources("ops.cpp", *SHARED, "cpu/*.cpp"),
        extra_compile_args=[*DEFINES, built_for_flag(f"torch {torch.__version__}"), *CXX_FLAGS],
        extra_link_args=["-Wl,--as-needed"],
        py_limited_api=True,
    )
    built = "the CPU only"

    class Build(cpp_extension.BuildExtension):
        def build_extensions(self):
            if torch.version.cuda is None:  # then torch keeps no record of the headers that a .cu file includes
                remove_older_objects(Path(self.build_temp))
            super().build_extensions()

        def run(self):
            super().run()
            print(f"fastconvt was built for {built}.")

    extensions = [cpu]
    if home:
        extensions.append(cuda_extension(torch, cpp_extension, home))
        built = f"the CPU and CUDA {nvcc_version(home)}, GPU architectures {architectures(torch)}"
    return {"ext_modules": extensions, "cmdclass": {"build_ext": Build}}


try:
    import torch
    from torch.utils import cpp_extension
except ImportError:
    arguments = {"ext_modules": [Extension("fastconvt._C", [])], "cmdclass": {"build_ext": RefusingBuild}}
else:
    arguments = torch_build(torch, cpp_extension)

setup(options={"bdist_wheel": {"py_limited_api": "cp310"}}, **arguments)
