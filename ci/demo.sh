#!/usr/bin/env bash
# The first thing to run, on any machine with Python 3.10 and a C++ compiler: builds fastconvt, installs it into .venv,
# times both reference layers beside PyTorch and enlarges a photograph. What it draws is in out/.
source "$(dirname "$0")/setup.sh"

use_environment
install_build_requirements
say "building and installing fastconvt"
has_gpu || export FASTCONVT_CUDA=${FASTCONVT_CUDA:-0}  # kernels that could not run here are not worth the minutes
install --no-build-isolation ".[bench]"

# From another folder, so that the installed package runs and not this source tree.
out=$PWD/out examples=$PWD/examples
mkdir -p "$out"
cd "$out"
say "both reference layers beside PyTorch"
python -m fastconvt.bench --suite reference --csv "$out/reference.csv" --plot "$out/reference.png"
say "a photograph, eight times as large"
python "$examples/upsample_photo.py" --factor 8 --out "$out"
say "the chart and the pictures are in $out:"
ls "$out"
