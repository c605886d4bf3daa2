"""Holds the registers, stack and static shared memory of every CUDA kernel to a committed budget, ci/registers.csv.

    python ci/registers.py LIBRARY            compares; exit status 1 where a kernel grew, spills more, or is not listed
    python ci/registers.py LIBRARY --update   writes the budget anew, for a change that means to change it

LIBRARY is the built _C_cuda.abi3.so, or a wheel that has it. The stack is where a kernel spills what its registers do
not hold, so zero means no spills. The figures are the compiler's: with another CUDA, or without the budget's GPU
architecture in the library, nothing is compared. It needs cuobjdump (the CUDA toolkit's, or pip install
nvidia-cuda-cuobjdump) and c++filt.
"""

import argparse
import csv
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

BUDGET = Path(__file__).with_suffix(".csv")
ARCHITECTURE = "sm_90a"
LIBRARY = "fastconvt/_C_cuda.abi3.so"


class Usage(NamedTuple):
    """What a kernel takes: registers a thread, bytes of stack a thread, bytes of static shared memory a block."""

    registers: int
    stack: int
    shared: int


def find_cuobjdump() -> str | None:
    """The toolkit's, or that of a Python package."""
    homes = [Path(home) for home in (os.environ.get("CUDA_HOME"), "/usr/local/cuda") if home]
    installed = sorted(Path(sysconfig.get_path("purelib")).glob("nvidia/cu*/bin/cuobjdump"))
    found = [path for path in [*(home / "bin" / "cuobjdump" for home in homes), *installed] if path.exists()]
    return str(found[0]) if found else shutil.which("cuobjdump")


def built_with(library: Path) -> str:
    """The version of CUDA that the library says it was built with."""
    found = re.search(rb"fastconvt built for [ -~]*, (CUDA [0-9.]+)", library.read_bytes())
    return found.group(1).decode() if found else "CUDA unknown"


def parse(dump: str, architecture: str) -> dict[str, Usage]:
    """The usage by mangled name, from ``cuobjdump --dump-resource-usage``; of the code for ``architecture`` only."""
    usages, name, current = {}, None, None
    for line in dump.splitlines():
        if found := re.match(r"arch = (\S+)", line):
            current = found.group(1)
        elif found := re.match(r"\s*Function (\S+):", line):
            name = found.group(1)
        elif name and (found := re.match(r"\s*REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", line)):
            registers, stack, shared, local = map(int, found.groups())
            if current == architecture:
                usages[name] = Usage(registers, stack + local, shared)
            name = None
    return usages


def readable(demangled: str) -> str:
    """A kernel's name without what all of them share: return type, namespaces and parameters."""
    depth = 0
    name = demangled.replace("(anonymous namespace)::", "").replace("fastconvt::cuda::", "").removeprefix("void ")
    for index, character in enumerate(name):
        depth += (character == "<") - (character == ">")
        if character == "(" and depth == 0:
            return name[:index]
    return name


def measure(library: Path, cuobjdump: str) -> dict[str, Usage]:
    """The usage of every kernel of the library, by readable name; of kernels of one name the largest of each figure."""
    dump = output_of([cuobjdump, "--dump-resource-usage", str(library)])
    usages = parse(dump, ARCHITECTURE)
    names = output_of(["c++filt"], "\n".join(usages)).splitlines()
    result = {}
    for name, usage in sorted(zip(map(readable, names), usages.values(), strict=True)):
        result[name] = Usage(*map(max, result.get(name, usage), usage))
    return result


def output_of(command: list[str], text: str | None = None) -> str:
    return subprocess.run(command, input=text, capture_output=True, text=True, check=True, timeout=120).stdout


def compare(budget: dict[str, Usage], usages: dict[str, Usage]) -> Iterator[str]:
    """What breaks the budget, a line each."""
    for name, usage in usages.items():
        if name not in budget:
            yield f"{name}: is not in the budget ({usage.registers} registers, {usage.stack} bytes of stack)"
            continue
        for what, before, now in zip(Usage._fields, budget[name], usage, strict=True):
            if now > before:
                spills = ": it spills" if what == "stack" else ""
                yield f"{name}: {what} {before} -> {now}{spills}"


def read_budget() -> tuple[str, dict[str, Usage]]:
    """The CUDA version that the budget was made with, and the budget."""
    with BUDGET.open(newline="") as file:
        compiler = next(file).removeprefix("#").strip()
        return compiler, {name: Usage(*map(int, figures)) for name, *figures in list(csv.reader(file))[1:]}


def write_budget(compiler: str, usages: dict[str, Usage]) -> None:
    with BUDGET.open("w", newline="") as file:
        file.write(f"# {compiler}\n")
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["kernel", *Usage._fields])
        writer.writerows([name, *usage] for name, usage in usages.items())


def check(library: Path, update: bool) -> int:
    cuobjdump = find_cuobjdump()
    if cuobjdump is None or shutil.which("c++filt") is None:
        return skip("cuobjdump or c++filt is missing (pip install nvidia-cuda-cuobjdump; binutils)")
    compiler = f"{built_with(library)}, {ARCHITECTURE}"
    usages = measure(library, cuobjdump)
    if not usages:
        return skip(f"the library has no code for {ARCHITECTURE}")
    if update:
        write_budget(compiler, usages)
        print(f"{BUDGET}: {len(usages)} kernels, {compiler}")
        return 0
    made_with, budget = read_budget()
    if made_with != compiler:
        return skip(f"the budget is of {made_with}, the library of {compiler}")
    wrong = list(compare(budget, usages))
    for line in wrong:
        print(line)
    if wrong:
        print(f"{len(wrong)} figures exceed the budget. Where that is meant: python ci/registers.py LIBRARY --update")
        return 1
    gone, shrunk = set(budget) - set(usages), sum(usages[name] != budget[name] for name in usages)
    print(f"{len(usages)} kernels are within their budget; {shrunk} take less, {len(gone)} listed ones are gone")
    return 0


def skip(reason: str) -> int:
    print(f"the register budget is not checked: {reason}")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", type=Path)
    parser.add_argument("--update", action="store_true")
    options = parser.parse_args()
    if options.library.suffix != ".whl":
        return check(options.library, options.update)
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(options.library) as wheel:
        if LIBRARY not in wheel.namelist():
            return skip("the wheel has no CUDA kernels, since the build found no nvcc")
        return check(Path(wheel.extract(LIBRARY, folder)), options.update)


if __name__ == "__main__":
    sys.exit(main())
