"""A push between two hosts: ``python -m tests.weights.two_hosts``, as root, in separate namespaces.

    unshare --net --pid --fork --kill-child --mount-proc python -m tests.weights.two_hosts

This process is the controller on the first host. The second host is another network namespace,
joined by a pair of virtual interfaces. Everything ends with this process.
"""

import asyncio
import json
import os
import subprocess
import sys
import time

from monarch.actor import attach_to_workers, enable_transport, run_worker_loop_forever

from tests.weights.ranks import check_pushes

HERE = "10.78.0.1"
THERE = "10.78.0.2"
PORT = 23700
LINK = "tiller0"
RANKS = {"ranks": 2}


def run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def start_worker(address: str, *prefix: str) -> subprocess.Popen:
    """Start a worker of Monarch, which waits until its standard input is closed."""
    worker = [sys.executable, "-m", "tests.weights.two_hosts", address]
    return subprocess.Popen([*prefix, *worker], stdin=subprocess.PIPE)


def join(namespace: str) -> None:
    """Create a pair of interfaces, one of them in ``namespace``."""
    run("ip", "link", "add", LINK, "type", "veth", "peer", "name", LINK, "netns", namespace)
    for address, prefix in ((HERE, []), (THERE, ["nsenter", f"--net=/proc/{namespace}/ns/net"])):
        run(*prefix, "ip", "address", "add", f"{address}/24", "dev", LINK)
        for link in ("lo", LINK):
            run(*prefix, "ip", "link", "set", link, "up")


def received() -> int:
    """Return the number of bytes received on this host from the other."""
    return json.loads(run("ip", "-json", "-statistics", "link", "show", LINK))[0]["stats64"]["rx"][
        "bytes"
    ]


async def push() -> None:
    hosts = attach_to_workers(
        ca="trust_all_connections", workers=[f"tcp://{at}:{PORT}" for at in (HERE, THERE)]
    )
    trainer, generator = (hosts.slice(hosts=i).spawn_procs(per_host=RANKS) for i in (1, 0))
    await check_pushes(trainer, generator, "rdma", range(4))
    await hosts.shutdown()


def main() -> None:
    there = start_worker(THERE, "unshare", "--net")
    while os.readlink(f"/proc/{there.pid}/ns/net") == os.readlink("/proc/self/ns/net"):
        time.sleep(0.01)
    join(str(there.pid))
    workers = [start_worker(HERE), there]
    for worker in workers:
        worker.stdin.close()
    enable_transport(f"tcp://{HERE}:0")
    asyncio.run(push())
    print(f"received {received()}", flush=True)
    print(f"workers {[worker.wait(timeout=120) for worker in workers]}", flush=True)
    os._exit(0)  # Monarch's own exit sometimes waits for hosts that have left


if __name__ == "__main__":
    if len(sys.argv) > 1:
        sys.stdin.read()
        run_worker_loop_forever(address=f"tcp://{sys.argv[1]}:{PORT}", ca="trust_all_connections")
    else:
        main()
