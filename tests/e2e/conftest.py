"""Runs that several tests look at."""

from collections.abc import Callable

import pytest

from tests.e2e.runs import Run


@pytest.fixture(scope="session")
def finished(tmp_path_factory) -> Callable[..., Run]:
    """A run with the given arguments, without interference; each is made once."""
    runs: dict[tuple[str, ...], Run] = {}

    def run(*arguments: str) -> Run:
        if arguments not in runs:
            runs[arguments] = Run(*arguments, folder=tmp_path_factory.mktemp("finished") / "run")
            assert runs[arguments].wait() == 0, runs[arguments].stderr
            runs[arguments].assert_nothing_left()
        return runs[arguments]

    return run
