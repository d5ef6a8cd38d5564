"""Launcher: freezes a run in its folder, then starts it here or submits it to a cluster.

Exit codes: 0 the run was submitted, or with --wait has finished; otherwise that of the run; 2 the
config cannot work.
"""

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from rl.cli import parse_config
from rl.config import RLConfig, RunConfig
from rl.errors import (
    EXIT_CONFIG,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    ConfigError,
    RunError,
    end_program,
    require,
)
from rl.launch import kubernetes, slurm
from rl.launch.freeze import Launch
from rl.observe.owner import claim
from rl.plan.plan import Plan

PROGRAM = "python -m rl.launch"
USAGE = f"""usage: {PROGRAM} local|slurm|kubernetes --config NAME [--dry-run] [--wait] [--FIELD ...]

local: on this host, in the background. slurm, kubernetes: on trainer.nodes + generator.nodes nodes
of a cluster, configured by the fields slurm.* or kubernetes.*.
--dry-run   write all files to the run folder, print the script, and start nothing
--wait      wait for the end of the run, and show its progress"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Launch one run. Return the exit code."""
    try:
        return _launch(list(sys.argv[1:] if arguments is None else arguments))
    except (ConfigError, RunError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_CONFIG if isinstance(error, ConfigError) else EXIT_FAILED
    except KeyboardInterrupt:
        print("interrupted; the run goes on", file=sys.stderr)
        return EXIT_INTERRUPTED


def _launch(arguments: list[str]) -> int:
    command = f"{PROGRAM} {shlex.join(arguments)}"
    flags = {flag for flag in ("--dry-run", "--wait") if flag in arguments}
    target, *rest = [argument for argument in arguments if argument not in flags] or ["--help"]
    if target in ("-h", "--help"):
        print(USAGE)
        return 0
    places = ", ".join(TARGETS)
    require(
        target in TARGETS, f"{target!r} is no place to launch to; allowed are {places}\n{USAGE}"
    )
    name, config = parse_config(rest, program=f"{PROGRAM} {target}")
    wait = "--wait" in flags
    _check(target, config, wait)
    file, render, start = TARGETS[target]
    with claim(name, config.output_dir, resume=config.resume) as owner:
        launch = Launch(name, config, owner.folder.absolute(), command)
        text = render(launch)
        launch.freeze({file: text})
    if "--dry-run" in flags:
        print(text, end="")
        return 0
    signal.signal(signal.SIGINT, signal.default_int_handler)  # from here on a run was started
    return start(launch, wait)


def _check(target: str, config: RunConfig, wait: bool) -> None:
    """Raise ConfigError if the run cannot work there, before it waits in a queue."""
    if target == "local":
        nodes = f"trainer.nodes and generator.nodes come to {config.nodes} nodes"
        require(config.nodes == 1, f"{nodes}; it must be 1 on this host")
        config.hardware.require_here()
        return
    require(
        target == "slurm" or not wait,
        "--wait: not for kubernetes; follow the run by kubectl logs -f",
    )
    errors = Plan(config).errors if isinstance(config, RLConfig) else []
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
    _show(launch, f"kill {process.pid}  (it saves first)", f"tail -f {log}")
    return 0


def _slurm(launch: Launch, wait: bool) -> int:
    job = slurm.submit(launch)
    print(f"job:        {job}")
    _show(launch, f"scancel {job}", f"tail -F {launch.folder / 'logs' / f'slurm-{job}.log'}")
    return slurm.follow(launch, job) if wait else 0


def _kubernetes(launch: Launch, wait: bool) -> int:
    kubernetes.submit(launch)
    _show(launch, f"kubectl delete -f {launch.files / 'manifests.json'}")
    return 0


def _show(launch: Launch, end: str, follow: str = "") -> None:
    """Print the run's folder and the commands that follow and end it."""
    print(f"run folder: {launch.folder}")
    if follow:
        print(f"follow it:  {follow}")
    print(f"end it:     {end}")


TARGETS = {
    "local": ("job.sh", _local_script, _local),
    "slurm": ("job.sh", slurm.script, _slurm),
    "kubernetes": ("manifests.json", kubernetes.manifests, _kubernetes),
}
"""File to write, function of its text, and function that starts the run, by place."""

if __name__ == "__main__":
    end_program(main())
