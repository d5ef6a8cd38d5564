"""The fork server of the tests' meshes, and the last lines of a test run: which tests did not run,
and why.
"""

from collections import Counter

import pytest

from rl.actors import fork_server


def pytest_configure(config: pytest.Config) -> None:
    fork_server.start(preload=False)


def pytest_unconfigure(config: pytest.Config) -> None:
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    skipped = Counter[tuple[str, str]]()
    for report in reporter.stats.get("skipped", []) if reporter else []:
        skipped[report.nodeid.partition("::")[0], report.longrepr[2].removeprefix("Skipped: ")] += 1
    for (file, reason), count in sorted(skipped.items()):
        reporter.write_line(f"NOT RUN: {count} of the tests in {file}: {reason}")
