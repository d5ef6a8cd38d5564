"""The loop of ``scripts/rl_loop.py``, run as a user runs it."""

import re
from pathlib import Path

import pytest

from tests import warm

SCRIPT = Path(__file__).parents[2] / "scripts/rl_loop.py"
TIMEOUT_S = 590


def test_script_is_short():
    lines = SCRIPT.read_text().splitlines()
    assert len(lines) <= 90
    assert max(map(len, lines)) <= 100


@pytest.mark.long
def test_it_learns_to_copy():
    def exact_match(printed: str) -> float:
        (exact,) = re.findall(r"exact match (\S+)", printed)
        return float(exact)

    def run(*arguments: str) -> str:
        """Return what the script prints."""
        done = warm.run(SCRIPT, *arguments, timeout=TIMEOUT_S)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert exact_match(run()) >= 0.95
