"""Costs of each test: ``--durations-json FILE`` writes and ``-m tests.durations`` shows them."""

import json
import os
import re
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.durations.inject import sitecustomize

INJECTED = Path(sitecustomize.__file__).parent
PROPERTY = "costs"
SAMPLE_S = 2.0
PROGRAM = re.compile(
    r"-m rl(\.(train|evaluate|export|replay|compare|play|serve|view|launch|doctor|plan))?( |$)"
    r"|(^| )(\S*/)?scripts/(?!slurm)\S+\.py|/bin/tiller "
)
"""Commands that are whole programs of Tiller."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--durations-json",
        metavar="FILE",
        help="write seconds, programs, engines, processes and peak memory of each test to FILE",
    )


def pytest_configure(config: pytest.Config) -> None:
    if not (file := config.getoption("--durations-json")):
        return
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    if worker or not config.getoption("numprocesses", 0):
        config.pluginmanager.register(Meter(Path(f"{file}.{worker}.events").absolute()))
    if not worker:
        config.pluginmanager.register(Costs(Path(file).absolute()))


class Meter:
    """Counts what tests start. A fixture's cost is that of the first test that asks for it."""

    def __init__(self, events: Path):
        self._events = events
        self._events.write_text("")
        self._read = 0
        self._peak = 0
        os.environ[sitecustomize.EVENTS] = str(events)
        paths = [str(INJECTED), *filter(None, [os.environ.get("PYTHONPATH")])]
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)
        sitecustomize.watch()

    def pytest_sessionstart(self) -> None:
        threading.Thread(target=self._sample, daemon=True).start()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, call: pytest.CallInfo
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if call.when == "teardown":
            report.user_properties.append((PROPERTY, self._count()))
        return report

    def pytest_unconfigure(self) -> None:
        self._events.unlink()

    def _count(self) -> dict[str, int]:
        """Return the counts since the last call."""
        kinds = Counter[str]()
        with self._events.open() as lines:
            lines.seek(self._read)
            for event in map(json.loads, iter(lines.readline, "")):
                kinds[event["kind"]] += 1
                if PROGRAM.search(" ".join(event["command"])):
                    kinds[f"program by {event['kind']}"] += 1
            self._read = lines.tell()
        peak, self._peak = self._peak, 0
        return {
            "programs": kinds["program by python"],
            "forked": kinds["program by warm"],
            "engines": kinds["engine"],
            "processes": kinds["python"] + kinds["fork"],
            "peak_mib": peak,
        }

    def _sample(self) -> None:
        """Note the memory of this process and its descendants, with shared pages divided."""
        here = psutil.Process()
        while True:
            mib = sum(map(_resident, [here, *here.children(recursive=True)])) >> 20
            self._peak = max(self._peak, mib)
            time.sleep(SAMPLE_S)


def _resident(process: psutil.Process) -> int:
    try:
        return process.memory_full_info().pss
    except psutil.Error:  # it ended meanwhile
        return 0


class Costs:
    """Writes the costs of all tests of a run, by test and by folder."""

    def __init__(self, file: Path):
        self._file = file
        self._started = time.monotonic()
        self._tests = defaultdict[str, Counter[str]](Counter)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        costs = self._tests[report.nodeid]
        costs["seconds"] += report.duration
        for name, counts in report.user_properties:
            if name == PROPERTY and report.when == "teardown":
                costs.update(counts)

    def pytest_sessionfinish(self) -> None:
        folders = defaultdict[str, Counter[str]](Counter)
        for name, costs in self._tests.items():
            costs["seconds"] = round(costs["seconds"], 2)
            add(folders[folder_of(name)], costs | Counter(tests=1))
        written: dict[str, Any] = {
            "seconds": round(time.monotonic() - self._started, 1),
            "folders": folders,
            "tests": self._tests,
        }
        self._file.write_text(json.dumps(written, indent=1))


def folder_of(name: str) -> str:
    """Return the folder of tests of a node id, such as ``tests/weights``."""
    *folders, _ = name.partition("::")[0].split("/")
    return "/".join(folders[:2])


def add(total: Counter[str], costs: Mapping[str, float]) -> None:
    """Add ``costs`` to ``total``. The peak of memory is the larger one."""
    peak = max(total["peak_mib"], costs["peak_mib"])
    total.update(costs)
    total["peak_mib"] = peak
