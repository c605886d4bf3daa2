#!/usr/bin/env bash
# Style, in check mode; `bash ci/lint.sh --fix` mends what can be mended. The versions are pinned, also in
# .pre-commit-config.yaml: another one may want another style.
source "$(dirname "$0")/setup.sh"

use_environment
install ruff==0.14.6 clang-format==21.1.6
python="setup.py ci fastconvt tests examples"
sources=$(find csrc examples tests -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')
if [ "${1:-}" = --fix ]; then
  ruff check --fix $python
  ruff format $python
  clang-format -i $sources
else
  ruff check $python
  ruff format --check $python
  clang-format --dry-run -Werror $sources
fi
for script in ci/*.sh .ci/run; do bash -n "$script"; done
echo "lint: nothing to mend"
