"""scripts/setup.sh for CUDA, on hosts without a GPU."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HEADER = """\
Thu Aug  7 10:00:00 2025
+---------------------------------------------------------------------------------------+
| NVIDIA-SMI {driver:<21}Driver Version: {driver:<13}CUDA Version: {cuda:<9}|
|-----------------------------------------+----------------------+----------------------+
"""
FAILING_PYTHON = """\
#!/bin/sh
if [ "$1" = -m ]; then exit 1; fi
"""
"""A Python with which setup ends at the creation of .venv, after all checks."""

IMPORTED = (
    *("rl", "configs", "torch", "torchtitan.models.qwen3", "monarch.actor", "vllm"),
    *(
        "vllm.engine.llm_engine",
        "rl.actors.policy_trainer",
        "rl.actors.generator",
        "rl.training.engine",
    ),
    *("rl.generation.engine", "rl.trainers.rl", "rl.weights.shared_memory", "rl.cli.training_run"),
)


def set_up(folder: Path, *, timeout: float, **variables: str) -> subprocess.CompletedProcess:
    """Run a copy of the script in ``folder``."""
    (folder / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "setup.sh", folder / "scripts")
    for name in ("pyproject.toml", "constraints.txt", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    kept = {name: value for name, value in os.environ.items() if name != "PIP_FIND_LINKS"}
    return subprocess.run(
        [folder / "scripts" / "setup.sh"],
        env=kept | variables,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


OLD = (
    "setup: the NVIDIA driver is 535.104.05, and CUDA 13.0, which torch and vLLM are built for, "
    "needs 580 or newer; update the driver, or run TILLER_DEVICE=cpu scripts/setup.sh\n"
)
CHECKED = "could not create .venv"


@pytest.mark.parametrize(
    ("device", "driver", "cuda", "said"),
    [
        ("cuda", "535.104.05", "12.2", OLD),
        ("cuda", "580.65.06", "13.0", CHECKED),
        ("cuda", "535.104.05", "13.0", CHECKED),  # NVIDIA's package for forward compatibility
        ("cpu", "535.104.05", "12.2", CHECKED),
    ],
)
def test_a_driver_older_than_the_wheels_need_is_refused(tmp_path, device, driver, cuda, said):
    def program(path: Path, text: str) -> None:
        path.write_text(text)
        path.chmod(0o755)

    stand_in = f"#!/bin/sh\ncat <<END\n{HEADER.format(driver=driver, cuda=cuda)}END\n"
    program(tmp_path / "nvidia-smi", stand_in)
    program(tmp_path / "python", FAILING_PYTHON)
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHON": str(tmp_path / "python")}
    done = set_up(tmp_path, timeout=120, TILLER_DEVICE=device, **path)
    assert (done.returncode, said in done.stderr) == (1, True)
    assert (tmp_path / ".venv").exists() == (said == CHECKED)


@pytest.mark.long
@pytest.mark.download
def test_the_cuda_build_is_installed_and_imported_without_a_driver(tmp_path):
    """9 GB. vLLM's kernels are not loaded, since they need the driver's library."""
    if shutil.disk_usage(tmp_path).free < 24 * 2**30:
        pytest.skip(f"fewer than 24 GiB are free in {tmp_path}")
    for name in ("configs", "rl"):
        cached = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, tmp_path / name, ignore=cached)
    # a cache of its own is deleted too, and shares its files with .venv
    cache = str(tmp_path / "cache")
    try:
        done = set_up(tmp_path, timeout=1800, TILLER_DEVICE="cuda", UV_CACHE_DIR=cache)
        if "could not install" in done.stderr and "client error (Connect)" in done.stderr:
            pytest.skip("the registry of Python packages cannot be reached")
        assert done.returncode == 0, done.stderr
        lines = [
            *(f"import {name}" for name in IMPORTED),
            "import torch.distributed as d",
            "print(torch.version.cuda, torch.cuda.is_available(), d.is_nccl_available())",
        ]
        found = subprocess.run(
            [tmp_path / ".venv" / "bin" / "python", "-c", "\n".join(lines)],
            cwd=tmp_path,
            env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert found.returncode == 0, found.stderr
        assert found.stdout.splitlines()[-1] == "13.0 False True"
    finally:
        for name in ("cache", ".venv"):
            shutil.rmtree(tmp_path / name, ignore_errors=True)
