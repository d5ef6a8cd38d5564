"""Episodes that lose their worker: replayed, begun again, or lost with a reason."""

import asyncio
import itertools

import pytest

from rl.environments.protocol import Opening
from rl.errors import GroupLost, WorkerLost
from rl.rollout.episodes import Environments
from rl.rollout.rollouter import MAX_DEATHS
from rl.types import Sampling
from tests.kit import moody_environment as moody
from tests.kit.adversary import Engine
from tests.kit.conversations import user
from tests.kit.tokenizers import qwen3
from tests.rollout import test_episodes

LONGEST = 1500
KILLER = 50
"""Prompt_id whose episodes end their worker in their second step."""


class Replayable(moody.Environment):
    replayable = True


class Forgetful(Replayable):
    """Environment that claims to be replayable and begins otherwise each time."""

    made = itertools.count()

    def __init__(self, mood, sample):
        super().__init__(mood, sample)
        self.number = next(self.made)

    def reset(self):
        return Opening([user(f"Episode {self.number} begins.")])


class Tasks(moody.Moody):
    """Task whose episodes are environments of one kind."""

    kind = moody.Environment

    def environment(self, prompt, sample):
        return self.kind(prompt.prompt_id, sample)


class Worker:
    """A worker that is lost in the given steps, counted over all episodes, and started again.

    Calls that are under way then, and later calls of its episodes, raise WorkerLost.
    """

    def __init__(self, task, deaths):
        self.task = task
        self.deaths = deaths
        self.steps = itertools.count()
        self.lost = 0
        self.homes = {}
        self.turns = {}
        self.here = Environments(task)

    async def open(self, key, prompt, sample):
        self.homes[key] = self.here
        self.turns[key] = (prompt.prompt_id, 0)
        return await self._in(key, self.here.open(key, prompt, sample))

    async def step(self, key, answer):
        if self.homes[key] is not self.here:
            raise WorkerLost("environment worker died", "it has died", in_call=False)
        prompt_id, turn = self.turns[key]
        self.turns[key] = (prompt_id, turn + 1)
        work = self._in(key, self.here.step(key, answer))
        if next(self.steps) in self.deaths or (prompt_id, turn) == (KILLER, 1):
            self.lost += 1
            self.here = Environments(self.task)
        return await work

    async def close(self, keys):
        await self.here.close(keys)

    def __len__(self):
        return len(self.here)

    async def _in(self, key, call):
        turn = await call
        await asyncio.sleep(0.02)
        if self.homes[key] is not self.here:
            raise WorkerLost("environment worker died", "it died", in_call=True)
        return turn


def collect(model, kind, prompt_ids, *, deaths=(), samples=2):
    """Return the outcome of each prompt, the rollouter, the worker and the engine."""
    Tasks.kind = kind
    workers = []
    engine = Engine(habits=["plain", "cut in text", "invalid JSON"])

    def host(task):
        workers.append(Worker(task, deaths))
        return workers[0]

    fields = {"max_episode_tokens": LONGEST, "step_s": 60.0, "sampling": Sampling(max_tokens=60)}
    outcomes, rollouter = test_episodes.collect(
        model, prompt_ids, task=Tasks, host=host, engine=engine, samples=samples, **fields
    )
    return outcomes, rollouter, workers[0], engine


def asked(engine):
    """Return what the engine was asked in each round, and its answers."""
    return [
        [(request.request_id, request.prompt_tokens, made.tokens) for request, made in each]
        for each in engine.rounds
    ]


def numbers(groups):
    return [
        (rollout.sample, rollout.reward, rollout.stop_reason, rollout.turn_rewards, parts)
        for group in groups
        for rollout in group
        for parts in [[sequence.tokens.tolist() for sequence in rollout.sequences]]
    ]


@pytest.mark.parametrize("deaths", [{3}, {0, 9}, {7, 20}])
def test_a_replayed_episode_goes_on_with_the_same_tokens(model, deaths):
    groups, _, _, engine = collect(model, Replayable, range(4))
    again, rollouter, worker, other = collect(model, Replayable, range(4), deaths=deaths)
    assert worker.lost == len(deaths)
    assert asked(other) == asked(engine)
    assert numbers(again) == numbers(groups)
    assert rollouter.recovered_episodes["replayed"] >= 8
    assert not rollouter.recovered_episodes["begun again"]
    assert not rollouter.lost
    assert len(rollouter.warnings) == 1


def test_an_episode_that_cannot_be_replayed_begins_again(model):
    groups, rollouter, _, engine = collect(model, moody.Environment, range(4), deaths={9})
    assert rollouter.recovered_episodes == {"begun again": 8}
    assert not rollouter.lost
    assert "begun again after its worker was lost" in rollouter.warnings[0]
    made = {}
    for request, completion in itertools.chain.from_iterable(engine.rounds):
        _, prompt_id, sample, turn = request.request_id.split("/")
        own = made.setdefault((int(prompt_id), int(sample)), [])
        if turn == "0":
            own.clear()
        own.append((request, completion))
    assert [turn.request_id[-1] for turn, _ in engine.rounds[2]] == ["0"] * 8
    for group in groups:
        for rollout in group:
            own = made[rollout.prompt.prompt_id, rollout.sample]
            (sequence,) = rollout.sequences
            sampled = [token for _, completion in own for token in completion.tokens]
            assert sequence.tokens[sequence.sampled].tolist() == sampled
            assert rollout.metrics["turns"] == len(own)


def test_an_environment_that_changes_when_it_is_replayed_costs_its_group(model):
    groups, rollouter, _, _ = collect(model, Forgetful, range(3), deaths={9})
    assert {each.reason for each in groups} == {"environment was not replayable"}
    assert rollouter.lost == {"environment was not replayable": 3}
    assert not rollouter.recovered_episodes


@pytest.mark.parametrize("kind", [Replayable, moody.Environment])
def test_an_episode_that_ends_its_workers_is_lost_and_those_beside_it_are_not(model, kind):
    (first, lost, last), rollouter, worker, _ = collect(model, kind, [0, KILLER, 2], samples=1)
    assert isinstance(lost, GroupLost)
    assert rollouter.lost == {"environment worker died": 1}
    assert worker.lost == MAX_DEATHS + 1
    for (rollout,) in (first, last):
        assert rollout.stop_reason in ("done", "turns")
        assert qwen3().decode(rollout.sequences[0].tokens) == rollout.text
