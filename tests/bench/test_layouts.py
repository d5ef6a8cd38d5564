"""The table of layouts: measured on real ranks, and a failure where a row is beyond its
tolerance.
"""

import json
from math import nan

import pytest

from tests.bench.programs import module, python

SCRIPT = "scripts/bench/layouts.py"


@pytest.mark.long
def test_rows_are_measured_and_the_last_line_is_json():
    *table, last = python(SCRIPT, "--only", "fsdp2", "moe-ep2", "--json").splitlines()
    result = json.loads(last)
    assert [row["name"] for row in result["layouts"]] == ["fsdp2", "moe-ep2"]
    assert len(table) == 4
    for row in result["layouts"]:
        assert row["ok"]
        assert row["moved_to"] == "1-rank"
        assert 0 < row["loss_delta"] <= result["max_loss_delta"] <= 1e-4
        assert 0 < row["whole_grad_error"] < row["grad_error"] <= result["max_grad_error"] <= 1e-5
        assert 0 < row["moved_loss_delta"] <= 1e-5


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
