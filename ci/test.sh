#!/usr/bin/env bash
# Builds the wheel, installs it into .venv, and tests what was installed: style, the test-suite (tests that need a GPU
# are skipped and counted where there is none), the kernels' registers, a minute of the fuzzer, and the library for C++
# programs.
source "$(dirname "$0")/setup.sh"

use_environment
say "style"
bash ci/lint.sh
install_build_requirements
build_wheel
say "installing $wheel and what the tests need"
install "$wheel[test]"
install --force-reinstall --no-deps "$wheel"
if [[ $(python -m zipfile -l "$wheel") == *_C_cuda* ]]; then
  say "registers and spills of the CUDA kernels"
  install nvidia-cuda-cuobjdump==13.5.37
  python ci/registers.py "$wheel"
else
  say "registers and spills are not checked: the build found no nvcc"
fi
root=$PWD

stage_tests
say "what is installed"
python -m fastconvt.info
say "the tests"
python -m pytest
device=$(python -c 'from fastconvt.bench.device import choose_device; print(choose_device()[0].type)')
say "the fuzzer, on $device"
python -m tests.fuzz --seconds 60 --device "$device"

say "the library for C++ programs"
install cmake
torch=$(python -c 'import torch; print(torch.__path__[0])')
cmake -S "$root" -B cpp -G Ninja -DTORCH_ROOT="$torch" >cpp.log || { cat cpp.log; exit 1; }
cmake --build cpp --parallel 2
ctest --test-dir cpp --output-on-failure
