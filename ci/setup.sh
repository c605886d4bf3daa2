# Sourced by the scripts beside it: an environment in .venv, and what a build needs. Every function is repeatable.
#
#   FASTCONVT_TORCH   the torch to install; default "torch>=2.10" where there is an NVIDIA GPU, else "torch==2.13.0"
#   PYTHON            the Python that makes the environment; default python3
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { printf '\n== %s\n' "$*"; }
die() { printf 'fastconvt: %s\n' "$*" >&2; exit 1; }
has_gpu() { nvidia-smi -L >/dev/null 2>&1; }
install() { python -m pip install --quiet "$@"; }

use_environment() {
  local python=${PYTHON:-python3}
  if [ ! -x .venv/bin/python ]; then
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || die "Python 3.10 or newer is needed; set PYTHON."
    say "making .venv with $("$python" --version)"
    "$python" -m venv .venv
  fi
  export VIRTUAL_ENV=$PWD/.venv PATH=$PWD/.venv/bin:$PATH
}

install_build_requirements() {
  command -v "${CXX:-c++}" >/dev/null || die "a C++ compiler is needed (on Debian and Ubuntu: apt-get install g++)."
  local torch=${FASTCONVT_TORCH:-}
  if [ -z "$torch" ]; then
    if has_gpu; then torch="torch>=2.10"; else torch="torch==2.13.0"; fi
  fi
  say "installing $torch and the build requirements"
  install "$torch" "setuptools>=77" wheel ninja
}

# Leaves the one wheel in dist/ and its path in $wheel.
build_wheel() {
  say "building the wheel"
  rm -f dist/fastconvt-*.whl
  python -m pip wheel --quiet --no-build-isolation --no-deps --wheel-dir dist .
  wheel=$(echo dist/fastconvt-*.whl)
}

# Makes the current folder a copy of the tree without fastconvt/, so that nothing but the installed wheel is imported.
stage_tests() {
  stage=$(mktemp -d)
  trap 'rm -rf "$stage"' EXIT
  cp -r benchmarks ci csrc examples tests pyproject.toml setup.py README.md LICENSE "$stage"
  cd "$stage"
}
