"""Programs that read a finished run: its scores and its export again, from a checkpoint."""

import contextlib
import io
import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from rl.evaluate import main
from tests.e2e.pipelines import LONG, each_kind
from tests.kit.runs import Run, scores
from tests.kit.tables import long

SAVED = {"models": 2}
"""Step of a checkpoint that was evaluated on the way; 35 for other kinds."""


class Program(Run):
    """One ``python -m`` of any module."""

    def command(self, *arguments: str) -> list[str]:
        return [*arguments]


def times(folder: Path) -> dict[str, int]:
    """Return when each file and folder was last changed."""
    return {str(path): path.stat().st_mtime_ns for path in [folder, *folder.rglob("*")]}


def answer_of(name: str, run: Path, folder: Path, *arguments: str) -> tuple[Program, dict]:
    """Return a program that ended, and its JSON; the program only reads ``run``."""
    before = times(run)
    program = Program(name, str(run), "--json", *arguments, folder=folder)
    program.wait()
    program.assert_nothing_left()
    assert times(run) == before
    last = (program.stdout.splitlines() or [""])[-1]
    return program, json.loads(last) if last.startswith("{") else {}


def accepted(
    main: Callable[[list[str]], int], run: Path, refused: dict[str, str]
) -> dict[str, str]:
    """Return the options that ``main`` does not refuse with their message, and its answers."""
    found = {}
    for options, message in refused.items():
        said = io.StringIO()
        with contextlib.redirect_stderr(said):
            code = main([str(run), *options.split()])
        if code != 2 or message not in said.getvalue():
            found[options] = f"exit code {code}: {said.getvalue()}"
    return found


@pytest.mark.parametrize("kind", ["models", "demonstrations"])
def test_an_export_has_every_byte_of_the_runs_own(tmp_path, recorded, kind):
    def files(folder: Path) -> dict[str, bytes]:
        """Return the content of each file by its name."""
        paths = (path for path in folder.rglob("*") if path.is_file())
        return {str(path.relative_to(folder)): path.read_bytes() for path in paths}

    run = recorded(kind)
    folder = tmp_path / "new" / "exported"
    program, found = answer_of("rl.export", run.folder, tmp_path / "export", str(folder))
    assert program.process.returncode == 0, program.stderr
    assert files(folder) == files(run.folder / "export")
    assert [path.name for path in folder.parent.iterdir()] == ["exported"]
    summary = run.json("summary.json")
    assert (0 <= found.pop("changed") <= 1, found.pop("kept")) == (True, 1.0)  # all is float32
    assert found == {
        "run": str(run.folder),
        "step": summary["steps"],
        "folder": str(folder),
        "policy_digest": summary["policy_digest"],
    }


@each_kind("models", "demonstrations")
def test_a_checkpoint_scores_as_the_run_did(tmp_path, recorded, kind):
    run = recorded(kind)
    step = SAVED.get(kind, 35)
    program, found = answer_of(
        "rl.evaluate", run.folder, tmp_path / "evaluate", "--step", str(step)
    )
    assert program.process.returncode == 0, program.stderr
    (row,) = [row for row in run.lines("evaluations.jsonl") if row["step"] == step]
    assert found["step"] == step
    assert scores(found) == scores(row) != scores(run.json("summary.json"))


@LONG
def test_the_newest_checkpoint_scores_as_the_run_did_at_its_end(tmp_path, recorded):
    run = recorded()
    program, found = answer_of("rl.evaluate", run.folder, tmp_path / "evaluate")
    assert program.process.returncode == 0, program.stderr
    summary = run.json("summary.json")
    assert found["step"] == summary["steps"]
    assert scores(found) == scores(summary)


@each_kind("demonstrations")
def test_an_export_scores_as_the_run_did_at_its_end(recorded, kind, capsys):
    run = recorded(kind)
    export = str(run.folder / "export")
    config = ("--config", str(run.folder / "config.json"), "--json")
    before = times(run.folder)
    assert main([export, *config]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["model"] == export
    assert times(run.folder) == before
    wanted = scores(run.json("summary.json"))
    own = {name for name in wanted if "/version_" not in name}  # an export has no version
    assert {name: found[name] for name in own} == {name: wanted[name] for name in own}


@LONG
def test_random_weights_score_as_at_the_start_of_the_run(recorded, capsys):
    run = recorded()
    start, _ = run.lines("evaluations.jsonl")
    assert (start["step"], start["eval/version_max"], start["eval/skipped"]) == (0, 0, 0)
    assert main(["--config", str(run.folder / "config.json"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["model"] == "random weights"
    assert scores(found) == scores(start)


@pytest.mark.parametrize("program", ["rl.export", long("rl.evaluate")])
def test_ctrl_c_leaves_nothing_behind(tmp_path, recorded, monkeypatch, program):
    run = recorded()
    before = times(run.folder)
    temporary = tempfile.mkdtemp()  # short, since sockets lie there
    monkeypatch.setenv("TMPDIR", temporary)
    exported = tmp_path / "new" / "exported"
    directory = [str(exported)] if program == "rl.export" else []
    reader = Program(program, str(run.folder), *directory, folder=tmp_path / "reader")
    reader.until(lambda: len(reader.processes()) > 2)  # the program, its fork server and a rank
    reader.interrupt()
    assert reader.wait() == 130, reader.stderr
    assert reader.stderr == "error: interrupted by SIGINT\n"
    reader.assert_nothing_left()
    assert [*Path(temporary).glob("*tiller*")] == []
    assert not exported.parent.exists() or [*exported.parent.iterdir()] == []
    assert times(run.folder) == before
    shutil.rmtree(temporary)
