"""Runs as Slurm jobs: the script of a job, its submission and its state."""

import shlex
import sys
import time
from pathlib import Path

from rl.errors import RunError, printable
from rl.launch.freeze import NODE, Launch, run_command

BODY = Path(__file__).with_name("job.sh")
POLL_S = 2.0
NO_ANSWER_S = 600.0  # how long Slurm's controller may be away
ENDED = {"GONE", "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"}
ENDED |= {"OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE"}
SITE_OPTIONS = ("partition", "account", "qos", "constraint", "nodelist", "exclude")


def script(launch: Launch) -> str:
    """Return the script of a job: the part of this run, then the part that all runs share."""
    slurm = launch.config.slurm
    image = slurm.container_image
    python = "python" if image else sys.executable
    values = {
        "run": launch.folder,
        "node": NODE,
        "python": python,
        "max_restarts": slurm.max_restarts,
    }
    mounts = ",".join(slurm.container_mounts)
    container = [f"--container-image={image}"] if image else []
    container += [f"--container-mounts={mounts}"] if mounts else []
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH {option}" for option in options(launch)),
        "",
        "reason=  # why the run has to leave: USR1 from Slurm before the time limit, or TERM",
        "trap 'reason=\"the time limit is near\"' USR1",
        "trap 'reason=\"told to end\"' TERM",
        *(f"{name}={shlex.quote(str(value))}" for name, value in values.items()),
        f"train=({shlex.join(launch.train(python))})",
        f"container=({shlex.join(container)})",
        *(f"export {name}={shlex.quote(value)}" for name, value in slurm.environment.items()),
        *slurm.prelude,
    ]
    return "\n".join(lines) + "\n\n" + BODY.read_text(encoding="utf-8")


def options(launch: Launch) -> list[str]:
    """Return the options of sbatch."""
    config = launch.config
    slurm = config.slurm
    gpus = config.hardware.gpus if slurm.gpus_per_node is None else slurm.gpus_per_node
    asked = {
        "job-name": launch.name,
        "nodes": slurm.nodes or config.nodes,
        "ntasks-per-node": 1,
        "gpus-per-node": gpus,
        "cpus-per-task": slurm.cpus_per_node,
        "mem": slurm.memory or ("0" if slurm.exclusive else ""),
        "time": slurm.time,
        **{name: getattr(slurm, name) for name in SITE_OPTIONS},
        "output": launch.folder / "logs" / "slurm-%j.log",
        "signal": f"B:USR1@{slurm.warn_s}",
    }
    named = [f"--{name}={shlex.quote(str(value))}" for name, value in asked.items() if value]
    exclusive = ["--exclusive"] if slurm.exclusive else []
    return [*named, *exclusive, "--requeue", "--open-mode=append", "--export=ALL", *slurm.extra]


def start(launch: Launch, wait: bool) -> int:
    """Submit the job, and :func:`follow` it if ``wait``. Raises RunError with the message of
    sbatch.
    """
    logs = launch.folder / "logs"
    logs.mkdir(exist_ok=True)
    job = _slurm("sbatch", "--parsable", str(launch.files / "job.sh")).partition(";")[0]
    print(f"job:        {job}")
    launch.show(end=f"scancel {job}", follow=f"tail -F {logs / f'slurm-{job}.log'}")
    return follow(launch, job) if wait else 0


def follow(launch: Launch, job: str) -> int:
    """Print each state of the job and the log of its run until the job has ended. Return 0 if the
    run finished, else 1.
    """
    state = ""
    shown = dict[Path, int]()
    answered = time.monotonic()
    while state not in ENDED:
        time.sleep(POLL_S)
        before = state
        try:
            state = _slurm("squeue", "-h", "-t", "all", "-j", job, "-o", "%T")
            answered = time.monotonic()
        except RunError as error:
            if "Invalid job id" in str(error):  # Slurm no longer knows the job
                state = "GONE"
            elif time.monotonic() > answered + NO_ANSWER_S:
                raise
        if state != before:
            print(f"job {job}: {state}", flush=True)
        for log in sorted((launch.folder / "logs").glob(f"{job}.*/run.log")):
            with log.open() as file:
                file.seek(shown.get(log, 0))
                print(printable(file.read()), end="", flush=True)
                shown[log] = file.tell()
    return 0 if (launch.files / f"{job}.finished").exists() else 1


def _slurm(*command: str) -> str:
    return run_command(*command, remedy="launch from a node of a Slurm cluster, or --dry-run")
