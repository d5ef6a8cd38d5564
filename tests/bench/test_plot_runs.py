"""scripts/plot_runs.py: a metric of several runs in one picture."""

import json

import pytest

from tests.kit.scripts import module


def test_runs_and_files_of_lines_are_drawn_over_steps_or_minutes(tmp_path, monkeypatch, capsys):
    script = module("scripts/plot_runs.py", monkeypatch)
    folder = tmp_path / "run"
    folder.mkdir()
    steps = [{"step": step, "timing/step": 30.0, "reward/mean": step / 10} for step in (1, 2, 3)]
    scores = [{"step": step, "eval/exact_match": step / 4} for step in (0, 2)]
    for name, rows in (("run/metrics", steps), ("run/evaluations", scores), ("other", scores)):
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    rows = script.rows_of(folder)
    assert script.line_of(rows, "reward/mean", False) == ([1, 2, 3], [0.1, 0.2, 0.3])
    assert script.line_of(rows, "eval/exact_match", True) == ([0.0, 1.0], [0.0, 0.5])

    def draw(*words: str) -> None:
        monkeypatch.setattr("sys.argv", ["plot_runs.py", str(tmp_path / "a.png"), *words])
        script.main()

    draw("eval/exact_match", str(folder), str(tmp_path / "other.jsonl"), "--log")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    for words, message in (
        (("loss", str(folder)), f"{folder} has no loss"),
        (("loss", str(tmp_path / "none")), "neither a run folder nor a file"),
    ):
        with pytest.raises(SystemExit, match=message):
            draw(*words)
