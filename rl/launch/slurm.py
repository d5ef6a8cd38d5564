"""Runs as Slurm jobs: the script, and what is asked of Slurm's commands."""

import shlex
import subprocess
import sys
import time
from pathlib import Path

from rl.errors import RunError
from rl.launch.freeze import NODE, Launch

BODY = Path(__file__).with_name("job.sh")
POLL_S = 2.0
NO_ANSWER_S = 600.0  # for which Slurm's controller may be away
ENDED = (
    "GONE",
    "COMPLETED",
    "FAILED",
    "CANCELLED",
    "TIMEOUT",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "BOOT_FAIL",
    "DEADLINE",
)

SITE_OPTIONS = ("partition", "account", "qos", "constraint", "nodelist", "exclude")


def script(launch: Launch) -> str:
    """The job's script: what differs from run to run, then the body that is the same for all."""
    slurm = launch.config.slurm
    python = "python" if slurm.container_image else sys.executable
    values = {
        "run": launch.folder,
        "node": NODE,
        "python": python,
        "max_restarts": slurm.max_restarts,
    }
    mounts = ",".join(slurm.container_mounts)
    container = [
        *([f"--container-image={slurm.container_image}"] if slurm.container_image else []),
        *([f"--container-mounts={mounts}"] if mounts else []),
    ]
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH {option}" for option in options(launch)),
        "",
        "told=  # why the run has to leave: its time limit, which Slurm tells this shell, or TERM",
        "trap 'told=\"the time limit is near\"' USR1",
        "trap 'told=\"told to end\"' TERM",
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
    slurm = launch.config.slurm
    gpus = config.hardware.gpus if slurm.gpus_per_node is None else slurm.gpus_per_node
    asked = {
        "job-name": launch.name,
        "nodes": slurm.nodes or config.nodes,
        "ntasks-per-node": 1,
        "gpus-per-node": gpus,
        "cpus-per-task": slurm.cpus_per_node,
        "mem": slurm.memory,
        "time": slurm.time,
        **{name: getattr(slurm, name) for name in SITE_OPTIONS},
        "output": launch.folder / "logs" / "slurm-%j.log",
        "signal": f"B:USR1@{slurm.warn_s}",
    }
    given = [f"--{name}={shlex.quote(str(value))}" for name, value in asked.items() if value]
    exclusive = ["--exclusive"] if slurm.exclusive else []
    return [*given, *exclusive, "--requeue", "--open-mode=append", "--export=ALL", *slurm.extra]


def submit(launch: Launch) -> str:
    """The job's number. Raises RunError with what sbatch said."""
    (launch.folder / "logs").mkdir(exist_ok=True)
    return _ask("sbatch", "--parsable", str(launch.files / "job.sh")).partition(";")[0]


def follow(launch: Launch, job: str) -> int:
    """Print what becomes of the job, and what its run says, until it has ended; 0 if the run
    finished, else 1.
    """
    state = ""
    shown = dict[Path, int]()
    answered = time.monotonic()
    while state not in ENDED:
        time.sleep(POLL_S)
        before = state
        try:
            state = state_of(job)
            answered = time.monotonic()
        except RunError:
            if time.monotonic() > answered + NO_ANSWER_S:
                raise
        if state != before:
            print(f"job {job}: {state}", flush=True)
        for log in sorted((launch.folder / "logs").glob(f"{job}.*/run.log")):
            with log.open() as file:
                file.seek(shown.get(log, 0))
                print(file.read(), end="", flush=True)
                shown[log] = file.tell()
    return 0 if (launch.files / f"{job}.finished").exists() else 1


def state_of(job: str) -> str:
    """Return the state by Slurm's name for it; GONE if it has forgotten the job."""
    try:
        return _ask("squeue", "-h", "-t", "all", "-j", job, "-o", "%T")
    except RunError as error:
        if "Invalid job id" in str(error):
            return "GONE"
        raise


def _ask(*command: str) -> str:
    try:
        answer = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise RunError(
            f"{command[0]} is not on PATH: launch from a node of a Slurm cluster, or --dry-run"
        ) from error
    if answer.returncode:
        raise RunError(f"{shlex.join(command)} failed: {answer.stderr.strip()}")
    return answer.stdout.strip()
