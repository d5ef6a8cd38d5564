"""Environment workers that die or hang lose their own episodes only, and come back."""

import asyncio
import contextlib
import itertools
import os
import signal
from dataclasses import replace

import pytest

from rl.actors.hosts import Hosts
from rl.errors import GroupLost, RunError, WorkerLost
from rl.model.shape import ModelConfig
from rl.observe.events import Events, print_texts
from rl.observe.spans import Stopwatch
from rl.rollout.episodes import Environments
from rl.rollout.rollouter import Rollouter
from rl.session.meshes import Meshes
from rl.session.session_config import SessionConfig
from rl.tasks.guessing_game import GuessingGame
from rl.types import Completion, Sampling
from rl.types.deadlines import DeadlineConfig
from tests.actors.test_reward_workers import forked, pids_of, running
from tests.kit import moody_environment as moody
from tests.kit import wild_tools as wild
from tests.kit.adversary import Engine
from tests.kit.processes import assert_ended
from tests.kit.tokenizers import qwen3
from tests.rollout.test_recovery import asked, numbers

DEADLINES = DeadlineConfig(start=200.0, heartbeat=4.0)
ANSWER = Completion.written(qwen3().encode("The answer is 42.<|im_end|>"))
REWARD = len("The answer is 42.") % 3 / 2


@pytest.fixture
def model(tiny_model) -> ModelConfig:
    return ModelConfig(hf_path=str(tiny_model), max_seq_len=1000)


MOODY = moody.Moody.Config(max_episode_tokens=900, step_s=60.0)
IMPATIENT = replace(MOODY, step_s=1.5)


@contextlib.asynccontextmanager
async def playing(folder, model, count, task=MOODY):
    """Yield workers and the task; assert that all processes have ended after it."""
    config = SessionConfig(model=model, reward_workers=count, deadlines=DEADLINES)
    workers = Meshes(config, Hosts(folder), folder).rewards(task, Events(print_texts))
    async with running(workers):
        yield workers, task.build(seed=0, model=model)


async def play(workers, task, key, mood=4):
    """Play an episode to its end; return the reward."""
    turn = await workers.open(key, task.prompt(mood), 0)
    assert turn.tokens
    while turn.end is None:
        turn = await workers.step(key, ANSWER)
    return turn.end.reward


async def test_episodes_of_a_worker_that_dies_are_lost_and_later_ones_are_not(tmp_path, model):
    async with playing(tmp_path, model, 1) as (workers, task):
        beside = await workers.open(1, task.prompt(4), 0)
        assert beside.end is None
        await workers.open(2, task.prompt(moody.DIES), 0)
        with pytest.raises(GroupLost, match="the worker of an environment of Moody died"):
            await workers.step(2, ANSWER)
        with pytest.raises(GroupLost) as lost:
            await workers.step(1, ANSWER)
        assert lost.value.reason == "environment worker died"
        assert not lost.value.in_call
        rewards = await asyncio.gather(*(play(workers, task, key) for key in range(20)))
        assert rewards == [1.0] * 20
        assert sum(workers._load.values()) == 0
        assert workers.restarts == 1


async def test_calls_that_hang_cost_their_episodes_and_many_of_them_a_new_worker(tmp_path, model):
    async with playing(tmp_path, model, 1, IMPATIENT) as (workers, task):

        async def hang(key):
            await workers.open(key, task.prompt(moody.HANGS), 0)
            with pytest.raises(GroupLost) as lost:
                await workers.step(key, ANSWER)
            return lost.value.reason

        reasons = await asyncio.gather(*map(hang, range(4)))
        assert reasons == ["environment hung"] * 4
        assert await play(workers, task, 10) == 1.0
        assert workers.restarts == 0
        reasons = await asyncio.gather(*map(hang, range(20, 40)))
        assert reasons == ["environment hung"] * 20
        while not workers.restarts:
            await asyncio.sleep(0.05)
        with contextlib.suppress(WorkerLost):  # the first call finds that the worker has ended
            await play(workers, task, 40)
        assert await play(workers, task, 41) == 1.0
        assert workers.restarts == 1


async def test_episodes_in_this_process_need_no_worker(tmp_path, model):
    async with playing(tmp_path, model, 0) as (workers, task):
        assert await play(workers, task, 1) == 1.0
        await workers.open(2, task.prompt(4), 0)
        await workers.close([2, 3])
        assert len(workers._here) == 0


async def test_stopped_workers_open_no_episode_until_they_start_again(tmp_path, model):
    async with playing(tmp_path, model, 1) as (workers, task):
        await workers.open(1, task.prompt(4), 0)
        await workers.stop()
        for call in (workers.open(2, task.prompt(4), 0), workers.step(1, ANSWER)):
            with pytest.raises(RunError, match="were stopped"):
                await call
        await workers.close([1])
        await workers.start()
        assert await play(workers, task, 3) == 1.0


async def test_a_worker_that_is_killed_or_stopped_costs_no_episode(tmp_path, model):
    def collect(service, task, engine):
        rollouter = Rollouter(environments=service, longest=900, seed=3, watch=Stopwatch())
        prompts = [task.prompt(prompt_id) for prompt_id in range(3)]
        sampling = Sampling(max_tokens=60)
        return rollouter, rollouter.collect(prompts, sampling, samples=2, generate=engine)

    config = GuessingGame.Config(max_turns=5, max_episode_tokens=900)
    async with playing(tmp_path, model, 1, config) as (workers, task):
        engine = Engine(habits=["plain"])
        _, undisturbed = collect(Environments(task), task, engine)
        other = Engine(habits=["plain"])
        blows = {1: signal.SIGKILL, 3: signal.SIGSTOP}
        rounds = itertools.count()

        async def generate(requests):
            if blow := blows.get(next(rounds)):
                os.kill(pids_of(workers)[0], blow)
            return await other(requests)

        rollouter, disturbed = collect(workers, task, generate)
        assert numbers(await disturbed) == numbers(await undisturbed)
        assert asked(other) == asked(engine)
        assert len(engine.rounds) == 5
        assert workers.restarts >= 2
        assert rollouter.recovered_episodes.keys() == {"replayed"}
        assert rollouter.recovered_episodes["replayed"] >= 12
        assert not rollouter.lost


async def test_wild_tools_cost_their_own_episodes_and_leave_no_process(tmp_path, model):
    config = wild.WildTools.Config(folder=str(tmp_path), max_episode_tokens=900)
    async with playing(tmp_path, model, 1, config) as (workers, task):

        async def outcome(number):
            try:
                return await play(workers, task, number, number)
            except GroupLost as lost:
                return lost.reason

        others = ("sleeps", "dies")
        kinds = [number for number, name in enumerate(wild.NAMES) if name not in others]
        outcomes = dict(zip(kinds, await asyncio.gather(*map(outcome, kinds)), strict=True))
        for number, outcome_of_kind in outcomes.items():
            tool = (*wild.ALL, None)[number]
            assert outcome_of_kind == wild.LOST.get(tool, REWARD), wild.NAMES[number]
        pids = forked(tmp_path)
        assert await outcome(wild.NAMES.index("dies")) == "environment worker died"
        await assert_ended(pids)
        assert await outcome(0) == REWARD
