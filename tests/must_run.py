"""Skipped tests fail if the variable CI is set, since there every test must run."""

import os
from collections.abc import Generator

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    chosen = item.get_closest_marker("skipif")  # depends on the user, and not on a missing tool
    if report.skipped and os.environ.get("CI") and not chosen and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2].removeprefix("Skipped: ")
        report.outcome = "failed"
        report.longrepr = f"not run, as it must be in CI: {reason}"
    return report
