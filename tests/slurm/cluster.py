"""A Slurm of several nodes on this machine, which scripts/slurm_dev.sh brings up."""

import os
import re
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "slurm_dev.sh"
CANNOT_RUN_HERE = 69
START_S = 300.0  # the first start on a machine fetches Slurm
PATIENCE_S = 120.0  # for what takes seconds on an idle machine


class Cluster:
    """One Slurm, whose state is in ``folder``, which must have a short path."""

    def __init__(self, folder: Path, nodes: int = 3):
        self.folder = folder
        self.nodes = nodes

    def script(
        self, *arguments: str, env: dict[str, str] | None = None, timeout: float = PATIENCE_S
    ) -> subprocess.CompletedProcess[str]:
        """Run slurm_dev.sh with these arguments, with ``env`` added to this environment.

        Raises TimeoutExpired after ``timeout`` seconds, when the command and its children have been
        killed.
        """
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        command = [SCRIPT, *arguments]
        environment = self.environment(env)
        process = subprocess.Popen(command, env=environment, start_new_session=True, **pipes)
        try:
            output, errors = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        return subprocess.CompletedProcess(arguments, process.returncode, output, errors)

    def environment(self, extra: dict[str, str] | None = None) -> dict[str, str]:
        """Return the environment of the script."""
        return os.environ | {"SLURM_DEV_DIR": str(self.folder)} | (extra or {})

    def start(self) -> subprocess.CompletedProcess[str]:
        return self.script("up", str(self.nodes), timeout=START_S)

    def stop(self) -> subprocess.CompletedProcess[str]:
        return self.script("down")

    def run(
        self, *command: str, env: dict[str, str] | None = None, timeout: float = PATIENCE_S
    ) -> subprocess.CompletedProcess[str]:
        """Run the command as on the login node."""
        return self.script("run", *command, env=env, timeout=timeout)

    def ask(self, *command: str) -> str:
        """Return the stripped output of a command that must succeed."""
        ran = self.run(*command)
        assert ran.returncode == 0, f"{' '.join(command)} exited {ran.returncode}: {ran.stderr}"
        return ran.stdout.strip()

    def submit(self, *arguments: str) -> str:
        """Submit a job by sbatch with these arguments. Return its id."""
        return self.ask("sbatch", "--parsable", *arguments)

    def field(self, job: str, name: str) -> str:
        """A field of ``scontrol show job``, for minutes after its end too; say ``Restarts``."""
        return re.search(rf"\b{name}=(\S*)", self.ask("scontrol", "show", "job", job)).group(1)

    def state(self, job: str) -> str:
        """PENDING, RUNNING, COMPLETING, COMPLETED, FAILED, …"""
        return self.field(job, "JobState")

    def wait_for(self, job: str, *states: str, timeout: float = PATIENCE_S) -> str:
        """The first of these states that the job is seen in."""
        end = time.monotonic() + timeout
        while (state := self.state(job)) not in states:
            assert time.monotonic() < end, (
                f"job {job} is {state}, not {' or '.join(states)}, after {timeout:.0f} s"
            )
            time.sleep(0.5)  # a question starts several processes
        return state

    def start_now(self, job: str) -> None:
        """Spare a requeued job its wait, except for the second in which nodes refuse it."""
        self.ask("scontrol", "update", f"jobid={job}", "StartTime=now+2")

    def holder(self) -> int:
        """Return the process whose death ends all others."""
        return int((self.folder / "holder").read_text().split()[0])

    def network(self) -> str:
        """Return the cluster's network namespace, as named by /proc."""
        return os.readlink(f"/proc/{self.holder()}/ns/net")

    def pids(self, network: str | None = None) -> list[int]:
        """Return the ids of all processes in the namespaces, as seen from outside."""
        found = []
        network = network or self.network()
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has ended in the meantime
                if os.readlink(process / "ns" / "net") == network:
                    found.append(int(process.name))
        return found

    def traces(self, network: str) -> list[str]:
        """Return the cluster's traces: processes, addresses, mounts, hosts, files."""
        lines = subprocess.check_output(["ip", "-oneline", "address"], text=True).splitlines()
        for path in ("/proc/self/mounts", "/etc/hosts"):
            lines += Path(path).read_text().splitlines()
        left = [line for line in lines if "10.77.0." in line or str(self.folder) in line]
        left += [f"process {pid}" for pid in self.pids(network)]
        return left + [str(path) for path in [self.folder] if path.exists()]
