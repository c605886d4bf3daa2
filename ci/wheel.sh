#!/usr/bin/env bash
# Builds the wheel into dist/ and audits it: only the stable ABIs of Python and of libtorch, and only the libraries that
# every user has.
source "$(dirname "$0")/setup.sh"

use_environment
install_build_requirements
build_wheel
install abi3audit==0.0.26 torch-abi-audit==0.3.0

contents=$(mktemp -d)
trap 'rm -rf "$contents"' EXIT
python -m zipfile -e "$wheel" "$contents"
say "$wheel"
grep -h '^Tag:' "$contents"/fastconvt-*.dist-info/WHEEL
for library in "$contents"/fastconvt/*.so; do
  echo "$(basename "$library") needs: $(readelf -d "$library" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p' | tr '\n' ' ')"
done
say "audits"
abi3audit --strict --summary "$wheel"
torch-abi-audit --verbose --check both "$contents/fastconvt"
