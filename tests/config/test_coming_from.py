"""docs/coming-from.md names the fields that the command line names, for each name it refuses."""

import re
from pathlib import Path

import pytest

from rl.config.other_names import OTHER_NAMES

PAGE = Path(__file__).parents[2] / "docs" / "coming-from.md"
ROW = re.compile(r"^\| (.*?) \| (.*) \|$", re.MULTILINE)
NAMED = ("TRL", "verl", "prime-rl", "OpenRLHF")


def rows() -> dict[str, dict[str, str]]:
    """Return the right cell of each name of the tables, by library."""
    found = {}
    for section in PAGE.read_text().split("\n## ")[1:]:
        library, _, text = section.partition("\n")
        cells = found.setdefault(library, {})
        for left, right in ROW.findall(text):
            cells |= dict.fromkeys(re.findall("<code>(.*?)</code>", left), right)
    return found


@pytest.mark.parametrize("library", NAMED)
def test_a_row_names_the_field_by_which_the_command_line_refuses_its_name(library):
    wrong = {
        name: cell
        for name, cell in rows()[library].items()
        if name in OTHER_NAMES and not re.search(f"`(--)?{re.escape(OTHER_NAMES[name])}[`.]", cell)
    }
    assert wrong == {}


def test_a_name_of_openrlhf_that_is_refused_has_a_row():
    source = Path(__file__).parents[2] / "rl" / "config" / "other_names.py"
    part = source.read_text().partition("# OpenRLHF\n")[2].partition("}")[0]
    names = re.findall(r'^    "(\w+)":', part, re.MULTILINE)
    assert {*names} <= {*rows()["OpenRLHF"]} and names
