#!/usr/bin/env bash
# Sets up .venv. Then runs lint, types, the tests without engines and the tests of engines beside each
# other, since tests of engines wait for processes. A failure ends the others.
#   --all                  the long tests too
#   --slice K/N            the K-th of N parts of the long tests too
#   --durations-json FILE  write the cost of each test to FILE and FILE.pure
# Other arguments go to pytest, which then runs alone.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh
unset PYTHONDONTWRITEBYTECODE # without cached bytecode every process starts seconds later
export OMP_NUM_THREADS=1 PATH="$PWD/.venv/bin:$PATH"

tests=(-m "not long")
costs=()
while [ $# -gt 0 ]; do
    case $1 in
        --all) tests=() ;;
        --slice) tests=(--slice "$2"); shift ;;
        --durations-json) costs=("--durations-json=$2"); shift ;;
        *) break ;;
    esac
    shift
done

cores=$(env -u OMP_NUM_THREADS nproc) # nproc heeds that variable
workers=$((cores < 8 ? cores : 8))
lint() { ruff check . && ruff format --check . && lint-imports; }
pure() { python -m pytest --rooms pure -n $(((workers + 1) / 2)) "${tests[@]}" "${costs[@]/%/.pure}"; }
engines() { python -m pytest --rooms engines -n "$workers" "${tests[@]}" "${costs[@]}"; }

if [ $# -gt 0 ]; then
    lint
    mypy
    exec python -m pytest "${tests[@]}" "${costs[@]}" "$@"
fi

set -m # each job is a process group, which the trap ends
end() { # as Ctrl-C does, after which pytest ends what its fixtures started
    for job in $(jobs -p); do kill -INT -- "-$job" 2>/dev/null || true; done
    wait
}
trap end EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
for job in lint mypy pure engines; do $job & done
for _ in lint mypy pure engines; do wait -n; done
