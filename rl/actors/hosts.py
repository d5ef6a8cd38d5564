"""The hosts of a run, and the processes on them."""

import asyncio
import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from monarch.actor import Point, ProcMesh, attach_to_workers, default_bootstrap_cmd, this_host
from monarch.config import configure

from rl.actors import fork_server
from rl.actors.fork_server import ENDURE, GUARDED, LOG
from rl.actors.nodes import Node, Nodes
from rl.actors.processes import ensure_runtime
from rl.compat.monarch_internals import BootstrapCommand
from rl.platform import device_type, thread_variables
from rl.program import COLLECT_AT, LEAVING
from rl.types import Place
from rl.weights.streams import HOST

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


class Hosts:
    """Hosts of a run: the given nodes, in the order in which meshes take them, or this host."""

    def __init__(self, logs: Path, nodes: Sequence[Node] = (), workers: Nodes | None = None):
        self.logs = logs
        self._nodes = nodes
        self._workers = workers
        if nodes:
            addresses = [node.address for node in nodes]
            self._mesh = attach_to_workers(ca="trust_all_connections", workers=addresses)
        else:
            self._mesh = this_host()

    def spawn(self, name: str, place: Place, *, env: dict[str, str]) -> ProcMesh:
        """Start the processes of mesh ``name``, with ``env`` and torch.distributed's ranks set.

        If ``env`` has ``GUARDED``, all processes that they start end with them. Each process logs
        to ``logs``/name-rank.log. On CUDA (not covered by the tests) the processes of a host see
        its devices from ``place.first_device`` on.
        """
        self.logs.mkdir(parents=True, exist_ok=True)
        # The caller's own deadlines are shorter.
        configure(mesh_proc_spawn_max_idle="24h", actor_spawn_max_idle="24h")
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
            devices = range(place.first_device, place.first_device + place.per_host)
            common["TILLER_DEVICES"] = ",".join(map(str, devices))
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
            own = {
                HOST: self._nodes[place.first_host + host].name if self._nodes else "127.0.0.1",
                "RANK": str(point.rank),
                "LOCAL_RANK": str(local),
                "TILLER_PARENT": str(parent),
                LOG: str(self.logs.resolve() / f"{name}-{point.rank}.log"),
            }
            arguments = ["-ISc", program, base.program, "-c", _RUN_MODULE, *base.args]
            env = {**base.env, **common, **own}
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

    async def lost(self) -> None:
        """Wait until a node is lost, then raise NodeLost. On a single host, wait forever."""
        if self._workers is None:
            await asyncio.Event().wait()
        else:
            await self._workers.lost(self._nodes)

    async def shut_down(self) -> None:
        """End the workers of the nodes, if any. Raises nothing."""
        if self._nodes:
            with contextlib.suppress(Exception):  # a lost node cannot answer
                async with asyncio.timeout(SHUT_DOWN_S):
                    await self._mesh.shutdown()


async def gather_hosts(logs: Path, count: int, deadline: float) -> Hosts:
    """Return ``count`` of the nodes that the cluster gave this run; this host if it gave none.

    Starts Monarch in this process. Raises NodeLost if fewer nodes come up within ``deadline`` s.
    """
    workers = Nodes(logs / "workers")
    nodes = await workers.gather(count, deadline)
    ensure_runtime(logs / "controller.log", workers.own)
    return Hosts(logs, nodes, workers)
