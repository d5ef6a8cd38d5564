"""Breaks of the code that exist."""

from tests.breaks.__main__ import MISSING, ROOT, changed
from tests.breaks.breaks import BREAKS


def test_every_break_changes_one_line_that_its_file_has():
    missing = [f"{each.file}: {each.old}" for each in BREAKS if changed(each, ROOT) == MISSING]
    assert missing == []
