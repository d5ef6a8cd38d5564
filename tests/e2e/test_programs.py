"""Programs that read a finished run: its scores and its export again, from a checkpoint."""

import contextlib
import io
import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.runs import Run
from tests.e2e.test_algorithms import MANY_MODELS


class Program(Run):
    """One ``python -m`` of any module."""

    def command(self, *arguments: str) -> list[str]:
        return [*arguments]


@pytest.fixture
def run(finished) -> Run:
    return finished(*MANY_MODELS)


def files(folder: Path) -> dict[str, bytes]:
    """Return the content of each file by its name."""
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


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
    main: Callable[[list[str]], int], run: Path, refused: dict[tuple[str, ...], str]
) -> dict[tuple[str, ...], str]:
    """Return the options that ``main`` does not refuse with the message that belongs to them, each
    with what it answers.
    """
    found = {}
    for options, message in refused.items():
        said = io.StringIO()
        with contextlib.redirect_stderr(said):
            code = main([str(run), *options])
        if code != 2 or message not in said.getvalue():
            found[options] = f"exit code {code}: {said.getvalue()}"
    return found


def evaluate(
    run: Run, folder: Path, *arguments: str, of: tuple[str, ...] | None = None
) -> dict[str, object]:
    """Return the scores that the program prints of the run, or of what ``of`` names."""
    before = times(run.folder)
    named = of or (str(run.folder),)
    program = Program("rl.evaluate", *named, "--json", *arguments, folder=folder)
    assert program.wait() == 0, program.stderr
    program.assert_nothing_left()
    assert times(run.folder) == before
    return json.loads(program.stdout.splitlines()[-1])


def scores(row: dict[str, object]) -> dict[str, object]:
    """Return what an evaluation finds, without what belongs to the run around it."""
    return {
        name: value
        for name, value in row.items()
        if name.startswith("eval/") and name != "eval/skipped"
    }


def scores_without_versions(row: dict[str, object]) -> dict[str, object]:
    """Return ``scores`` without the policy's version, which an export does not have."""
    return {name: each for name, each in scores(row).items() if "/version_" not in name}


def test_an_export_has_every_byte_of_the_runs_own(tmp_path, run):
    before = times(run.folder)
    folder = tmp_path / "new" / "exported"
    arguments = [str(run.folder), str(folder), "--json"]
    program = Program("rl.export", *arguments, folder=tmp_path / "export")
    assert program.wait() == 0, program.stderr
    program.assert_nothing_left()
    assert files(folder) == files(run.folder / "export")
    assert [path.name for path in folder.parent.iterdir()] == ["exported"]
    summary = run.json("summary.json")
    assert json.loads(program.stdout.splitlines()[-1]) == {
        "run": str(run.folder),
        "step": summary["steps"],
        "folder": str(folder),
        "policy_digest": summary["policy_digest"],
    }
    assert times(run.folder) == before


@pytest.mark.long
def test_the_newest_checkpoint_scores_as_the_run_did_at_its_end(tmp_path, run):
    summary = run.json("summary.json")
    found = evaluate(run, tmp_path / "evaluate")
    assert found["step"] == summary["steps"]
    assert scores(found) == scores(summary)


@pytest.mark.long
def test_an_export_and_the_initial_weights_score_as_in_the_run(tmp_path, run):
    config = ("--config", str(run.folder / "config.json"))
    export = str(run.folder / "export")
    summary = run.json("summary.json")
    found = evaluate(run, tmp_path / "export", of=(export, *config))
    assert found["model"] == export
    assert scores_without_versions(found) == scores_without_versions(summary)
    found = evaluate(run, tmp_path / "start", of=config)
    assert found["model"] == "random weights"
    assert scores(found) == scores(run.lines("evaluations.jsonl")[0])


def test_an_earlier_checkpoint_scores_as_the_run_did_on_its_way(tmp_path, run):
    start, row = run.lines("evaluations.jsonl")
    assert (start["step"], start["eval/version_max"], start["eval/skipped"]) == (0, 0, 0)
    found = evaluate(run, tmp_path / "evaluate", "--step", "2")
    assert found["step"] == row["step"] == 2
    assert scores(found) == scores(row)
    assert found["eval/reward_mean"] != run.json("summary.json")["eval/reward_mean"]


@pytest.mark.parametrize(
    "program", ["rl.export", pytest.param("rl.evaluate", marks=pytest.mark.long)]
)
def test_ctrl_c_leaves_nothing_behind(tmp_path, run, monkeypatch, program):
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
