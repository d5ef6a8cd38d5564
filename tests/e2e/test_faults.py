"""Each fault ends as docs/faults.md says, and a run without a fault raises no alarm."""

import re

import pytest

from tests import warm
from tests.kit.pages import blocks
from tests.kit.scripts import module
from tests.kit.tables import cases

OFTEN = ("weights_never_arrive", "kl_is_off")
ENDS = {}
for block in blocks("docs/faults.md", "text"):
    command, said, code = block.code.splitlines()
    _, _, script, fault = command.split()
    ENDS[fault] = (script, said, int(code.removeprefix("exit code ")))


@pytest.mark.parametrize("name", cases(ENDS, OFTEN))
def test_a_fault_ends_in_the_message_that_the_page_shows(name, tmp_path):
    script, said, code = ENDS[name]
    done = warm.run(script, name, "--output-dir", tmp_path / "run", timeout=300)
    printed = done.stdout + done.stderr
    line = ".*".join(map(re.escape, said.split("…")))
    assert re.search(f"^{line}$", printed, re.MULTILINE), printed
    assert done.returncode == code


def test_the_same_run_without_the_fault_raises_no_alarm(tmp_path):
    script, *_ = ENDS["kl_is_off"]
    done = warm.run(script, "kl_is_off", "--healthy", "--output-dir", tmp_path / "run", timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    assert "warning" not in done.stdout


def test_the_page_shows_every_fault(monkeypatch):
    assert ENDS.keys() == module("scripts/faults.py", monkeypatch).FAULTS.keys()
