"""Places to launch a run to: the file that each needs, and the start of the run there."""

import os
import shlex
import subprocess
from typing import Any

from rl.config import RunConfig
from rl.errors import require
from rl.launch import kubernetes, slurm
from rl.launch.freeze import Launch
from rl.plan.plan import Plan


def check(target: str, config: RunConfig, wait: bool) -> None:
    """Raise ConfigError if the run cannot work there, before it waits in a queue."""
    if target == "local":
        config.require_hosts(1)
        return
    fix = "follow the run by kubectl logs -f"
    require(target == "slurm" or not wait, "not for kubernetes", field="--wait", fix=fix)
    errors = Plan(config).errors
    require(not errors, "\n".join(errors))


def _local_script(launch: Launch) -> str:
    resume = ["--resume"] if launch.config.resume else []
    return f"#!/bin/sh\nexec {shlex.join([*launch.train(), *resume])}\n"


def _local(launch: Launch, wait: bool) -> int:
    job = ["/bin/sh", str(launch.files / "job.sh")]
    if wait:
        os.execv(job[0], job)
    log = launch.folder / "logs" / "console.log"
    log.parent.mkdir(exist_ok=True)
    with log.open("a") as output:
        files: dict[str, Any] = {
            "stdin": subprocess.DEVNULL,
            "stdout": output,
            "stderr": subprocess.STDOUT,
        }
        process = subprocess.Popen(job, **files, start_new_session=True)
    launch.show(end=f"kill {process.pid}  (it saves first)", follow=f"tail -f {log}")
    return 0


TARGETS = {
    "local": ("job.sh", _local_script, _local),
    "slurm": ("job.sh", slurm.script, slurm.start),
    "kubernetes": ("manifests.json", kubernetes.manifests, kubernetes.start),
}
"""File to write, function of its text, and function that starts the run, by place."""
