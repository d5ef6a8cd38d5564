#!/usr/bin/env bash
# Sets up .venv, then lint, types, import contracts and tests. --all adds the long suites; other
# arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh
unset PYTHONDONTWRITEBYTECODE # without cached bytecode every process starts seconds later
export OMP_NUM_THREADS=1 PATH="$PWD/.venv/bin:$PATH"

marks=(-m "not long")
if [ "${1:-}" = --all ]; then
    marks=()
    shift
fi
ruff check .
ruff format --check .
lint-imports &
mypy
wait $!
exec python -m pytest "${marks[@]}" "$@"
