"""Session.rollout scores with the task that it is given, and draws new samples at each call."""

import asyncio
import threading
from dataclasses import dataclass
from functools import partial

import pytest

import rl
from rl.observe.events import Events
from rl.observe.spans import Stopwatch
from rl.rollout.rollouter import Rollouter
from rl.rollout.scoring import rollouts_of
from rl.session.meshes import Meshes
from rl.session.task_rollouters import TaskRollouters, rollouter_of
from rl.tasks.copy_digits import CopyDigits
from rl.types import Completion, Sampling

MODEL = rl.ModelConfig(vocab_size=16, max_seq_len=32)
OF_WORKERS = -1.0


def grade() -> float:
    return 1.0


class Graded(CopyDigits):
    @dataclass(kw_only=True, slots=True)
    class Config(CopyDigits.Config):
        bonus: float = 0.0

    def score(self, prompt, text, completion):
        return rl.Score(reward=grade() + self.config.bonus, correct=True)


class Other(Graded):
    @dataclass(kw_only=True, slots=True)
    class Config(Graded.Config):
        pass

    def score(self, prompt, text, completion):
        return rl.Score(reward=3.0, correct=True)


def task_of(config: rl.Task.Config) -> rl.Task:
    return config.build(seed=0, model=MODEL)


class Scene:
    """Samplers whose reward workers give everything ``OF_WORKERS``."""

    def __init__(self, runner: asyncio.Runner, task: rl.Task.Config | None):
        self.runner = runner
        self.warnings: list[str] = []
        self.requests: list[rl.GenerationRequest] = []
        warn = self.warnings.append
        options = {"seed": 0, "watch": Stopwatch(), "warn": warn, "longest": 32}
        workers = Rollouter(self.score, **options)
        make = partial(rollouter_of, **options)
        self.rollouters = TaskRollouters(task, workers, make, limit=60.0, warn=warn)

    async def score(self, prompt, completions):
        scored = [("", rl.Score(reward=OF_WORKERS, correct=False)) for _ in completions]
        return rollouts_of(prompt, completions, scored)

    async def generate(self, requests):
        self.requests += requests
        assert len({each.request_id for each in requests}) == len(requests)
        said = Completion(tokens=[6], logprobs=[-1.0], versions=[0], finish_reason="stop")
        return [said for _ in requests]

    def rewards(self, task: rl.Task, prompt_ids=(0, 1)) -> set[float]:
        prompts = [task.prompt(prompt_id) for prompt_id in prompt_ids]
        collect = self.rollouters.collect(
            task, prompts, Sampling(max_tokens=4), samples=2, generate=self.generate
        )
        rollouts = self.runner.run(collect)
        found = [(each.prompt.prompt_id, each.sample) for each in rollouts]
        assert found == [(prompt_id, sample) for prompt_id in prompt_ids for sample in range(2)]
        return {rollout.reward for rollout in rollouts}


def test_reward_workers_score_the_task_that_they_were_started_with(runner):
    task = task_of(Graded.Config())
    scene = Scene(runner, task.config)
    assert scene.rewards(task) == scene.rewards(task_of(Graded.Config())) == {OF_WORKERS}
    assert not scene.warnings


async def graded_later(self, prompt, text, completion):
    return rl.Score(reward=7.0, correct=False)


CHANGES = {
    "a coroutine function": (
        lambda task, patch: patch.setattr(Graded, "score", graded_later),
        7.0,
    ),
    "another class": (lambda task, patch: task_of(Other.Config()), 3.0),
    "another config": (lambda task, patch: task_of(Graded.Config(bonus=1.0)), 2.0),
    "a config that changed": (lambda task, patch: setattr(task.config, "bonus", 4.0), 5.0),
    "a method of the class": (
        lambda task, patch: patch.setattr(Graded, "score", Other.score),
        3.0,
    ),
    "a method of the task": (
        lambda task, patch: patch.setattr(task, "score", task_of(Other.Config()).score),
        3.0,
    ),
    "a function that the reward calls": (
        lambda task, patch: patch.setitem(globals(), "grade", lambda: 6.0),
        6.0,
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_task_that_the_workers_do_not_have_scores_here(runner, change, monkeypatch):
    task = task_of(Graded.Config())
    scene = Scene(runner, task.config)
    edit, reward = CHANGES[change]
    given = edit(task, monkeypatch) or task
    assert scene.rewards(given) == scene.rewards(given) == {reward}
    (warning,) = scene.warnings
    assert warning.startswith(f"{type(given).__name__} has another config or other code")


def test_a_session_without_a_task_scores_here(runner):
    scene = Scene(runner, None)
    assert scene.rewards(task_of(Graded.Config())) == {1.0}
    assert not scene.warnings


def test_a_reward_in_this_process_runs_in_a_thread_that_may_hang(runner, tmp_path):
    """A thread that is no daemon would keep the program from ending."""
    threads = []

    class Noted(Graded):
        @dataclass(kw_only=True, slots=True)
        class Config(Graded.Config):
            pass

        def score(self, prompt, text, completion):
            threads.append(threading.current_thread())
            return rl.Score(reward=0.0, correct=False)

    task = task_of(Noted.Config())
    Scene(runner, None).rewards(task)
    config = rl.SessionConfig(reward_workers=0, model=MODEL)
    workers = Meshes(config, None, tmp_path).rewards(task.config, Events())

    async def score():
        await workers.start()
        said = Completion(tokens=[6], logprobs=[-1.0], versions=[0], finish_reason="stop")
        await workers.score(task.prompt(0), [said])
        await workers.stop()

    runner.run(score())
    assert [thread.daemon for thread in threads] == [True] * 5


def test_each_call_draws_new_samples_which_depend_on_the_calls_before_alone(runner):
    task = task_of(Graded.Config())
    one, two = Scene(runner, task.config), Scene(runner, task.config)
    for scene in (one, two):
        scene.rewards(task)
        scene.rewards(task, (1, 0, 1))
    seeds = [request.seed for request in one.requests]
    assert len({*seeds}) == len(seeds) == 10
    assert seeds == [request.seed for request in two.requests]
    assert len({request.request_id for request in one.requests}) == 10
