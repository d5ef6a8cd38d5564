"""Worker of one node: Monarch's process, which starts the run's processes there. It runs as a file
and imports nothing of rl.

    python rl/launch/node.py FOLDER

All nodes share FOLDER. The worker writes NAME.json there when it listens and NAME.ended when it has
ended: see rl/actors/hosts.py. A file ``over`` there ends the worker. It takes any free port, so
that jobs on one node do not collide. Every process that can reach the port can run any code in the
worker: it belongs on a private network.
"""

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

POLL_S = 0.2


def main(folder: Path) -> int:
    """Serve until the run shuts the worker down. Return the exit code of the worker."""
    # preemption sends SIGTERM to every step, and a user any signal; the run has to save first
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    name = os.environ.get("SLURMD_NODENAME") or os.environ.get("TILLER_NODE")
    name = name or socket.gethostname()
    entry = folder / f"{name}.json"
    end = folder / f"{name}.ended"
    folder.mkdir(parents=True, exist_ok=True)
    for stale in (entry, end):
        stale.unlink(missing_ok=True)
    reserved = reserve(name)
    address, port = reserved.getsockname()
    if address.startswith("127."):
        advice = f"on the node, {name} is {address}, which others cannot reach; see to /etc/hosts"
        write(end, f"found no way to it: {advice}")
        return 1
    worker = os.fork()
    if worker == 0:
        serve(f"tcp://{name}:{port}")
    ended = 0
    while ended == 0:
        if not entry.exists() and listens(name, port):
            told = {"address": f"tcp://{name}:{port}", "pid": worker, "memory_gib": memory_gib()}
            write(entry, json.dumps(told))
        if (folder / "over").exists():
            os.kill(worker, signal.SIGKILL)
        time.sleep(POLL_S)
        ended, status = os.waitpid(worker, os.WNOHANG)
    reserved.close()
    code = os.waitstatus_to_exitcode(status)
    write(end, f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}")
    return 128 - code if code < 0 else code


def reserve(name: str) -> socket.socket:
    """Return a socket bound to a free port of ``name``. Only the worker, which sets SO_REUSEADDR
    too, can listen there.
    """
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind((name, 0))
    return reserved


def serve(address: str) -> None:
    """Run a Monarch host until it is shut down."""
    from monarch.actor import run_worker_loop_forever

    run_worker_loop_forever(address=address, ca="trust_all_connections")
    os._exit(0)


def memory_gib() -> float:
    """Return the memory that the job has on this host: the host's, its container's or Slurm's."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    container = Path("/sys/fs/cgroup/memory.max")
    if container.exists() and (text := container.read_text().strip()) != "max":
        limits.append(int(text))
    mib = os.environ.get("SLURM_MEM_PER_NODE", "")
    if mib.isdecimal() and mib != "0":  # which stands for all
        limits.append(int(mib) << 20)
    return min(limits) / 2**30


def listens(name: str, port: int) -> bool:
    """Whether a process accepts connections there."""
    with socket.socket() as probe:
        return probe.connect_ex((name, port)) == 0


def write(path: Path, text: str) -> None:
    """Write a file so that readers see all of it or nothing."""
    temporary = path.with_name(f".{path.name}")
    temporary.write_text(text)
    temporary.rename(path)


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1])))
