"""The speed of the processor is the highest that any process measured, of either kernel."""

import json

import pytest

from rl.host import cpu_speed as module
from rl.host.cpu_speed import PROCESSES, CpuSpeed, cpu_speed, faster_kernel

SLOW = [1e-9] * 4
FAST = [1e9] * 4
KNOWN = {
    "nothing": ("", 1),
    "a damaged file": ("[[1.0, 2.0", 1),
    "a file of an older version": ("[[0.1, 0.1, 10.0]]", 1),
    "a file of another kind": ('{"float32_tflops": 0.1}', 1),
    "a slow measurement": (json.dumps([SLOW]), 2),
    "a fast measurement": (json.dumps([FAST]), 2),
    "enough measurements": (json.dumps([SLOW] * PROCESSES), PROCESSES),
}


@pytest.mark.parametrize("case", KNOWN)
def test_the_fastest_of_the_first_measurements_counts(case, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cpu_speed.__wrapped__()
    (file,) = (tmp_path / "tiller").iterdir()
    content, count = KNOWN[case]
    file.write_text(content)
    found = cpu_speed.__wrapped__()
    kept = json.loads(file.read_text())
    assert len(kept) == count
    assert found == CpuSpeed(*map(max, zip(*kept, strict=True)))
    assert (found == CpuSpeed(*FAST)) == (case == "a fast measurement")
    assert (found == CpuSpeed(*SLOW)) == (case == "enough measurements")


def test_a_cache_folder_that_cannot_be_written_costs_nothing_but_time(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert min(cpu_speed.__wrapped__()) > 0


@pytest.mark.parametrize(("onednn", "faster"), [(0.2, "onednn"), (0.12, "mkl"), (0.0, "mkl")])
def test_the_faster_kernel_is_measured(onednn, faster, monkeypatch):
    monkeypatch.setattr(module, "cpu_speed", lambda: CpuSpeed(0.1, 0.1, 10.0, onednn))
    assert faster_kernel() == faster
