"""Rewards outside the reward workers of a session."""

import asyncio
import copy
import functools
import inspect
import operator
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl.actors.hosts import Hosts
from rl.actors.processes import ensure_runtime
from rl.actors.reward_workers import RewardWorkers, local_rewards
from rl.environments.protocol import EnvironmentTask
from rl.environments.task import Task
from rl.errors import GroupLost, RunError
from rl.host.threads import DaemonThread
from rl.model.shape import ModelConfig
from rl.observe.events import Events, print_texts
from rl.rollout.rollouter import Generate, Rollouter
from rl.types import Completion, GenerationRequest, Prompt, Rollout, Sampling
from rl.types.deadlines import DeadlineConfig

Weights = Path | str | None
"""Weights that generators sample with: see :meth:`rl.session.session.Session.sample`."""


def sampler_of(
    sample: Callable[..., Awaitable[list[Completion]]], weights: Weights | Mapping[int, Weights]
) -> Generate:
    """Return a function that samples with ``weights``, or with those of the player of a request.

    The requests of one player after the other are sampled, so that completions do not depend on
    what another player samples. The function raises RunError for a player without weights.
    """
    if not isinstance(weights, Mapping):
        return functools.partial(sample, weights=weights)

    async def by_player(requests: list[GenerationRequest]) -> list[Completion]:
        places: dict[int, list[int]] = {}
        for place, request in enumerate(requests):
            who = request.player
            if who is None or who not in weights:
                lacking = "the task has no players" if who is None else f"player {who} has none"
                raise RunError(f"weights are those of the players {[*weights]}; {lacking}")
            places.setdefault(who, []).append(place)
        completions: dict[int, Completion] = {}
        for who, player_places in sorted(places.items()):
            answers = await sample(
                [requests[place] for place in player_places], weights=weights[who]
            )
            completions |= zip(player_places, answers, strict=True)
        return [completions[place] for place in range(len(requests))]

    return by_player


async def score_alone(
    task: Task.Config,
    prompt: Prompt,
    completions: Sequence[Completion],
    *,
    model: ModelConfig,
    seed: int,
    deadlines: DeadlineConfig,
    folder: Path,
) -> list[Rollout]:
    """Return the rollouts of ``completions`` with their rewards. The worker's log is in ``folder``.

    Raises GroupLost if the reward raises, hangs, dies or returns no score.
    """
    ensure_runtime(folder / "logs" / "controller.log")
    hosts = Hosts(folder / "logs")
    workers = RewardWorkers(
        config=task,
        model=model,
        hosts=hosts,
        count=1,
        seed=seed,
        deadlines=deadlines,
        events=Events(print_texts),
    )
    try:
        await workers.start()
        return await workers.score(prompt, completions)
    finally:
        await workers.stop()
        await hosts.shut_down()


def rollouter_of(task: Task.Config | None, rewards: Any, **options: Any) -> Rollouter:
    """Return the sampler of the rollouts of ``task``, which ``rewards`` score, or of its episodes,
    whose environments they hold. ``options`` are those of :class:`Rollouter`.
    """
    if isinstance(task, EnvironmentTask.Config):
        return Rollouter(environments=rewards, max_open=task.max_open_episodes, **options)
    return Rollouter(None if rewards is None else rewards.score, **options)


@dataclass(eq=False)
class TaskRollouters:
    """Samplers of rollouts by task. Each call of ``collect`` draws new samples.

    The reward workers score if they have the config and the code that the task has now. Otherwise
    the task scores in this process, one group at a time.
    """

    started: Task.Config | None
    """Task of the reward workers."""
    workers: Rollouter
    """Sampler of the reward workers."""
    make: Callable[[Task.Config, Any], Rollouter]
    """Function that returns the sampler of another task and its rewards."""
    limit: float
    """Deadline of a coroutine that scores."""
    warn: Callable[[str], None]

    def __post_init__(self) -> None:
        self._code = _code_of(self.started._owner) if self.started is not None else []
        self.started = copy.deepcopy(self.started)  # as the workers got it, whatever is set later
        self._here: tuple[Task, Rollouter] | None = None  # of the newest task that scores here
        self._warned: set[str] = set()
        self._thread = DaemonThread("reward")  # one, since a reward need not be thread-safe
        self._calls = 0

    async def collect(
        self,
        task: Task,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        *,
        samples: int,
        generate: Generate,
    ) -> list[Rollout]:
        """Return ``samples`` rollouts of each prompt, in order, without lost groups and without
        rollouts whose reward abstained.
        """
        rollouter = self.workers if self._is_started(task) else self._rollouter_here(task)
        self._calls += 1
        rounds: dict[int, list[int]] = {}  # a prompt_id that occurs twice is asked in two rounds
        occurred = Counter[int]()
        for place, prompt in enumerate(prompts):
            rounds.setdefault(occurred[prompt.prompt_id], []).append(place)
            occurred[prompt.prompt_id] += 1
        answers = [
            rollouter.collect(
                [prompts[place] for place in places],
                sampling,
                samples=samples,
                generate=generate,
                stream=f"call {self._calls}.{number}",
            )
            for number, places in rounds.items()
        ]
        groups: dict[int, list[Rollout] | GroupLost] = {}
        for places, answer in zip(rounds.values(), await asyncio.gather(*answers), strict=True):
            groups |= zip(places, answer, strict=True)
        ordered = [groups[place] for place in range(len(prompts))]
        scored = [group for group in ordered if not isinstance(group, GroupLost)]
        return [rollout for group in scored for rollout in group if not rollout.abstained]

    def _is_started(self, task: Task) -> bool:
        """Whether the reward workers have the config and the code that ``task`` has now."""
        code = _code_of(type(task))
        return (
            task.config == self.started
            and len(code) == len(self._code)
            and all(map(operator.is_, code, self._code))
            and not any(inspect.isroutine(attribute) for attribute in vars(task).values())
        )

    def _rollouter_here(self, task: Task) -> Rollouter:
        name = type(task).__name__
        if self.started is not None and name not in self._warned:
            self.warn(
                f"{name} has another config or other code than the task of the session; its reward "
                "runs in this process, not in a reward worker"
            )
        self._warned.add(name)
        if self._here is None or self._here[0] is not task:
            rewards = local_rewards(task, self.limit, self._thread)
            self._here = task, self.make(task.config, rewards)
        return self._here[1]

    def stop(self) -> None:
        """End the thread of rewards in this process, if it runs. A later call starts another."""
        self._thread.shutdown()


def _code_of(task: type[Task]) -> list[object]:
    """Return the methods of ``task`` and what they name in their modules. A cell of a notebook that
    runs again makes other objects.
    """
    methods = [
        func for kind in task.__mro__ for func in vars(kind).values() if inspect.isfunction(func)
    ]
    named = [func.__globals__.get(name) for func in methods for name in func.__code__.co_names]
    return [*methods, *named]
