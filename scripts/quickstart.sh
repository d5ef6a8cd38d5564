#!/usr/bin/env bash
# Sets up .venv and trains the quickstart config, in the folder where the caller stands; any override of rl.train may
# follow, e.g. --seed 1.
set -euo pipefail
repository=$(CDPATH='' cd "$(dirname "$0")/.." && pwd)
"$repository/scripts/setup.sh"
unset PYTHONDONTWRITEBYTECODE # without cached bytecode every process starts seconds later
export PYTHONSAFEPATH=1       # the caller's folder may have an rl or configs of its own
exec "$repository/.venv/bin/python" -m rl.train --config quickstart "$@"
