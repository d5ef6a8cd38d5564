"""A host says what it has, and its processes get a part of it."""

import json
import os
import subprocess
import sys
import threading

import pytest

from rl.host import platform
from rl.host.platform import allocator_variables, bind_to
from rl.session.hardware import HardwareConfig


@pytest.mark.parametrize("cores", ["", "0-9999", "9999", "0,8-11"])
def test_a_thread_stays_on_the_cores_beside_its_device_that_it_may_use(tmp_path, cores):
    own = sorted(os.sched_getaffinity(0))
    (tmp_path / "0000:1b:00.0").mkdir()
    text = cores.replace("0,", f"{own[0]},")
    (tmp_path / "0000:1b:00.0" / "local_cpulist").write_text(f"{text}\n")
    found = []

    def bind():
        bind_to("0000:1b:00.0", tmp_path)
        found.append(sorted(os.sched_getaffinity(0)))
        bind_to("0000:ff:00.0", tmp_path)
        found.append(sorted(os.sched_getaffinity(0)))

    thread = threading.Thread(target=bind)
    thread.start()
    thread.join()
    near = {own[0], *range(8, 12)} if "," in cores else own
    assert found == [[core for core in own if core in near]] * 2


@pytest.mark.parametrize("name", ["", *platform.ALLOCATOR, *platform.HEAP, platform.PRIMITIVES])
def test_trainers_have_allocator_variables_unless_the_environment_has_them(name, monkeypatch):
    for each in (*platform.ALLOCATOR, *platform.HEAP, platform.PRIMITIVES):
        monkeypatch.delenv(each, raising=False)
    if name:
        monkeypatch.setenv(name, "1")
    grows = set() if name in platform.ALLOCATOR else {"PYTORCH_ALLOC_CONF"}
    own = {*platform.HEAP, platform.PRIMITIVES}
    assert allocator_variables().keys() == grows | own - {name}


KEEPS = """
import os, resource, sys, threading
import torch
from rl.host import platform

def new_pages():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(8):
        torch.ones(16 << 20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

os.environ |= platform.allocator_variables()
platform.set_heap()
counts = []
thread = threading.Thread(target=lambda: counts.extend(new_pages() for _ in range(4)))
thread.start()
thread.join()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
platform.release_cached_memory()
resident = int(open("/proc/self/statm").read().split()[1]) * 4
print(counts[0], counts[-1], before - resident)
"""


def test_a_forked_trainer_keeps_memory_that_it_frees_until_it_is_released():
    variables = {key: value for key, value in os.environ.items() if key not in platform.HEAP}
    found = subprocess.run(
        [sys.executable, "-c", KEEPS], env=variables, capture_output=True, text=True, check=True
    )
    first, last, given_back = map(int, found.stdout.split())
    assert last < first / 10
    assert given_back > 60_000, "release_cached_memory kept the 64 MiB"


GROWS = """
import random
import torch
from rl.host import platform

MIB = 2**20
rng = random.Random(0)
kept = []  # small tensors between the large ones, so that the heap cannot shrink

def step():
    tensors = []
    for _ in range(8):
        tensors.append(torch.ones(rng.randint(8, 64) * MIB // 4))
        kept.append(torch.ones(16))

begun = platform.resident_memory()
most = 0
for _ in range(12):
    step()
    platform.trim_heap()
    most = max(most, platform.resident_memory() - begun)
print(most // MIB)
"""


def test_fragments_of_freed_memory_do_not_grow_beyond_what_the_heap_may_keep():
    done = subprocess.run(
        [sys.executable, "-c", GROWS],
        env=os.environ | {name: str(value) for name, (_, value) in platform.HEAP.items()},
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(done.stdout) < platform.KEPT / 2**20 + 8 * 64  # what is kept, and one step


def test_the_memory_of_a_host_is_what_the_hosts_of_the_job_have(tmp_path, monkeypatch):
    here = HardwareConfig()
    elsewhere = HardwareConfig(device="h100")
    assert (here.host_gib, here.assumes_host) == (platform.host_memory() / 2**30, False)
    assert (elsewhere.host_gib, elsewhere.assumes_host) == (2048.0, True)
    (tmp_path / "workers").mkdir()
    for name, memory in {"n1": 512.0, "n2": 384.0, ".n3": 1.0}.items():
        (tmp_path / "workers" / f"{name}.json").write_text(json.dumps({"memory_gib": memory}))
    monkeypatch.setenv("TILLER_LOGS", str(tmp_path))
    for hardware in (here, elsewhere):
        assert (hardware.host_gib, hardware.assumes_host) == (384.0, False)
    elsewhere.host_memory_gib = 100.0
    assert (elsewhere.host_gib, elsewhere.assumes_host) == (100.0, False)
