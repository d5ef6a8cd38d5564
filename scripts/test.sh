#!/usr/bin/env bash
# Sets up .venv, then lint, types, import contracts and tests. --all adds the long suites; with other
# arguments, which go to pytest, all tests run in one process.
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
[ $# -gt 0 ] && exec python -m pytest "${marks[@]}" "$@"

# Two halves of about equal length, side by side. bash would let the one in the
# background ignore Ctrl-C, and so the programs that it tests.
half=(tests/actors tests/e2e tests/session tests/weights)
log=.venv/tests.log
env --default-signal=INT python -m pytest "${marks[@]}" "${half[@]}" >"$log" 2>&1 </dev/null &
code=0
python -m pytest "${marks[@]}" "${half[@]/#/--ignore=}" || code=$?
echo "The tests of ${half[*]} (follow them in $log):"
wait $! || code=$?
cat "$log"
exit $code
