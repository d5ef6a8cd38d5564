"""The hosts of a run, and the processes on them."""

import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import monarch.actor
from monarch.actor import (
    MeshFailure,
    Point,
    ProcMesh,
    attach_to_workers,
    default_bootstrap_cmd,
    this_host,
)
from monarch.config import configure

from rl.actors import fork_server
from rl.actors.fork_server import ENDURE, GUARDED, LEAVE_TERMINAL, LOG
from rl.actors.processes import ensure_runtime
from rl.compat.monarch_internals import BootstrapCommand, failed_rank
from rl.errors import NodeLost
from rl.host.platform import device_type, thread_variables
from rl.host.process import COLLECT_AT, LEAVING
from rl.types import Place
from rl.weights.streams import HOST

_died: dict[str, Callable[[int, str], object]] = {}
"""Functions that are called with a rank that died and the reason, by the name of the mesh."""
POLL_S = 0.2
MONARCHS_DEADLINES = (
    *("mesh_proc_spawn_max_idle", "actor_spawn_max_idle", "host_spawn_ready_timeout"),
    *("get_proc_state_max_idle", "get_actor_state_max_idle", "pending_actor_delivery_timeout"),
)
SHUT_DOWN_S = 10.0

# The signal ends the process with its parent; Monarch would end it seconds later.
_WRAPPER = f"""
import ctypes, os, signal, sys
PR_SET_PDEATHSIG = 1
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
if os.getppid() != int(os.environ["TILLER_PARENT"]):
    sys.exit("the parent of this process has ended")
for number in {[*map(int, LEAVING)]}:
    signal.signal(number, signal.SIG_IGN)
if devices := os.environ.get("TILLER_DEVICES"):  # indices into the visible devices
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    numbers = [int(number) for number in devices.split(",")]
    own = [visible.split(",")[number] for number in numbers] if visible else [devices]
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(own)
{LEAVE_TERMINAL}
log = os.open(os.environ["TILLER_LOG"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
os.dup2(log, 1)
os.dup2(log, 2)
"""
_GUARD = Path(__file__).with_name("guard.py").read_text() + "\nguard()\n"
_EXECUTE = "os.execv(sys.argv[1], sys.argv[1:])\n"
_RUN_MODULE = f"""
import gc, os, runpy, sys
if "{GUARDED}" in os.environ:
    {ENDURE}
gc.set_threshold(*{COLLECT_AT})
runpy.run_module(sys.argv[2], run_name="__main__", alter_sys=True)
"""


@dataclass(frozen=True, slots=True)
class Node:
    """A host with a worker, which is a process of Monarch that the launcher started."""

    name: str
    """Host name by which other nodes reach this one."""
    address: str
    """Address of the worker."""
    pid: int
    """Process id of the worker."""


class Hosts:
    """Hosts of a run: the given nodes, in the order in which meshes take them, or this host.

    Monarch reports the death of an actor: seconds late, but on every host.
    """

    def __init__(self, logs: Path, nodes: Sequence[Node] = ()):
        self.logs = logs
        self._nodes = nodes
        monarch.actor.unhandled_fault_hook = _on_fault
        if nodes:
            addresses = [node.address for node in nodes]
            self._mesh = attach_to_workers(ca="trust_all_connections", workers=addresses)
        else:
            self._mesh = this_host()

    def spawn(self, name: str, place: Place, *, env: dict[str, str]) -> ProcMesh:
        """Start the processes of mesh ``name``, with ``env`` and torch.distributed's ranks set, and
        without a terminal.

        If ``env`` has ``GUARDED``, all processes that they start end with them. Each process logs
        to ``logs``/name-rank.log. On CUDA (not covered by the tests) the processes of a host see
        the GPUs ``place.visible``.
        """
        self.logs.mkdir(parents=True, exist_ok=True)
        # The caller's own deadlines are shorter; a rank that starts on a busy host is not dead.
        configure(**dict.fromkeys(MONARCHS_DEADLINES, "24h"))
        common = {
            "WORLD_SIZE": str(place.ranks),
            "LOCAL_WORLD_SIZE": str(place.per_host),
            "MASTER_ADDR": self._nodes[place.first_host].name if self._nodes else "127.0.0.1",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            "PYTHONUNBUFFERED": "1",
            **thread_variables(1),
            **env,
        }
        if device_type() != "cpu":
            common["TILLER_DEVICES"] = ",".join(map(str, place.visible))
        if not self._nodes:
            common["GLOO_SOCKET_IFNAME"] = "lo"
            if device_type() == "cpu" and common["OMP_NUM_THREADS"] == "1":
                common |= fork_server.variables()
        asks = fork_server.ASK if fork_server.SERVER in common else ""
        program = _WRAPPER + asks + (_GUARD if GUARDED in env else "") + _EXECUTE

        def command(point: Point) -> BootstrapCommand:
            base = default_bootstrap_cmd()
            host, local = divmod(point.rank, place.per_host)
            parent = self._nodes[place.first_host + host].pid if self._nodes else os.getpid()
            variables = {
                HOST: self._nodes[place.first_host + host].name if self._nodes else "127.0.0.1",
                "RANK": str(point.rank),
                "LOCAL_RANK": str(local),
                "TILLER_PARENT": str(parent),
                LOG: str(self.logs.resolve() / f"{name}-{point.rank}.log"),
            }
            arguments = ["-ISc", program, base.program, "-c", _RUN_MODULE, *base.args]
            env = {**base.env, **common, **variables}
            return BootstrapCommand(sys.executable, None, arguments, env)

        mesh = self._mesh
        if self._nodes:
            mesh = mesh.slice(hosts=slice(place.first_host, place.first_host + place.hosts))
        per_host = {"ranks": place.per_host}
        return mesh.spawn_procs(per_host=per_host, name=name, bootstrap_command=command)

    def coordinates(self, place: Place, rank: int) -> dict[str, int]:
        """Return the coordinates of a rank in the result of ``spawn``."""
        host, local = divmod(rank, place.per_host)
        return {"hosts": host, "ranks": local} if self._nodes else {"ranks": rank}

    def name_of(self, place: Place, rank: int) -> str:
        """Return the name of a rank's node; empty if the run has only one."""
        if len(self._nodes) < 2:
            return ""
        return self._nodes[place.first_host + rank // place.per_host].name

    def report_deaths(self, mesh: str, died: Callable[[int, str], None]) -> None:
        """Call ``died(rank, reason)`` at least once for each death of an actor in the mesh."""
        loop = asyncio.get_running_loop()
        _died[mesh] = lambda *fault: loop.call_soon_threadsafe(died, *fault)

    def ignore_deaths(self, mesh: str) -> None:
        """Ignore later deaths in this mesh."""
        _died.pop(mesh, None)

    async def lost(self) -> None:
        """Wait until a node is lost, then raise NodeLost. On a single host, wait forever."""
        await lost_node(workers_of(self.logs), self._nodes)

    async def shut_down(self) -> None:
        """End the workers of the nodes, if any. Raises nothing."""
        if self._nodes:
            with contextlib.suppress(Exception):  # a lost node cannot answer
                async with asyncio.timeout(SHUT_DOWN_S):
                    await self._mesh.shutdown()


def _on_fault(failure: MeshFailure) -> None:
    # Monarch calls this on its own thread, also for its helper actors and long after a stop.
    died = _died.get(failure.mesh_name.rpartition("-")[0])
    if died is not None:
        died(*failed_rank(failure))


async def gather_hosts(logs: Path, count: int, deadline: float) -> Hosts:
    """Return ``count`` of the nodes that the cluster gave this run; this host if it gave none.

    Starts Monarch in this process. Raises NodeLost if fewer nodes come up within ``deadline`` s.
    """
    nodes = await find_nodes(workers_of(logs), count, deadline)
    ensure_runtime(logs / "controller.log", os.environ.get("TILLER_NODE", ""))
    return Hosts(logs, nodes)


def workers_of(logs: Path) -> Path:
    """Return the folder of the workers' files.

    ``NAME.json`` has a worker's address and pid, and the memory of its host, once the worker
    listens. ``NAME.ended`` has the reason once the worker has ended.
    """
    return logs / "workers"


async def find_nodes(workers: Path, count: int, deadline: float) -> list[Node]:
    """Wait until all workers of ``TILLER_NODES`` listen, or for ``deadline`` s; return the first
    ``count`` nodes with a worker that does. Without the variable the run has this host alone.

    Raises NodeLost, which names the others, if too few listen.
    """

    def missing() -> list[str]:
        return [
            name
            for name in names
            if not (workers / f"{name}.json").exists() or _ended(workers, name)
        ]

    names = os.environ.get("TILLER_NODES", "").split()
    ends = time.monotonic() + deadline
    while (late := missing()) and time.monotonic() < ends:
        if all(_ended(workers, name) for name in late):
            break
        await asyncio.sleep(POLL_S)
    started = [name for name in names if name not in late]
    if names and len(started) < count:
        endings = {name: _ended(workers, name) for name in late}
        shown = ", ".join(f"{name} (it {how})" if how else name for name, how in endings.items())
        raise NodeLost(
            f"no worker came up within {deadline:.0f} s on {shown}; see the log of the node"
        )
    told = {name: json.loads((workers / f"{name}.json").read_text()) for name in started[:count]}
    return [Node(name, worker["address"], worker["pid"]) for name, worker in told.items()]


async def lost_node(workers: Path, nodes: Sequence[Node]) -> None:
    """Raise NodeLost when the worker of one of ``nodes`` has ended. Without nodes, wait forever."""
    while True:
        for node in nodes:
            if (how := _ended(workers, node.name)) is not None:
                raise NodeLost(f"node {node.name} is lost: its worker {how}")
        await asyncio.sleep(POLL_S)


def _ended(workers: Path, name: str) -> str | None:
    path = workers / f"{name}.ended"
    return path.read_text() if path.exists() else None
