"""Ranks have no terminal, which would stop them if they set it."""

import pytest

from tests import warm
from tests.kit.tables import long


@pytest.mark.parametrize("ranks", [long("executed"), "forked"])
def test_ranks_of_a_program_in_a_terminal_import_what_sets_the_terminal(tmp_path, ranks):
    done = warm.run("tests/actors/terminal.py", tmp_path, ranks, timeout=200)
    assert (done.returncode, done.stdout) == (0, "/dev/null False\n"), done.stderr
