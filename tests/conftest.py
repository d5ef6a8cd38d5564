"""Order of the tests, processes that start warm, and the last lines of a test run: which tests did
not run, and why.
"""

from collections import Counter

import pytest
from xdist.scheduler import LoadScopeScheduling

from rl.actors import fork_server
from tests import warm

pytest_plugins = ["tests.durations.plugin"]

ENGINES = (
    *("tests/slurm", "tests/e2e", "tests/session", "tests/generation", "tests/training"),
    *("tests/weights", "tests/actors", "tests/sandbox", "tests/trainers", "tests/plan"),
)
"""Folders whose tests start processes, the longest first. The tests of the others are pure."""
SHARED = ("tests/slurm", "tests/e2e", "tests/generation")
"""Folders whose files share engines, so that one worker runs them."""


def pytest_configure(config: pytest.Config) -> None:
    fork_server.variables = warm.rank_variables


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not item.nodeid.startswith(ENGINES):
            item.add_marker("pure")
    items.sort(key=lambda item: _place(item.nodeid))


def _place(nodeid: str) -> int:
    places = (place for place, room in enumerate(ENGINES) if nodeid.startswith(f"{room}/"))
    return next(places, len(ENGINES))


class Rooms(LoadScopeScheduling):
    """Gives whole files to the workers, and whole folders if their files share engines."""

    def _split_scope(self, nodeid: str) -> str:
        room = next((room for room in SHARED if nodeid.startswith(f"{room}/")), None)
        return room or nodeid.partition("::")[0]


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> Rooms:
    config.option.loadscopereorder = False  # the longest come first
    return Rooms(config, log)


def pytest_unconfigure(config: pytest.Config) -> None:
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    skipped = Counter[tuple[str, str]]()
    for report in reporter.stats.get("skipped", []) if reporter else []:
        skipped[report.nodeid.partition("::")[0], report.longrepr[2].removeprefix("Skipped: ")] += 1
    for (file, reason), count in sorted(skipped.items()):
        reporter.write_line(f"NOT RUN: {count} of the tests in {file}: {reason}")
