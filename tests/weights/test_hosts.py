"""Push between two hosts: ``python -m tests.weights.test_hosts``, as root, in separate namespaces.

    unshare --net --pid --fork --kill-child --mount-proc python -m tests.weights.test_hosts

The program is the controller on the first host. The second host is another network namespace,
joined by a pair of virtual interfaces. Everything ends with the program.
"""

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
from monarch.actor import attach_to_workers, enable_transport, run_worker_loop_forever

from tests.weights.network import layouts
from tests.weights.ranks import SHAPES, check_pushes

UNSHARE = ["unshare", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
PROGRAM = [sys.executable, "-m", "tests.weights.test_hosts"]
HERE = "10.78.0.1"
THERE = "10.78.0.2"
PORT = 23700
LINK = "tiller0"
RANKS = {"ranks": 2}


@pytest.mark.long
def test_a_push_between_hosts_is_exact_and_leaves_nothing_behind():
    tools = all(map(shutil.which, ("unshare", "nsenter", "ip")))
    if not tools or subprocess.run([*UNSHARE, "ip", "link"], capture_output=True).returncode:
        pytest.skip(
            "no right to make network namespaces; be root (in a container, with CAP_SYS_ADMIN)"
        )
    mark = uuid.uuid4().hex
    links = os.listdir("/sys/class/net")
    variables = os.environ | {"TILLER_TEST_MARK": mark}
    done = subprocess.run(
        [*UNSHARE, *PROGRAM], capture_output=True, text=True, timeout=300, env=variables
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "workers [0, 0]" in done.stdout
    per_push = sum(2 * region.box.numel for layout in layouts(SHAPES)[1] for region in layout)
    received = int(re.search(r"received (\d+)", done.stdout)[1])
    assert 2 * per_push < received < 3 * per_push  # two whole versions and two deltas
    processes = [*map(str, Path("/proc").glob("[0-9]*/environ"))]
    found = subprocess.run(["grep", "-lsa", mark, *processes], capture_output=True, text=True)
    assert found.stdout == ""
    assert os.listdir("/sys/class/net") == links


def run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def start_worker(address: str, *prefix: str) -> subprocess.Popen:
    """Start a worker of Monarch, which waits until its standard input is closed."""
    return subprocess.Popen([*prefix, *PROGRAM, address], stdin=subprocess.PIPE)


def join(namespace: str) -> None:
    """Create a pair of interfaces, one of them in ``namespace``."""
    run("ip", "link", "add", LINK, "type", "veth", "peer", "name", LINK, "netns", namespace)
    for address, prefix in ((HERE, []), (THERE, ["nsenter", f"--net=/proc/{namespace}/ns/net"])):
        run(*prefix, "ip", "address", "add", f"{address}/24", "dev", LINK)
        for link in ("lo", LINK):
            run(*prefix, "ip", "link", "set", link, "up")


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
    (link,) = json.loads(run("ip", "-json", "-statistics", "link", "show", LINK))
    print(f"received {link['stats64']['rx']['bytes']}", flush=True)
    print(f"workers {[worker.wait(timeout=120) for worker in workers]}", flush=True)
    os._exit(0)  # Monarch's own exit sometimes waits for hosts that have left


if __name__ == "__main__":
    if len(sys.argv) > 1:
        sys.stdin.read()
        run_worker_loop_forever(address=f"tcp://{sys.argv[1]}:{PORT}", ca="trust_all_connections")
    else:
        main()
