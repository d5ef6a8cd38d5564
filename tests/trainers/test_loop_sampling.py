"""Batches of the loop and the time at which their groups are requested, without meshes."""

import asyncio
import random
from dataclasses import dataclass

import pytest

from rl.errors import GroupLost, RankLost, RunError
from rl.rollout.rollouter import Rollouter
from rl.tasks.copy_digits import CopyDigits
from tests.trainers.loops import (
    EACH_PIPELINE,
    calls,
    dropped,
    during,
    ledger_of,
    trained,
    without_times,
)


def test_the_share_of_each_replica_does_not_depend_on_timing(run):
    def prepare(trainer, first, second):
        second.pull_takes = 0.01

    run(prepare, steps=3, replicas=2)
    asked = [[request.split("/")[1] for request in each.asked[::2]] for each in run.generators]
    assert sorted(asked) == [["0", "2", "4"], ["1", "3", "5"]]


def test_groups_of_equal_rewards_are_replaced_up_to_a_limit(run):
    _, rows = run(
        having={"rewards.flat": range(1, 100)}, steps=2, fields={"rollout.max_resampled_groups": 3}
    )
    ledger = ledger_of(run.record)
    assert [row["trained_now"] for row in ledger] == [[0, 4], [8, 9]]
    assert [row["dropped_now"] for row in ledger] == [
        {"rewards all equal": [1, 2, 3]},
        {"rewards all equal": [5, 6, 7]},
    ]
    assert [row["ledger/dropped"] for row in rows] == [3, 6]


def test_oversampling_fills_a_batch_in_fewer_rounds(run):
    fields = {"rollout.max_resampled_groups": 3, "rollout.oversampling": 2}
    run(having={"rewards.flat": [0, 1, 2]}, steps=2, fields=fields)
    ledger = ledger_of(run.record)
    assert [row["trained_now"] for row in ledger] == [[3, 4], [6, 7]]
    assert [row["dropped_now"] for row in ledger] == [
        {"rewards all equal": [0, 1, 2], "batch complete": [5]},
        {"batch complete": [8, 9]},
    ]


def test_the_limit_of_resampling_holds_across_steps(run):
    def prepare(trainer, generator):
        run.rewards.flat = range(100)
        generator.during = lambda request: asyncio.sleep(0.01)
        trainer.during["forward_backward"] = lambda: asyncio.sleep(0.015)

    run(prepare, steps=6, staleness=2, fields={"rollout.max_resampled_groups": 1})
    prompts = [row["trained_now"] for row in ledger_of(run.record)]
    assert prompts == [[3 * k + 1, 3 * k + 2] for k in range(6)]


@EACH_PIPELINE
def test_lost_groups_make_room_until_they_are_too_many(run, pipeline):
    def losing(*prompts):
        return lambda *_: setattr(run.rewards, "lost", range(*prompts))

    run(losing(3, 30, 3), staleness=1, pipeline=pipeline)
    assert run.loop.ledger.counts()["trained"] == 8
    assert run.loop.ledger.dropped == {"reward raised": 3}
    assert run.summary["dropped"] == run.summary["lost"] == {"reward raised": 3}
    said = r"11 of the last \d+ groups were lost, .*max_lost=0.1.*no reward for 32"
    with pytest.raises(RunError, match=said) as info:
        run(losing(2, 100, 3), steps=20, staleness=1, pipeline=pipeline)
    assert isinstance(info.value.__cause__, GroupLost)


@pytest.mark.parametrize("staleness", [0, 2])
def test_lost_groups_are_counted_across_a_resume(run, staleness):
    having = {"rewards.lost": range(2, 100, 3)}

    with pytest.raises(RunError, match="11 of the last 33 groups were lost") as uninterrupted:
        run(having=having, steps=20, staleness=staleness, save_every=1)
    with pytest.raises(RunError) as resumed:
        run(having=having, steps=20, staleness=staleness, saved={5: run.saved[5]})
    assert str(resumed.value) == str(uninterrupted.value)


class Ending(CopyDigits):
    """Has five prompts."""

    @dataclass(kw_only=True, slots=True)
    class Config(CopyDigits.Config):
        pass

    def prompt(self, prompt_id):
        return super().prompt(prompt_id) if prompt_id < 5 else None


@EACH_PIPELINE
def test_a_prompt_that_cannot_be_used_ends_the_run_by_name(run, pipeline):
    with pytest.raises(RunError, match=r"task: Ending.prompt\(5\) is None; expected a Prompt"):
        run(pipeline=pipeline, fields={"task": Ending.Config()})


@pytest.mark.parametrize(("staleness", "parts"), [(0, 2), (1, 1), (2, 2)])
def test_an_asynchronous_run_trains_every_prompt_once_within_the_bound(run, staleness, parts):
    def prepare(trainer, *generators):
        for generator in generators:
            generator.during = lambda request: asyncio.sleep(random.random() / 100)

    _, rows = run(
        prepare,
        steps=12,
        staleness=staleness,
        replicas=2,
        pipeline="asynchronous",
        fields={"rollout.stream_chunks": parts},
    )
    assert max(row["rollout/staleness_max"] for row in rows) <= staleness
    assert trained(run.record) == [*range(24)]
    assert all(len(row["trained_now"]) == 2 for row in ledger_of(run.record))
    assert len(calls(run.log, "train")) == 12 * parts
    assert all(len(generator.asked) > 8 for generator in run.generators)


def test_training_begins_while_the_rest_of_the_batch_is_generated(run):
    begun = asyncio.Event()

    async def train():
        begun.set()

    async def generate(request):
        if request.startswith("train/1/"):
            await begun.wait()

    hooks = during(forward_backward=train, generate=generate)
    chunks = {"rollout.stream_chunks": 2}
    log, _ = run(hooks, steps=1, pipeline="asynchronous", fields=chunks)
    wanted = ["generate 0", "generate 0", "train 0 on 0", "train 0 on 0", "step"]
    assert calls(log, "generate", "train", "step") == wanted


def test_a_long_rollout_delays_no_step_within_its_bound(run):
    """Prompt 0 goes on until two steps are done, and is trained on at the last moment."""

    async def generate(request):
        if request.startswith("train/0/"):
            while run.trainer.version < 2:
                await asyncio.sleep(0.001)

    run(during(generate=generate), staleness=2, pipeline="asynchronous")
    ledger = ledger_of(run.record)
    assert [row["trained_now"][0] for row in ledger].index(0) == 2
    assert ledger[2]["staleness"]["2"] > 0


def test_a_batch_is_dropped_when_the_run_goes_back(run):
    """A reward worker is lost for good while a share of the batch is still generated."""
    scored = []

    def prepare(trainer, first, second):
        back = asyncio.Event()
        score = run.rewards.score

        async def score_once_back(prompt, said):
            scored.append(prompt.prompt_id)
            if prompt.prompt_id == 0 and not back.is_set():
                back.set()
                raise RankLost(
                    "reward-0: gone", actor="reward-0", rank=0, call="start", kind="died"
                )
            return await score(prompt, said)

        async def generate(request):
            if request.startswith("train/1/"):
                await back.wait()
                await asyncio.sleep(0.05)

        run.rewards.score = score_once_back
        first.during = generate
        second.during = generate

    run(prepare, steps=2, replicas=2)
    assert sorted(scored) == [0, 0, 1, 2, 3]


def test_a_group_may_go_on_with_the_episodes_that_the_config_asks_for(run, monkeypatch):
    asked = []
    collect = Rollouter.collect

    async def noted(self, *arguments, fewest=0, **options):
        asked.append(fewest)
        return await collect(self, *arguments, **options)

    monkeypatch.setattr(Rollouter, "collect", noted)
    monkeypatch.setattr("rl.trainers.trainer.validate", lambda config: None)  # no environment
    run(steps=2, fields={"rollout.min_episodes": 3})
    assert asked == [3, 3]


def test_groups_with_fewer_rollouts_are_in_the_ledger_and_count_by_their_share(run):
    having = {"rewards.fewer": range(1, 100, 2)}

    run(having=having, steps=3, fields={"rollout.samples_per_prompt": 4})
    assert [row["episodes_lost_now"] for row in ledger_of(run.record)] == [1, 1, 1]
    assert [len(batch) for batch in run.trainer.batches] == [7, 7, 7]
    with pytest.raises(RunError, match=r"10.25 of the last 82 groups were lost, .*3 of its epis"):
        run(having=having, steps=50, fields={"rollout.samples_per_prompt": 4})


@EACH_PIPELINE
def test_rollouts_without_a_reward_leave_their_group_and_are_counted(run, pipeline):
    """All of prompt 1 and all but one of prompt 4 have none: these groups are dropped."""

    fields = {"rollout.samples_per_prompt": 4, "rollout.max_lost": 0.5}
    _, rows = run(
        having={"rewards.silent": {(0, 2), *((1, i) for i in range(4)), (4, 0), (4, 1), (4, 3)}},
        steps=2,
        pipeline=pipeline,
        fields=fields,
    )
    ledger = ledger_of(run.record)
    assert trained(run.record) == [0, 2, 3, 5]
    assert dropped(run.record) == [("rewards abstained", 1), ("rewards abstained", 4)]
    assert sum(row["rollout/abstained"] for row in rows) == 1
    assert [row["episodes_lost_now"] for row in ledger] == [0, 0]
    assert [row["reward/mean"] for row in rows] == [(0 + 1 + 3 + 0 + 1 + 2 + 3) / 7, 1.5]
    assert sum(map(len, run.trainer.batches)) == 15


def test_too_many_groups_without_rewards_end_the_run(run):
    with pytest.raises(RunError, match="groups were lost, .*2 of 2 rewards are None"):
        run(having={"rewards.silent": {(prompt, i) for prompt in range(200) for i in range(2)}})


def test_waiting_rollouts_without_a_reward_survive_a_resume(run):
    having = {"rewards.silent": {(prompt, 1) for prompt in range(3, 6)}}

    options = {"staleness": 1, "fields": {"rollout.samples_per_prompt": 4}}
    _, whole = run(having=having, save_every=1, **options)
    _, resumed = run(having=having, saved={2: run.saved[2]}, folder="run", save_every=1, **options)
    assert sum(row["rollout/abstained"] for row in whole) == 3
    assert without_times(resumed) == without_times(whole)
