"""The table of layouts fails where a row is beyond its tolerance."""

import json
from math import nan

import pytest

from tests.kit.scripts import module

SCRIPT = "scripts/bench/layouts.py"


@pytest.mark.parametrize(
    ("loss", "gradient", "moved", "ok"),
    [
        (0, 0, 0, True),
        (2e-4, 0, 0, False),
        (nan, 0, 0, False),
        (0, 2e-5, 0, False),
        (0, nan, 0, False),
        (0, 0, 2e-5, False),
    ],
)
def test_a_row_beyond_its_tolerance_fails(monkeypatch, capsys, loss, gradient, moved, ok):
    layouts = module(SCRIPT, monkeypatch)
    row = layouts.LAYOUTS["tp2"]

    def answer(_count, function, *args):
        if function is layouts.gradient_errors:
            return [(gradient, 0.0)]
        own = [1.0, 1.0 + loss * (function is layouts.go_on or args[0] is row)]
        return (
            [[1.0] * layouts.SAVED_AFTER + own]
            if function is layouts.play
            else [[own[0] + moved, own[1]]]
        )

    monkeypatch.setattr(layouts, "on_ranks", answer)
    monkeypatch.setattr("sys.argv", ["layouts.py", "--only", "tp2", "--json"])
    assert layouts.main() == (0 if ok else 1)
    *_, line, last = capsys.readouterr().out.splitlines()
    assert line.split("|")[-2].strip() == ("yes" if ok else "NO")
    assert json.loads(last)["layouts"][0]["ok"] is ok
