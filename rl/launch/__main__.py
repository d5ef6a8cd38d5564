"""The launcher: freeze a run in its folder, then start it here or hand it to a cluster.

Exit codes: 0 done, or submitted; with --wait what the run came to; 2 the config cannot work.
"""

import os
import shlex
import subprocess
import sys
from collections.abc import Sequence

from rl.cli import parse_config
from rl.config import RunConfig
from rl.errors import EXIT_CONFIG, EXIT_FAILED, EXIT_INTERRUPTED, ConfigError, RunError, end_program, require
from rl.launch import kubernetes, slurm
from rl.launch.freeze import Launch
from rl.observe.record import run_folder
from rl.plan.plan import Plan

PROGRAM = "python -m rl.launch"
USAGE = f"""usage: {PROGRAM} local|slurm|kubernetes --config NAME [--dry-run] [--wait] [--FIELD VALUE ...]

local: on this host, in the background. slurm, kubernetes: on trainer.nodes + generator.nodes nodes of a cluster, as the
fields slurm.* or kubernetes.* say.
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
    require(target in TARGETS, f"{target!r} is no place to launch to; allowed are {', '.join(TARGETS)}\n{USAGE}")
    name, config = parse_config(rest, program=f"{PROGRAM} {target}")
    folder = run_folder(name, config.output_dir, resume=config.resume).absolute()
    launch = Launch(name, config, folder, command)
    return TARGETS[target](launch, dry="--dry-run" in flags, wait="--wait" in flags)


def _freeze(launch: Launch, name: str, text: str, *, dry: bool) -> bool:
    """Write what is to be started; whether it is, or in a dry run only shown."""
    launch.freeze({name: text})
    if dry:
        print(text, end="")
    return not dry


def _local(launch: Launch, *, dry: bool, wait: bool) -> int:
    needed = launch.config.nodes
    require(needed == 1, f"trainer.nodes and generator.nodes come to {needed} nodes; it must be 1 on this host")
    launch.config.hardware.require_here()
    resume = ["--resume"] if launch.config.resume else []
    script = f"#!/bin/sh\nexec {shlex.join([*launch.train(), *resume])}\n"
    if not _freeze(launch, "job.sh", script, dry=dry):
        return 0
    job = ["/bin/sh", str(launch.files / "job.sh")]
    if wait:
        os.execv(job[0], job)
    log = launch.folder / "logs" / "run.log"
    log.parent.mkdir(exist_ok=True)
    with log.open("a") as output:
        process = subprocess.Popen(
            job, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    print(f"run folder: {launch.folder}\nfollow it:  tail -f {log}\nend it:     kill {process.pid}  (it saves first)")
    return 0


def _require_feasible(config: RunConfig) -> None:
    """Raise ConfigError where the plan says that it cannot work, before anybody waits in a queue for that."""
    errors = Plan(config).errors
    require(not errors, "\n".join(errors))


def _slurm(launch: Launch, *, dry: bool, wait: bool) -> int:
    _require_feasible(launch.config)
    script = slurm.script(launch)
    if not _freeze(launch, "job.sh", script, dry=dry):
        return 0
    job = slurm.submit(launch)
    log = launch.folder / "logs" / f"slurm-{job}.log"
    print(f"job:        {job}\nrun folder: {launch.folder}\nfollow it:  tail -F {log}\nend it:     scancel {job}")
    return slurm.follow(launch, job) if wait else 0


def _kubernetes(launch: Launch, *, dry: bool, wait: bool) -> int:
    require(not wait, "--wait: not for kubernetes; follow the run by kubectl logs -f")
    _require_feasible(launch.config)
    manifests = kubernetes.manifests(launch)
    if not _freeze(launch, "manifests.json", manifests, dry=dry):
        return 0
    kubernetes.submit(launch)
    print(f"run folder: {launch.folder}\nend it:     kubectl delete -f {launch.files / 'manifests.json'}")
    return 0


TARGETS = {"local": _local, "slurm": _slurm, "kubernetes": _kubernetes}

if __name__ == "__main__":
    end_program(main())
