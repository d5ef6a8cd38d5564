#!/usr/bin/env bash
# Sets up .venv, then checks what decides whether Tiller works on this host's GPUs. --help lists the
# options; docs/cuda.md says what each line means.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh
unset PYTHONDONTWRITEBYTECODE # without cached bytecode every process starts seconds later
exec .venv/bin/python -m scripts.gpu_check "$@"
