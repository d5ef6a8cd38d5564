"""The call that ended a run, made again by the program: whether it fails again, and how.

Shorter tests of such calls are in ``tests/trainers/test_failed_calls.py``.
"""

import json
import shutil
import textwrap
from pathlib import Path

import pytest

from rl.observe.rollouts import read_rollouts
from tests.e2e.runs import TINY, Run
from tests.e2e.test_programs import Program, times

pytestmark = pytest.mark.long

USERS = """
    from dataclasses import dataclass
    from configs.quickstart import quickstart
    from rl.algorithms.losses import ClippedLoss
    from rl.config import RLConfig
    from rl.environments.task import Score
    from rl.tasks.copy_digits import CopyDigits

    class Careful(ClippedLoss):
        @dataclass(kw_only=True, slots=True)
        class Config(ClippedLoss.Config):
            limit: float = 10.0
            stricter: bool = False

        def __call__(self, tokens):
            if self.config.stricter:
                raise ArithmeticError("too much")
            if (largest := float(tokens["advantages"].abs().max())) > self.config.limit:
                raise ValueError(f"an advantage of {largest:.2f}")
            return super().__call__(tokens)

    class Greedy(CopyDigits):
        @dataclass(kw_only=True, slots=True)
        class Config(CopyDigits.Config):
            first: int = 8
            breaks: bool = False

        def score(self, prompt, text, completion):
            if prompt.prompt_id < self.config.first:
                return super().score(prompt, text, completion)
            if self.config.breaks and len(completion.tokens) > 1:
                raise KeyError(f"no answer to {text}")
            return Score(reward=100.0 * len(set(completion.tokens)), correct=False)

    def greedy() -> RLConfig:
        config = quickstart()
        config.task = Greedy.Config(max_prompt_tokens=16)
        config.algorithm.loss = Careful.Config()
        config.algorithm.advantage.normalize_std = False
        return config
"""
ARGUMENTS = (
    *("--config", "my_run.greedy", *TINY[2:], "--steps", "6", "--evaluation.prompts", "0"),
    *("--trainer.checkpoint.interval", "1", "--trainer.checkpoint.keep_latest_k", "0"),
)


class FailedRuns:
    """Runs of the user's module that fail in the third step; each is made once."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._runs: dict[tuple[str, ...], Run] = {}
        (folder / "my_run.py").write_text(textwrap.dedent(USERS))

    def __call__(self, *options: str) -> Run:
        if options not in self._runs:
            folder = self.folder / f"run-{len(self._runs)}"
            run = Run(*ARGUMENTS, *options, folder=folder, pythonpath=self.folder)
            assert run.wait() == 1, run.stderr
            run.assert_nothing_left()
            self._runs[options] = run
        return self._runs[options]


@pytest.fixture(scope="module")
def failed(tmp_path_factory):
    return FailedRuns(tmp_path_factory.mktemp("failed"))


@pytest.fixture
def again(failed, tmp_path, monkeypatch):
    """Function that makes the failing call of a run again: exit code, output and JSON."""

    def make(folder: Path, *arguments: str) -> tuple[int, str, dict]:
        monkeypatch.setenv("PYTHONPATH", str(failed.folder))
        before = times(folder)
        program = Program(
            "rl.replay", str(folder), "--failed", "--json", *arguments, folder=tmp_path / "replay"
        )
        program.wait()
        program.assert_nothing_left()
        assert times(folder) == before
        last = (program.stdout.splitlines() or [""])[-1]
        found = json.loads(last) if last.startswith("{") else {}
        return program.process.returncode, program.stdout + program.stderr, found

    return make


def copy_without(run: Run, folder: Path, *steps: int) -> Path:
    """Return a copy of a run without the checkpoints of ``steps``."""
    copy = shutil.copytree(run.folder, folder, symlinks=True)
    for step in steps:
        shutil.rmtree(copy / "checkpoints" / f"step-{step}")
    return copy


def test_a_failing_run_keeps_the_rollouts_of_its_step_and_says_what_to_do(failed):
    run = failed()
    failure = run.json("failure.json")
    assert (failure["step"], failure["again"], failure["cause"]) == (2, "step", "your code")
    assert (failure["type"], failure["call"]) == ("ValueError", "forward_backward")
    (chunk,) = read_rollouts(run.folder / "rollouts" / "failed.parquet")
    assert [each.prompt.prompt_id for each in chunk.rollouts] == sorted([8, 9, 10, 11] * 4)
    advice = "\n".join(failure["advice"])
    assert f"Correct your code at {failure['place']}." in advice
    assert f"python -m rl.replay {run.folder} --failed" in advice
    assert failure["advice"][-1].startswith("Go on from step 2 with: ")
    assert f"- {failure['advice'][0]}\n" in run.stderr


def test_a_loss_that_raised_raises_again_after_the_recorded_steps(failed, again, tmp_path):
    folder = copy_without(failed(), tmp_path / "copy", 2)
    code, said, found = again(folder)
    assert code == 1
    assert "step 2: gradient and weights are equal" in said
    assert "step 3 fails again, with the same error:\ntrainer rank 0, forward_backward: " in said
    assert "ValueError: an advantage of " in found["error"]["error"]
    assert found["error"]["place"].startswith(str(failed.folder / "my_run.py"))
    assert found["differing"] == []


def test_a_mend_is_tried_on_the_failing_step(failed, again):
    code, said, found = again(failed().folder, "--algorithm.loss.limit", "1e6", "--lr", "1e-4")
    assert (code, found["failed"]) == (0, False), said
    assert "step 3 does not fail again" in said


def test_another_error_is_told_apart(failed, again):
    code, said, found = again(failed().folder, "--algorithm.loss.stricter")
    assert (code, found["differing"]) == (1, ["type", "error", "place"]), said
    assert "step 3 fails again, with another type and error and place:\ntrainer rank 0, " in said
    assert "ArithmeticError: too much\nat " in said
    assert "\nrecorded was:\ntrainer rank 0, forward_backward: ValueError: an advantage" in said


def test_a_reward_that_raised_is_scored_again_without_models(failed, again):
    run = failed("--task.breaks", "--rollout.max_lost", "0")
    failure = run.json("failure.json")
    assert (failure["again"], failure["cause"]) == ("reward", "task")
    assert failure["lost_group"]["type"] == "KeyError"
    code, said, found = again(run.folder)
    assert (code, found["differing"]) == (1, []), said
    assert "the reward of prompt 8 fails again, with the same error:" in said
    assert "KeyError: 'no answer to " in found["error"]["error"]
    code, said, found = again(run.folder, "--task.no-breaks")
    assert (code, found["failed"]) == (0, False), said


def test_a_loss_that_does_not_exist_is_refused(failed, again):
    code, said, _ = again(failed().folder, "--loss", "grop")
    assert code == 2
    assert "--loss grop: no such loss; did you mean grpo" in said
