#!/usr/bin/env bash
# Sets up .venv and trains the quickstart config; any override of rl.train may follow, e.g. --seed 1.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh
unset PYTHONDONTWRITEBYTECODE # without cached bytecode every process starts seconds later
exec .venv/bin/python -m rl.train --config quickstart "$@"
