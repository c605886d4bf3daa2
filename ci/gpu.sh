#!/usr/bin/env bash
# On a machine with an NVIDIA GPU: the tests that need it, the fuzzer, the sanitizers and the benchmark.
#
#   bash ci/gpu.sh              builds the wheel into .venv
#   bash ci/gpu.sh WHEEL [OUT]  takes a wheel that was built elsewhere, and the torch and test packages of python3;
#                               nothing is downloaded. Results go to the folder OUT (default out/)
source "$(dirname "$0")/setup.sh"

has_gpu || die "this needs an NVIDIA GPU, and nvidia-smi shows none."
out=$(realpath -m "${2:-out}")
mkdir -p "$out"
if [ $# -gt 0 ]; then
  site=$(mktemp -d)
  python3 -m pip install --quiet --no-index --no-deps --target "$site" "$1"
  export PYTHONPATH=$site
  python() { python3 "$@"; }
else
  use_environment
  install_build_requirements
  FASTCONVT_CUDA=1 build_wheel
  install "$wheel[test]"
fi
stage_tests
say "what is installed"
python -m fastconvt.info
say "the tests that need a GPU"
python -m pytest -q -m gpu
say "the fuzzer"
python -m tests.fuzz --device cuda --seconds 300 --problems 5000
python -m tests.fuzz --relatives --device cuda --seconds 300 --problems 5000
python -m tests.fuzz --gradients --device cuda --seconds 300 --problems 5000
say "the benchmark"
bench() { python -m fastconvt.bench --csv "$out/results.csv" --plot "$out/last.png" "$@"; }
bench --suite reference --precision fp32,tf32,bf16,fp16
bench --suite reference --precision fp32,bf16 --mode backward,train,train_relu --peers eager,other
bench --suite relatives
bench --suite relatives,layers --precision fp32,bf16 --peers eager,other --seconds 0.5
python -m fastconvt.bench.summary "$out/results.csv" --plot "$out/results.png"
if command -v compute-sanitizer >/dev/null; then
  say memcheck
  compute-sanitizer --tool memcheck --target-processes all --error-exitcode 1 \
    python3 -m tests.fuzz --device cuda --seconds 60 --problems 40 --seed 5
  say racecheck
  compute-sanitizer --tool racecheck --target-processes all \
    python3 -m tests.fuzz --device cuda --seconds 60 --problems 40 --seed 5 | tee "$out/racecheck.txt"
  # What it says of rows_persistent is no fault: docs/design.md, section 7.
  if grep "Race reported" "$out/racecheck.txt" | grep -v rows_persistent_kernel; then die "racecheck found hazards."; fi
fi
