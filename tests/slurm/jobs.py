"""Runs that rl.launch submits to the local Slurm, watched from outside."""

import json
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.slurm.cluster import PATIENCE_S, Cluster

ON_ONE_HOST = (
    *("--trainer.parallelism.data_parallel_shard_degree", "2"),
    *("--generator.kv_cache_gib", "0.05", "--weights.digests"),
)
NODES = ("--trainer.nodes", "2", "--generator.nodes", "1")
QUICKSTART = ("--config", "quickstart", "--steps", "45", *ON_ONE_HOST, *NODES)
SHORT_STEPS = 8
SHORT = (*QUICKSTART, "--steps", str(SHORT_STEPS), "--evaluation.prompts", "8")


class Job:
    """A job of ``python -m rl.launch slurm`` with these arguments, and the folder of its run."""

    def __init__(self, cluster: Cluster, folder: Path, *arguments: str, wait: float = 0.0):
        """``wait`` is how long the launcher stays for the end of the run, in seconds."""
        self.cluster = cluster
        self.folder = folder
        launch = (sys.executable, "-m", "rl.launch", "slurm", *(["--wait"] if wait else []))
        options = (*arguments, "--output-dir", str(folder))
        self.launched = cluster.run(*launch, *options, timeout=wait or PATIENCE_S)
        found = re.search(r"^job: +(\d+)$", self.launched.stdout, re.MULTILINE)
        assert found, self.launched.stderr
        self.id = found[1]

    def steps(self) -> int:
        """Steps of the run that are written down."""
        path = self.folder / "metrics.jsonl"
        return path.read_text().count("\n") if path.exists() else 0

    def restarts(self) -> int:
        return int(self.cluster.field(self.id, "Restarts"))

    def log(self) -> str:
        """Return the log of the job's script in all attempts."""
        return (self.folder / "logs" / f"slurm-{self.id}.log").read_text()

    def says(self, attempt: int) -> str:
        """Return the log of the run in an attempt."""
        path = self.folder / "logs" / f"{self.id}.{attempt}" / "run.log"
        return path.read_text() if path.exists() else ""

    def resumed(self, attempt: int) -> int:
        """Wait for an attempt to resume. Return the step after which it resumed."""
        until(lambda: "resumed after step" in self.says(attempt), f"attempt {attempt} resumed", 300)
        return int(re.search(r"resumed after step (\d+)", self.says(attempt))[1])

    def trains(self, attempt: int, steps: int = 3) -> None:
        """Wait until an attempt has taken this many steps."""
        until(lambda: "reward" in self.says(attempt), f"attempt {attempt} trains", 300)
        before = self.steps()
        until(lambda: self.steps() >= before + steps, f"attempt {attempt} takes {steps} steps", 300)

    def summary(self) -> dict:
        return json.loads((self.folder / "summary.json").read_text())

    def metric(self, name: str) -> list[float]:
        """Return the values of a metric by step."""
        lines = (self.folder / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line)[name] for line in lines]

    def rewards(self) -> list[float]:
        return self.metric("reward/mean")

    def processes(self, mark: str) -> dict[int, str]:
        """Node by pid of this run's processes that have ``mark`` in command or environment."""
        found = {}
        for pid in self.cluster.pids():
            command, environment = (_read(pid, name) for name in ("cmdline", "environ"))
            node = re.search(r"\0SLURMD_NODENAME=(\w+)", environment)
            text = command + environment
            if node and str(self.folder) in text and mark in text:
                found[pid] = node[1]
        return found


def until(condition: Callable[[], object], what: str, seconds: float = PATIENCE_S) -> None:
    """Wait for ``condition``, and fail after ``seconds``."""
    ends = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends, f"not within {seconds:.0f} s: {what}"
        time.sleep(0.5)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def worker_of(job: Job, node: str) -> int:
    """The pid of Monarch's process on a node: the child of the one that Slurm started."""
    pids = [pid for pid, at in job.processes("node.py\0").items() if at == node]
    (worker,) = (pid for pid in pids if parent_of(pid) in pids)
    return worker


def until_gone(cluster: Cluster, *jobs: str) -> None:
    """Wait until these jobs have left the queue and no process of theirs is left."""
    ends = time.monotonic() + PATIENCE_S
    while left := _left(cluster, jobs):
        assert time.monotonic() < ends, f"not gone within {PATIENCE_S:.0f} s:\n" + "\n".join(left)
        time.sleep(0.5)


def _left(cluster: Cluster, jobs: tuple[str, ...]) -> list[str]:
    """Return the lines of the queue with these jobs, and the commands of their processes."""
    queue = cluster.ask("squeue", "--noheader").splitlines()
    return [line for line in queue if line.split()[0] in jobs] + [
        f"{pid} {command_of(pid)}" for pid in pids_of(cluster, *jobs)
    ]


def pids_of(cluster: Cluster, *jobs: str) -> list[int]:
    """Return the ids of the processes of these jobs."""
    marks = {f"SLURM_JOB_ID={job}" for job in jobs}
    pids = (pid for pid in cluster.pids() if pid != os.getpid())
    return [pid for pid in pids if marks & {*_read(pid, "environ").split("\0")}]


def command_of(pid: int) -> str:
    """Return the command of a process; empty for a zombie and for a process that has ended."""
    return _read(pid, "cmdline").replace("\0", " ")


def children_of(pid: int) -> list[str]:
    """Commands of the children that run."""
    pids = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [command for child in pids if (command := command_of(int(child)))]


def _read(pid: int, name: str) -> str:
    """Return a file of a process; empty if the process has ended."""
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes().decode(errors="replace")
    except OSError:
        return ""
