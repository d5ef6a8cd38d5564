"""Start of a rehearsal in a process of its own, and its result beside the plan."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torchtitan.distributed.activation_checkpoint import MemoryBudgetAC

from rl.compat import WRITTEN_FOR
from rl.errors import RunError, require
from rl.plan.memory import GIB, all_ranks
from rl.plan.planned_run import PlannedRun
from rl.plan.rehearsal.rehearsed_batches import SHAPE_STEPS

MOST_SHAPES = 8
"""Maximum number of shapes that kernels are compiled for: Dynamo's limit of the graphs of a
function, past which attention is not compiled and may need more memory than a device has."""

NOT_REHEARSED = ("CUDA context", "CUDA graphs", "push slots")
"""Items of a plan that a rehearsal leaves out."""


def rehearsal(run: PlannedRun, arguments: Sequence[str], *, rank: int) -> dict[str, Any]:
    """Rehearse rank ``rank`` of every model that has it, and return the result as JSON-able data.

    ``arguments`` are the command line that ``run`` was made from. Raises ConfigError if the
    config cannot be rehearsed here, and RunError if the rehearsal itself fails.
    """
    _check(run, rank)
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "rl.plan.rehearsal.rehearse", str(rank), *arguments],
        capture_output=True,
        text=True,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},  # the GPU is a fake one here too
    )
    if ended.returncode:
        raise RunError(f"the rehearsal ended with {ended.returncode}:\n{ended.stderr.strip()}")
    result: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    planned = {(memory.mesh, memory.rank): memory for memory in all_ranks(run)}
    for role in result["roles"]:
        items = [entry for entry in planned[role["role"], rank].items if not entry.on_host]
        role["items"] = {item.name: item.bytes for item in items if item.name not in NOT_REHEARSED}
        role["planned"] = sum(role["items"].values())
        role["not_rehearsed"] = sum(item.bytes for item in items) - role["planned"]
    return result


def errors_of(result: dict[str, Any], run: PlannedRun) -> list[str]:
    """Return a sentence for each role that failed, whose allocator would reserve more than the
    device has beside what is not rehearsed, or whose micro-batches have more than ``MOST_SHAPES``
    shapes.
    """
    memory = run.device.memory_gib * GIB
    errors = []
    for role in result["roles"]:
        name = f"{role['role']} rank {role['rank']}"
        if role["error"] is not None:
            errors.append(f"{name}, {role['error']}")
            continue
        reserved = role["allocator"].get("reserved", role["peak"])
        need = reserved + role["not_rehearsed"]
        if need > memory:
            sizes = f"{need / GIB:.2f} GiB of {run.device.memory_gib:g} GiB"
            errors.append(f"{name} needs {sizes}; torch's allocator has {reserved / GIB:.2f} of it")
        if (count := len(role["shapes"])) > MOST_SHAPES:
            errors.append(
                f"{name} compiles attention for {count} shapes of micro-batches in {SHAPE_STEPS} "
                f"steps, and at most {MOST_SHAPES} are allowed: set trainer.micro_batch_tokens, "
                "and trainer.packing to True"
            )
    return errors


def _check(run: PlannedRun, rank: int) -> None:
    """Raise ConfigError unless the config can be rehearsed with the installed torch."""
    installed = torch.__version__.partition("+")[0]
    written_for = WRITTEN_FOR["torch"]
    require(
        installed == written_for,
        f"torch {installed} is installed",
        field="torch",
        fix=f"--rehearse changes torch from inside and was written for torch {written_for}: "
        "install that version",
    )
    device = run.hardware.device
    require(
        device not in ("auto", "cpu"),
        f"hardware.device is {device!r}",
        field="hardware.device",
        fix="--rehearse needs the name of a GPU, such as --hardware.device h100",
    )
    most = max(run.rehearsed.values())
    require(
        0 <= rank < most,
        f"--rank is {rank}",
        field="--rank",
        fix=f"it must be below {most}, the number of ranks of the largest model",
    )
    require(
        not isinstance(run.config.trainer.activation_checkpoint, MemoryBudgetAC.Config),
        "trainer.activation_checkpoint is memory-budget",
        field="trainer.activation_checkpoint",
        fix="--rehearse compiles nothing, and only compiled code keeps to a budget",
    )
