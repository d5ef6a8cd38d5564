"""The hosts of a run, and the processes on them.

Who wants some says where; nobody knows where hosts come from.
"""

import asyncio
import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from monarch.actor import Point, ProcMesh, attach_to_workers, default_bootstrap_cmd, this_host
from monarch.config import configure

from rl.actors.nodes import Node
from rl.compat.monarch_internals import BootstrapCommand
from rl.platform import device_type
from rl.types import Place

SHUT_DOWN_S = 10.0
GUARDED = "TILLER_GUARDED"

# Python, since no shell can ask for the signal that ends it with its parent; Monarch does so
# seconds later.
_WRAPPER = """
import ctypes, os, signal, sys
PR_SET_PDEATHSIG = 1
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
if os.getppid() != int(os.environ["TILLER_PARENT"]):
    sys.exit("who started it has ended")
signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the controller alone
if devices := os.environ.get("TILLER_DEVICES"):  # among those that this process may see
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    numbers = [int(number) for number in devices.split(",")]
    own = [visible.split(",")[number] for number in numbers] if visible else [devices]
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(own)
log = os.open(os.environ["TILLER_LOG"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
os.dup2(log, 1)
os.dup2(log, 2)
"""
_GUARD = Path(__file__).with_name("guard.py").read_text() + "\nguard()\n"
_START = "os.execv(sys.argv[1], sys.argv[1:])\n"


class Hosts:
    """This host alone, or the given nodes, in the order in which meshes take them."""

    def __init__(self, logs: Path, nodes: Sequence[Node] = ()):
        self.logs = logs
        self._nodes = nodes
        workers = [node.address for node in nodes]
        self._mesh = (
            attach_to_workers(ca="trust_all_connections", workers=workers) if nodes else this_host()
        )

    def spawn(self, name: str, place: Place, *, env: dict[str, str]) -> ProcMesh:
        """The processes of mesh ``name``, with ``env`` and torch.distributed's ranks set.

        If ``env`` has ``GUARDED``, all that these processes start ends with them. Each logs to
        ``logs``/name-rank.log. On CUDA (not covered by the tests) those of a host see its devices
        from ``place.first_device`` on.
        """
        self.logs.mkdir(parents=True, exist_ok=True)
        configure(
            mesh_proc_spawn_max_idle="24h", actor_spawn_max_idle="24h"
        )  # our own deadlines are those that count
        common = {
            "WORLD_SIZE": str(place.ranks),
            "LOCAL_WORLD_SIZE": str(place.per_host),
            "MASTER_ADDR": self._nodes[place.first_host].name if self._nodes else "127.0.0.1",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            "PYTHONUNBUFFERED": "1",
            **env,
        }
        if device_type() == "cpu":
            common["OMP_NUM_THREADS"] = "1"
        else:
            devices = range(place.first_device, place.first_device + place.per_host)
            common["TILLER_DEVICES"] = ",".join(map(str, devices))
        if not self._nodes:
            common["GLOO_SOCKET_IFNAME"] = "lo"

        program = _WRAPPER + (_GUARD if GUARDED in env else "") + _START

        def command(point: Point) -> BootstrapCommand:
            base = default_bootstrap_cmd()
            host, local = divmod(point.rank, place.per_host)
            own = {
                "RANK": str(point.rank),
                "LOCAL_RANK": str(local),
                "TILLER_PARENT": str(
                    self._nodes[place.first_host + host].pid if self._nodes else os.getpid()
                ),
                "TILLER_LOG": str(self.logs.resolve() / f"{name}-{point.rank}.log"),
            }
            return BootstrapCommand(
                sys.executable,
                None,
                ["-ISc", program, base.program, *base.args],
                {**base.env, **common, **own},
            )

        mesh = self._mesh
        if self._nodes:
            mesh = mesh.slice(hosts=slice(place.first_host, place.first_host + place.hosts))
        return mesh.spawn_procs(
            per_host={"ranks": place.per_host}, name=name, bootstrap_command=command
        )

    def coordinates(self, place: Place, rank: int) -> dict[str, int]:
        """Of a rank in what ``spawn`` returned."""
        host, local = divmod(rank, place.per_host)
        return {"hosts": host, "ranks": local} if self._nodes else {"ranks": rank}

    def name_of(self, place: Place, rank: int) -> str:
        """The node of a rank; empty where there is only one."""
        return (
            self._nodes[place.first_host + rank // place.per_host].name
            if len(self._nodes) > 1
            else ""
        )

    async def shut_down(self) -> None:
        """Have the nodes' workers end, if there are any. Raises nothing."""

        async def shut_down() -> None:
            await self._mesh.shutdown()

        if self._nodes:
            with contextlib.suppress(Exception):  # those that are lost need not end
                await asyncio.wait_for(shut_down(), SHUT_DOWN_S)
