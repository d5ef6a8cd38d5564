"""Runs that train on given examples: killed on the way (C6), and read by other programs."""

import json
import random
import time
from pathlib import Path

import pytest

from tests.e2e.runs import Run, digest, numbers, start
from tests.e2e.test_programs import Program, evaluate, files, scores, times
from tests.trainers.tiny_chat import chat_rows, preference_rows, tiny_chat_model

STEPS = 60
SAVED_EVERY = 5
CONFIGS = {
    "sft": "sft_jsonl",
    "dpo": "dpo_jsonl",
    "reward model": "reward_model_jsonl",
    "sampled": "tests.e2e.configs.sampled_sft",
}


@pytest.fixture(scope="session")
def inputs(tmp_path_factory) -> Path:
    """Folder of a tiny model and of examples for each trainer."""
    folder = tmp_path_factory.mktemp("inputs")
    tiny_chat_model(folder)
    for name, rows in (("sft", chat_rows(60)), ("dpo", preference_rows(60))):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def arguments(inputs):
    """Return a function that returns the command line of a run."""

    def arguments(kind: str, steps: int = STEPS) -> tuple[str, ...]:
        data = inputs / ("sft" if kind in ("sft", "sampled") else "dpo")
        problems = ("--evaluation.task.path", str(inputs / "problems.jsonl"))
        return (
            *(problems if kind == "sampled" else ()),
            *("--config", CONFIGS[kind], "--steps", str(steps), "--examples_per_step", "4"),
            *("--model.hf_path", str(inputs / "tiny"), "--model.max_seq_len", "128"),
            *("--task.path", str(data), "--task.max_tokens", "96"),
            *("--task.held_out_fraction", "0.2", "--validate_every", "7"),
            *("--trainer.checkpoint.interval", str(SAVED_EVERY)),
            *("--trainer.checkpoint.keep_latest_k", "0"),
            *("--trainer.optimizer.param_groups.0.optimizer_kwargs.lr", "1e-3"),
        )

    return arguments


def assert_same(run: Run, whole: Run) -> None:
    """Check numbers, validations and weights bit for bit."""
    assert numbers(run) == numbers(whole)
    assert run.lines("evaluations.jsonl") == whole.lines("evaluations.jsonl")
    assert digest(run) == digest(whole)
    assert scores(run.json("summary.json")) == scores(whole.json("summary.json"))


@pytest.mark.parametrize("kind", ["sft", pytest.param("dpo", marks=pytest.mark.long)])
def test_a_killed_run_resumes_bit_for_bit(kind, tmp_path, finished, arguments):
    whole = finished(*arguments(kind))
    run = start(tmp_path, arguments(kind))
    run.until_step(SAVED_EVERY + 2)
    run.kill()
    run.assert_nothing_left()
    assert len(run.metrics()) < STEPS
    run = start(tmp_path, arguments(kind))
    assert run.wait() == 0, run.stderr
    run.assert_nothing_left()
    assert "resumed after step " in run.stdout
    assert_same(run, whole)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_killed_ten_times_at_random_moments(kind, tmp_path, finished, arguments):
    steps = 300
    rng = random.Random(kind)
    whole = finished(*arguments(kind, steps))
    for step in sorted(rng.randrange(steps - 60) for _ in range(10)):
        run = start(tmp_path, arguments(kind, steps))
        moment = rng.choice(["start", "step", "save", "validation"])
        if moment == "start":
            time.sleep(rng.uniform(0, 10))
        else:
            run.until(lambda run=run, step=step: len(run.metrics()) > step)
        if moment == "save":
            known = {*run.folder.glob("checkpoints/step-*")}
            run.until(lambda run=run, known=known: {*run.folder.glob("checkpoints/step-*")} - known)
        elif moment == "validation":
            run.until(lambda run=run: len(run.metrics()) % 7 == 0)
        else:
            time.sleep(rng.uniform(0, 0.2))
        run.kill()
        print(f"killed at {moment} after step {len(run.metrics())}")
        run.assert_nothing_left()
    run = start(tmp_path, arguments(kind, steps))
    assert run.wait() == 0, run.stderr
    run.assert_nothing_left()
    assert_same(run, whole)


@pytest.mark.parametrize(
    "kind",
    [
        "sft",
        "dpo",
        pytest.param("reward model", marks=pytest.mark.long),
        pytest.param("sampled", marks=pytest.mark.long),
    ],
)
def test_a_checkpoint_scores_as_the_run_did(kind, tmp_path, finished, arguments):
    run = finished(*arguments(kind))
    found = evaluate(run, tmp_path / "evaluate", "--step", "35")
    validated = {row["step"]: row for row in run.lines("evaluations.jsonl")}
    assert found["step"] == 35
    assert scores(found) == scores(validated[35])
    assert found["eval/loss"] != run.json("summary.json")["eval/loss"]


def test_an_export_has_every_byte_of_the_runs_own(tmp_path, finished, arguments):
    run = finished(*arguments("sft"))
    before = times(run.folder)
    folder = tmp_path / "exported"
    program = Program("rl.export", str(run.folder), str(folder), folder=tmp_path / "export")
    assert program.wait() == 0, program.stderr
    program.assert_nothing_left()
    assert files(folder) == files(run.folder / "export")
    assert times(run.folder) == before
