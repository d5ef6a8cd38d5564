"""The call that ended a run, made again by the program: whether it fails again, and how.

Shorter tests of such calls are in ``tests/trainers/test_failed_calls.py``.
"""

import re
import shutil
import textwrap
from pathlib import Path

import pytest

from rl.observe.rollout_files import read_rollouts
from tests.e2e.test_programs import answer_of
from tests.kit.runs import TINY, Run, words

pytestmark = pytest.mark.long

USERS = """
    from dataclasses import dataclass
    from configs.quickstart import quickstart
    from configs.sft_jsonl import sft_jsonl
    from rl.algorithms.losses import ClippedLoss, CrossEntropyLoss
    from rl.config import RLConfig, SFTConfig
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
ARGUMENTS = (
    *("--config", "my_run.greedy", *TINY[2:], "--steps", "6", "--evaluation.prompts", "0"),
    *words("--trainer.checkpoint.interval 1 --trainer.checkpoint.keep_latest_k 0"),
)


@pytest.fixture(scope="module")
def failed(tmp_path_factory):
    """Function that returns a run of a module that fails in the third step, made once."""
    home = tmp_path_factory.mktemp("failed")
    (home / "my_run.py").write_text(textwrap.dedent(USERS))
    runs: dict[tuple[str, ...], Run] = {}

    def run(*options: str) -> Run:
        if options not in runs:
            run = Run(*ARGUMENTS, *options, folder=home / f"run-{len(runs)}", pythonpath=home)
            assert run.wait() == 1, run.stderr
            run.assert_nothing_left()
            runs[options] = run
        return runs[options]

    run.home = home
    return run


@pytest.fixture
def again(failed, tmp_path, monkeypatch):
    """Function that makes the failing call of a run again: exit code, output and JSON."""

    def make(folder: Path, *arguments: str) -> tuple[int, str, dict]:
        monkeypatch.setenv("PYTHONPATH", str(failed.home))
        options = ("--failed", *arguments)
        program, found = answer_of("rl.replay", folder, tmp_path / "replay", *options)
        return program.process.returncode, program.stdout + program.stderr, found

    return make


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
    folder = shutil.copytree(failed().folder, tmp_path / "copy", symlinks=True)
    shutil.rmtree(folder / "checkpoints" / "step-2")
    code, said, found = again(folder)
    assert code == 1
    assert "step 2: gradient and weights are equal" in said
    assert "step 3 fails again, with the same error:\ntrainer rank 0, forward_backward: " in said
    assert "ValueError: an advantage of " in found["error"]["error"]
    assert found["error"]["place"].startswith(str(failed.home / "my_run.py"))
    assert found["differing"] == []


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        ("--algorithm.loss.limit 1e6 --lr 1e-4", 0, ["step 3 does not fail again"]),
        (
            "--algorithm.loss.stricter",
            1,
            [
                "step 3 fails again, with another type and error and place:\ntrainer rank 0, ",
                "ArithmeticError: too much\nat ",
                "\nrecorded was:\ntrainer rank 0, forward_backward: ValueError: an advantage",
            ],
        ),
        ("--loss grop", 2, ["--loss grop: no such loss; did you mean grpo"]),
    ],
    ids=["a mend", "another error", "no such loss"],
)
def test_another_choice_is_tried_on_the_failing_step(failed, again, options, code, said):
    found, output, _ = again(failed().folder, *options.split())
    assert found == code, output
    assert [each for each in said if each not in output] == []


def test_a_reward_that_raised_is_scored_again_without_models(failed, again):
    run = failed("--task.breaks", "--rollout.max_lost", "0")
    failure = run.json("failure.json")
    assert (failure["again"], failure["cause"]) == ("reward", "task")
    assert failure["lost_group"]["type"] == "KeyError"
    place = rf"\nat {failed.home / 'my_run.py'}, line \d+, in score\n"
    assert re.search(place, run.stderr)
    assert "my_run.py" in failure["traceback"]
    assert run.stderr.endswith(f" with: {failure['command']}\n")
    code, said, found = again(run.folder)
    assert (code, found["differing"]) == (1, []), said
    assert "the reward of prompt 8 fails again, with the same error:" in said
    assert "KeyError: 'no answer to " in found["error"]["error"]
    code, said, found = again(run.folder, "--task.no-breaks")
    assert (code, found["failed"]) == (0, False), said


def test_a_failing_step_on_examples_is_taken_again(failed, again, arguments, tmp_path):
    command = arguments("sft", config="my_run.strict")
    run = Run(*command, folder=tmp_path / "run", pythonpath=failed.home)
    assert run.wait() == 1
    run.assert_nothing_left()
    failure = run.json("failure.json")
    assert (failure["again"], failure["cause"]) == ("step", "your code")
    code, said, found = again(run.folder)
    assert code == 1, said
    assert found["call"] == f"step {failure['step'] + 1}"
    assert found["error"]["error"] == failure["error"]
    assert found["differing"] == []
    code, said, found = again(run.folder, "--loss.limit", "0")
    assert (code, found["failed"]) == (0, False), said
