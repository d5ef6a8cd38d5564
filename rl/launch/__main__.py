"""The launcher: freeze a run in its folder, then start it here or hand it to a cluster.

Exit codes: 0 done, or submitted; with --wait what the run came to; 2 the config cannot work.
"""

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence

from rl.cli import parse_config
from rl.config import RLConfig
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
of a cluster, as the fields slurm.* or kubernetes.* say.
--dry-run   write everything to the run folder, print the script, and start nothing
--wait      stay until the run has ended, and show what becomes of it"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Launch one run; returns the exit code."""
    try:
        return _launch(list(sys.argv[1:] if arguments is None else arguments))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_CONFIG
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        print("interrupted; what was started goes on", file=sys.stderr)
        return EXIT_INTERRUPTED


def _launch(arguments: list[str]) -> int:
    command = f"{PROGRAM} {shlex.join(arguments)}"
    flags = {flag for flag in ("--dry-run", "--wait") if flag in arguments}
    target, *rest = [argument for argument in arguments if argument not in flags] or ["--help"]
    if target in ("-h", "--help"):
        print(USAGE)
        return 0
    require(
        target in TARGETS,
        f"{target!r} is no place to launch to; allowed are {', '.join(TARGETS)}\n{USAGE}",
    )
    name, config = parse_config(rest, program=f"{PROGRAM} {target}")
    dry = "--dry-run" in flags
    wait = "--wait" in flags
    check, file, render, start = TARGETS[target]
    check(config, wait)
    with claim(name, config.output_dir, resume=config.resume) as owner:
        launch = Launch(name, config, owner.folder.absolute(), command)
        text = render(launch)
        launch.freeze({file: text})
    if dry:
        print(text, end="")
        return 0
    signal.signal(signal.SIGINT, signal.default_int_handler)  # from here on something was started
    return start(launch, wait)


def _check_local(config: RLConfig, wait: bool) -> None:
    needed = config.nodes
    require(
        needed == 1,
        f"trainer.nodes and generator.nodes come to {needed} nodes; it must be 1 on this host",
    )
    config.hardware.require_here()


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
        process = subprocess.Popen(
            job,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    print(
        f"run folder: {launch.folder}\nfollow it:  tail -f {log}\nend it:     kill "
        f"{process.pid}  (it saves first)"
    )
    return 0


def _check_slurm(config: RLConfig, wait: bool) -> None:
    """Raise ConfigError if the plan says that the run cannot work, before it waits in a queue."""
    errors = Plan(config).errors
    require(not errors, "\n".join(errors))


def _slurm(launch: Launch, wait: bool) -> int:
    job = slurm.submit(launch)
    log = launch.folder / "logs" / f"slurm-{job}.log"
    print(
        f"job:        {job}\nrun folder: {launch.folder}\nfollow it:  tail -F {log}\nend it:    "
        f" scancel {job}"
    )
    return slurm.follow(launch, job) if wait else 0


def _check_kubernetes(config: RLConfig, wait: bool) -> None:
    require(not wait, "--wait: not for kubernetes; follow the run by kubectl logs -f")
    _check_slurm(config, wait)


def _kubernetes(launch: Launch, wait: bool) -> int:
    kubernetes.submit(launch)
    print(
        f"run folder: {launch.folder}\nend it:     kubectl delete -f "
        f"{launch.files / 'manifests.json'}"
    )
    return 0


TARGETS = {
    "local": (_check_local, "job.sh", _local_script, _local),
    "slurm": (_check_slurm, "job.sh", slurm.script, _slurm),
    "kubernetes": (_check_kubernetes, "manifests.json", kubernetes.manifests, _kubernetes),
}

if __name__ == "__main__":
    end_program(main())
