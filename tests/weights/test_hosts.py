"""Push between two hosts, which are network namespaces of this machine with separate addresses."""

import os
import re
import shutil
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from tests.needs import cannot_run
from tests.weights.network import layouts
from tests.weights.ranks import SHAPES

UNSHARE = ["unshare", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]


def permitted() -> bool:
    tools = all(map(shutil.which, ("unshare", "nsenter", "ip")))
    return tools and subprocess.run([*UNSHARE, "ip", "link"], capture_output=True).returncode == 0


def marked(mark: str) -> list[Path]:
    """Return the processes that inherited ``mark``."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (process / "environ").read_bytes():
                found.append(process)
        except OSError:  # the process ended meanwhile
            continue
    return found


@pytest.mark.long
def test_a_push_between_hosts_is_exact_and_leaves_nothing_behind():
    if not permitted():
        cannot_run(
            "no right to make network namespaces; be root (in a container, with CAP_SYS_ADMIN)"
        )
    mark = uuid.uuid4().hex
    links = os.listdir("/sys/class/net")
    script = [*UNSHARE, sys.executable, "-m", "tests.weights.two_hosts"]
    result = subprocess.run(
        script,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "TILLER_TEST_MARK": mark},
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "workers [0, 0]" in result.stdout
    per_push = sum(2 * region.box.numel for layout in layouts(SHAPES)[1] for region in layout)
    received = int(re.search(r"received (\d+)", result.stdout)[1])
    assert 2 * per_push < received < 3 * per_push  # two whole versions and two deltas
    assert marked(mark) == []
    assert os.listdir("/sys/class/net") == links
