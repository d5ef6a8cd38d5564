"""The worker of one node: Monarch's process, which starts the run's processes there. Run as a file,
it imports no rl.

    python rl/launch/node.py FOLDER

FOLDER, which all nodes see, gets NAME.json when the worker listens and NAME.ended when it has
ended: see rl/actors/nodes.py. A file ``over`` there ends it. The port is any free one, so that jobs
on one node do not collide. Whoever can reach it can have the worker run anything: it belongs on a
cluster's own network.
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
    """Serve until the run shuts the worker down; the exit code of the worker."""
    # preemption sends it to every step, and the run has to save first
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    name = (
        os.environ.get("SLURMD_NODENAME") or os.environ.get("TILLER_NODE") or socket.gethostname()
    )
    entry = folder / f"{name}.json"
    end = folder / f"{name}.ended"
    folder.mkdir(parents=True, exist_ok=True)
    for stale in (entry, end):
        stale.unlink(missing_ok=True)
    reserved = reserve(name)
    address, port = reserved.getsockname()
    if address.startswith("127."):
        write(
            end,
            f"found no way to it: on the node, {name} is {address}, which others cannot reach; see "
            "to /etc/hosts",
        )
        return 1
    worker = os.fork()
    if worker == 0:
        serve(f"tcp://{name}:{port}")
    ended = 0
    while ended == 0:
        if not entry.exists() and listens(name, port):
            write(entry, json.dumps({"address": f"tcp://{name}:{port}", "pid": worker}))
        if (folder / "over").exists():
            os.kill(worker, signal.SIGKILL)
        time.sleep(POLL_S)
        ended, status = os.waitpid(worker, os.WNOHANG)
    reserved.close()
    code = os.waitstatus_to_exitcode(status)
    write(end, f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}")
    return 128 - code if code < 0 else code


def reserve(name: str) -> socket.socket:
    """A socket bound to a free port of ``name``: the worker alone, which sets SO_REUSEADDR too, can
    listen there.
    """
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind((name, 0))
    return reserved


def serve(address: str) -> None:
    """Be a host of Monarch's, until it is shut down."""
    from monarch.actor import run_worker_loop_forever

    run_worker_loop_forever(address=address, ca="trust_all_connections")
    os._exit(0)


def listens(name: str, port: int) -> bool:
    """Whether somebody takes connections there."""
    with socket.socket() as probe:
        return probe.connect_ex((name, port)) == 0


def write(path: Path, text: str) -> None:
    """All of it at once, for whoever looks."""
    temporary = path.with_name(f".{path.name}")
    temporary.write_text(text)
    temporary.rename(path)


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1])))
