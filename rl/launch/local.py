"""Processes on this host."""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path

from monarch._rust_bindings.monarch_hyperactor.host_mesh import BootstrapCommand  # not re-exported by monarch.actor
from monarch.actor import Point, ProcMesh, default_bootstrap_cmd, shutdown_context, this_host
from monarch.config import configure

from rl.platform import device_type

# Python, since no shell can ask for the signal that ends it with its parent; Monarch does so seconds later.
_WRAPPER = """
import ctypes, os, signal, sys
PR_SET_PDEATHSIG = 1
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
if os.getppid() != int(os.environ["TILLER_CONTROLLER"]):
    sys.exit("the controller has ended")
signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the controller alone
log = os.open(os.environ["TILLER_LOG"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
os.dup2(log, 1)
os.dup2(log, 2)
os.execv(sys.argv[1], sys.argv[1:])
"""


def start_runtime(log: Path) -> None:
    """Start Monarch in this process; what it says of itself on standard error goes to ``log``."""
    kept = os.dup(2)
    with log.open("a") as file:
        os.dup2(file.fileno(), 2)
    try:
        this_host()
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def stop_runtime() -> None:
    """Stop Monarch in this process, so that the interpreter can end."""
    shutdown_context().get(timeout=10)


def spawn_procs(
    name: str, ranks: int, *, env: dict[str, str], logs: Path, port: int | None = None, first_device: int = 0
) -> ProcMesh:
    """``ranks`` processes with torch.distributed's variables set; each logs to ``logs``/name-rank.log.

    They meet at ``port``, by default any free one.
    On CUDA (not covered by the tests) they see ``ranks`` devices of the host, from ``first_device`` on.
    """
    logs.mkdir(parents=True, exist_ok=True)
    configure(mesh_proc_spawn_max_idle="24h", actor_spawn_max_idle="24h")  # our own deadlines are those that count
    common = {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port or free_port()),
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "PYTHONUNBUFFERED": "1",
        "TILLER_CONTROLLER": str(os.getpid()),
        **env,
    }
    if device_type() == "cpu":
        common |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    else:
        common["CUDA_VISIBLE_DEVICES"] = ",".join(str(first_device + i) for i in range(ranks))

    def command(point: Point) -> BootstrapCommand:
        base = default_bootstrap_cmd()
        rank = str(point.rank)
        own = {"RANK": rank, "LOCAL_RANK": rank, "TILLER_LOG": str(logs.resolve() / f"{name}-{rank}.log")}
        return BootstrapCommand(
            sys.executable, None, ["-ISc", _WRAPPER, base.program, *base.args], {**base.env, **common, **own}
        )

    return this_host().spawn_procs(per_host={"ranks": ranks}, name=name, bootstrap_command=command)


async def stop_procs(procs: ProcMesh | None, *, deadline: float = 20.0) -> None:
    """End the processes, if there are any."""

    async def stopped(mesh: ProcMesh) -> None:
        await mesh.stop()

    if procs is not None:
        with contextlib.suppress(Exception):  # a mesh that has already failed cannot stop more than that
            await asyncio.wait_for(stopped(procs), deadline)


class Process:
    """A process of this host that Monarch started, known by a descriptor: its pid may be another's after its end."""

    def __init__(self, pid: int, on_end: Callable[[], None]):
        """Raises ProcessLookupError where it has ended."""
        self.pid, self._descriptor, self._on_end = pid, os.pidfd_open(pid), on_end
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._descriptor, self._end)
        self.ended: asyncio.Future[None] = self._loop.create_future()

    def kill(self) -> None:
        """End it, also where it is stopped or hangs."""
        if not self.ended.done():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)

    def _end(self) -> None:
        self._loop.remove_reader(self._descriptor)
        os.close(self._descriptor)
        self.ended.set_result(None)
        self._on_end()


def free_port() -> int:
    """A port of this host that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
