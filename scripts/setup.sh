#!/usr/bin/env bash
# Creates or refreshes .venv, from Python 3.11 or 3.12 and nothing else. Does nothing where it is current.
# PYTHON names another interpreter; TILLER_DEVICE=cpu|cuda overrides what the host seems to have.
set -euo pipefail
cd "$(dirname "$0")/.."

fail() { echo "setup: $1" >&2; exit 1; }

python=${PYTHON:-$(command -v python3.11 || command -v python3.12 || true)}
[ -n "$python" ] || fail "no python3.11 or python3.12 on PATH; install one, or set PYTHON to its path"
"$python" -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null ||
    fail "$python does not run Python 3.11 or 3.12; set PYTHON to the path of one that does"

device=${TILLER_DEVICE:-$([ -e /dev/nvidia0 ] && echo cuda || echo cpu)}
case $device in cpu | cuda) ;; *) fail "TILLER_DEVICE is '$device'; allowed are cpu and cuda" ;; esac
stamp=$(cat pyproject.toml constraints.txt scripts/setup.sh | cksum)-$device-$("$python" --version)-$PWD
[ "$(cat .venv/stamp 2>/dev/null)" = "$stamp" ] && exit 0

# The wheels of torch and vLLM are built for CUDA 13.0. Older drivers run it only with NVIDIA's package
# for forward compatibility, which nvidia-smi counts: docs.nvidia.com/deploy/cuda-compatibility
smi=$([ "$device" = cuda ] && nvidia-smi 2>/dev/null || true)
if [[ $smi =~ Driver\ Version:\ *([0-9.]+)\ *CUDA\ Version:\ *([0-9]+)\.[0-9]+ ]] && [ "${BASH_REMATCH[2]}" -lt 13 ]; then
    fail "the NVIDIA driver is ${BASH_REMATCH[1]}, and CUDA 13.0, which torch and vLLM are built for, needs 580 or newer; \
update the driver, or run TILLER_DEVICE=cpu scripts/setup.sh"
fi

mkdir -p .venv
log=.venv/setup.log
exec 9>.venv/lock
flock 9 # two scripts started together set up once
[ "$(cat .venv/stamp 2>/dev/null)" = "$stamp" ] && exit 0
echo "setup: installing Tiller for $device into .venv (a few minutes the first time; log: $log)" >&2

# Called at the end of a step that failed: the cause is in the last lines of the log.
explain() { tail -n 15 "$log" >&2; fail "$1; the log is $log"; }

"$python" -m venv .venv >"$log" 2>&1 || explain "could not create .venv (is the venv module installed, is the disk full?)"
.venv/bin/python -m pip install --quiet "uv==0.13.8" >>"$log" 2>&1 || explain "could not install uv with pip (is there a network?)"

where=()
if [ -n "${PIP_FIND_LINKS:-}" ]; then # uv does not read pip's settings
    for link in $PIP_FIND_LINKS; do where+=(--find-links "$link"); done
elif [ "$device" = cpu ]; then
    where+=(--torch-backend=cpu)
fi
.venv/bin/uv pip install --python .venv/bin/python --constraint constraints.txt "${where[@]}" \
    --editable ".[$device,dev]" >>"$log" 2>&1 || explain "could not install the packages that pyproject.toml asks for"
.venv/bin/python -c "import rl, configs" >>"$log" 2>&1 || explain "the packages are installed, but Tiller cannot be imported"
echo "$stamp" >.venv/stamp
