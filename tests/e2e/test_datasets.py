"""Runs that train on given examples: killed on the way (C6), and read by other programs."""

import json
import random
import shutil
import textwrap
import time
from pathlib import Path

import pytest

from rl.evaluate import main
from tests.e2e.runs import Run, digest, numbers, start
from tests.e2e.test_programs import (
    Program,
    evaluate,
    files,
    scores,
    scores_without_versions,
    times,
)
from tests.e2e.test_replay import flip_bit, replay
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
def arguments(request):
    """Return a function that returns the command line of a run.

    The runs of the long tests save often; that of the default ones is shared with other tests.
    """

    def arguments(kind: str, steps: int = STEPS, *options: str) -> tuple[str, ...]:
        if kind == "demonstrations":
            return request.getfixturevalue("demonstrations")
        inputs = request.getfixturevalue("inputs")
        data = inputs / ("dpo" if kind in ("dpo", "reward model") else "sft")
        problems = ("--evaluation.task.path", str(inputs / "problems.jsonl"))
        return (
            *(problems if kind == "sampled" else ()),
            *options,
            *(
                "--config",
                CONFIGS.get(kind, kind),
                "--steps",
                str(steps),
                "--examples_per_step",
                "4",
            ),
            *("--model.hf_path", str(inputs / "tiny"), "--model.max_seq_len", "128"),
            *("--task.path", str(data), "--task.max_tokens", "96"),
            *("--task.held_out_fraction", "0.2", "--validate_every", "7", "--validate_at_start"),
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


@pytest.mark.long
@pytest.mark.parametrize("kind", ["sft", "dpo"])
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
            run.until_some_time_of_the_start(rng)
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


EACH_KIND = pytest.mark.parametrize(
    "kind",
    [
        "demonstrations",
        pytest.param("sft", marks=pytest.mark.long),
        pytest.param("dpo", marks=pytest.mark.long),
        pytest.param("reward model", marks=pytest.mark.long),
        pytest.param("sampled", marks=pytest.mark.long),
    ],
)


@EACH_KIND
def test_a_checkpoint_scores_as_the_run_did(kind, tmp_path, finished, arguments):
    run = finished(*arguments(kind))
    found = evaluate(run, tmp_path / "evaluate", "--step", "35")
    validated = {row["step"]: row for row in run.lines("evaluations.jsonl")}
    assert found["step"] == 35
    assert scores(found) == scores(validated[35])
    assert found["eval/loss"] != run.json("summary.json")["eval/loss"]


@EACH_KIND
def test_an_export_scores_as_the_run_did_at_its_end(kind, finished, arguments, capsys):
    run = finished(*arguments(kind))
    export = str(run.folder / "export")
    before = times(run.folder)
    assert main([export, "--config", str(run.folder / "config.json"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["model"] == export
    assert times(run.folder) == before
    assert scores_without_versions(found) == scores_without_versions(run.json("summary.json"))


def test_an_export_has_every_byte_of_the_runs_own(tmp_path, finished, arguments):
    run = finished(*arguments("demonstrations"))
    before = times(run.folder)
    folder = tmp_path / "exported"
    program = Program("rl.export", str(run.folder), str(folder), folder=tmp_path / "export")
    assert program.wait() == 0, program.stderr
    program.assert_nothing_left()
    assert files(folder) == files(run.folder / "export")
    assert times(run.folder) == before


CACHED = ("--reference.scores", "cached", "--epochs", "2")


@pytest.mark.parametrize(
    ("kind", "steps", "options", "saved"),
    [
        pytest.param("demonstrations", 60, (), 35, id="demonstrations"),
        pytest.param("sft", STEPS, (), 15, id="sft", marks=pytest.mark.long),
        pytest.param("dpo", STEPS, (), 15, id="dpo", marks=pytest.mark.long),
        pytest.param("dpo", 8, CACHED, 15, id="dpo with cached scores", marks=pytest.mark.long),
        pytest.param("reward model", STEPS, (), 15, id="reward model", marks=pytest.mark.long),
        pytest.param("sampled", STEPS, (), 15, id="sampled", marks=pytest.mark.long),
    ],
)
def test_steps_are_trained_again_bit_for_bit(
    kind, steps, options, saved, tmp_path, finished, arguments
):
    run = finished(*arguments(kind, steps, *options))
    program, found = replay(run.folder, tmp_path, "--step", str(saved + 3))
    assert program.process.returncode == 0, program.stderr
    assert (found["from"], found["equal"], len(found["steps"])) == (saved, True, 3)
    recorded = {row["step"]: row for row in run.metrics()}
    for row in found["steps"]:
        for name, (before, after) in row["metrics"].items():
            assert before == after == recorded[row["step"]][name], name
    assert found["steps"][0]["metrics"].keys() >= {"loss/mean", "epoch", "trainer/lr/AdamW"}


def test_a_flipped_bit_in_a_checkpoint_is_found_by_its_parameter(tmp_path, finished, arguments):
    run = finished(*arguments("demonstrations"))
    copied = shutil.copytree(run.folder, tmp_path / "copy", symlinks=True)
    checkpoint = copied / "checkpoints" / "step-35"
    name = "layers.1.attention.wo.weight"
    flip_bit(checkpoint, name)
    program, found = replay(copied, tmp_path, "--step", "36")
    assert program.process.returncode == 1
    assert found["difference"] == f"checkpoint 35, weights: {name}"


def test_examples_are_trained_on_with_another_choice(tmp_path, finished, arguments):
    run = finished(*arguments("demonstrations"))
    options = ("--step", "37", "--under", "fsdp2", "--lr", "0.01")
    program, found = replay(run.folder, tmp_path, *options)
    assert program.process.returncode == 0, program.stderr
    assert "(2 ranks)" in program.stdout
    first, second = (row["metrics"] for row in found["steps"])
    assert first["loss/mean"][0] == pytest.approx(first["loss/mean"][1], abs=1e-5)
    assert second["loss/mean"][0] != pytest.approx(second["loss/mean"][1], abs=1e-5)
    assert "log-prob of a token" not in program.stdout


@pytest.mark.long
def test_scores_of_other_examples_are_refused(tmp_path, finished, arguments):
    run = finished(*arguments("dpo", 8, *CACHED))
    program, _ = replay(run.folder, tmp_path, "--step", "18", "--seed", "1")
    assert program.process.returncode == 2
    assert "add --reference.scores computed" in program.stderr


STRICT = """
    from dataclasses import dataclass, field
    from configs.sft_jsonl import sft_jsonl
    from rl.algorithms.losses import CrossEntropyLoss
    from rl.config import SFTConfig

    class Strict(CrossEntropyLoss):
        @dataclass(kw_only=True, slots=True)
        class Config(CrossEntropyLoss.Config):
            limit: float = -5.0

        def __call__(self, tokens):
            if (mean := float(tokens["logprobs"].mean())) > self.config.limit:
                raise ValueError(f"a mean log-prob of {mean:.4f}")
            return super().__call__(tokens)

    def strict() -> SFTConfig:
        config = sft_jsonl()
        config.loss = Strict.Config()
        return config
"""


@pytest.mark.long
def test_a_failing_step_is_taken_again(tmp_path, arguments, monkeypatch):
    (tmp_path / "my_loss.py").write_text(textwrap.dedent(STRICT))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    run = Run(*arguments("my_loss.strict"), folder=tmp_path / "run", pythonpath=tmp_path)
    assert run.wait() == 1
    run.assert_nothing_left()
    failure = run.json("failure.json")
    assert (failure["again"], failure["cause"]) == ("step", "your code")
    program, found = replay(run.folder, tmp_path, "--failed")
    assert program.process.returncode == 1, program.stderr
    assert found["call"] == f"step {failure['step'] + 1}"
    assert found["error"]["error"] == failure["error"]
    assert found["differing"] == []
    program, found = replay(run.folder, tmp_path, "--failed", "--loss.limit", "0")
    assert (program.process.returncode, found["failed"]) == (0, False), program.stderr
