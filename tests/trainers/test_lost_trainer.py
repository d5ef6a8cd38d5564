"""A run goes on from its newest checkpoint after its trainer was lost."""

import asyncio

import pytest

from rl.errors import ActorFailure, RunError
from rl.step_folders import ROLLOUTS
from tests.trainers.loops import calls, free, ledger_of, without_times


@pytest.mark.parametrize("edit", [free, lambda config: None], ids=["asynchronous", "deterministic"])
@pytest.mark.parametrize(
    ("staleness", "call"), [(0, "push_weights"), (2, "forward_backward"), (2, "push_weights")]
)
def test_a_lost_trainer_returns_the_run_to_the_newest_checkpoint(run, edit, staleness, call):
    _, whole = run(steps=8, staleness=staleness, save_every=3, edit=edit)

    def prepare(trainer, *generators):
        start = trainer.start

        async def die():
            if trainer.version == 5 and trainer.starts == 1:
                raise trainer.lose(call)

        async def start_while_nothing_is_lost_by_leaving():
            assert not run.loop.run.is_training
            await start()

        trainer.during[call] = die
        trainer.start = start_while_nothing_is_lost_by_leaving

    _, rows = run(prepare, steps=8, staleness=staleness, save_every=3, edit=edit, folder="other")
    assert run.trainer.starts == 2
    assert run.generators[0].starts == 1
    assert rows[-1]["restarts/trainer"] == 1
    assert [row["step"] for row in rows] == [*range(1, 9)]
    ledger = ledger_of(run.record)
    assert sorted(prompt_id for row in ledger for prompt_id in row["trained_now"]) == [*range(16)]
    if edit is not free:
        assert without_times(rows) == without_times(whole)


@pytest.mark.parametrize("staleness", [0, 2])
def test_a_trainers_death_leaves_no_trace_in_a_deterministic_ledger(run, staleness):
    def edit(config):
        config.rollout.max_resampled_groups = 2

    def flat(*_):
        run.rewards.flat = (1, 4, 5, 13)

    def die_once(trainer, *_):
        async def die():
            if trainer.version == 5 and trainer.starts == 1:
                raise trainer.lose("forward_backward")

        flat()
        trainer.during["forward_backward"] = die

    run(flat, steps=8, staleness=staleness, save_every=3, edit=edit)
    uninterrupted = ledger_of(run.record)
    run(die_once, steps=8, staleness=staleness, save_every=3, edit=edit, folder="other")
    rows = ledger_of(run.record)
    assert run.trainer.starts == 2
    assert rows[-1] == uninterrupted[-1]
    if not staleness:  # above 0, how far sampling is when a step ends depends on the clock
        assert rows == uninterrupted


@pytest.mark.parametrize("staleness", [0, 2])
@pytest.mark.parametrize("edit", [free, lambda config: None], ids=["asynchronous", "deterministic"])
def test_an_unfinished_checkpoint_is_ignored(run, edit, staleness):
    """The groups of step 4 are on disk, the weights are not: both are written again."""
    _, whole = run(steps=6, staleness=staleness, save_every=2, edit=edit)

    def prepare(trainer, *_):
        async def die():
            if trainer.version == 4 and trainer.starts == 1:
                assert run.loop.run.checkpoints.incomplete() == [4]
                raise trainer.lose("save_checkpoint")

        trainer.during["save_checkpoint"] = die

    log, rows = run(prepare, steps=6, staleness=staleness, save_every=2, edit=edit, folder="other")
    assert run.trainer.starts == 2
    assert calls(log, "save") == ["save 2", "save 4", "save 4", "save 6"]
    assert run.loop.run.checkpoints.complete() == [2, 4, 6]
    assert sorted(
        prompt_id for row in ledger_of(run.record) for prompt_id in row["trained_now"]
    ) == [*range(12)]
    if edit is not free:
        assert without_times(rows) == without_times(whole)


def test_a_checkpoint_without_its_groups_is_refused_with_a_remedy(run):
    run(steps=2, staleness=1, save_every=1)
    (run.loop.run.checkpoints.path(2) / ROLLOUTS).unlink()
    with pytest.raises(
        RunError,
        match=r"step-2/rollouts.parquet cannot be read: FileNotFound.*; deleting .*/step-2 goes",
    ):
        run(steps=4, staleness=1, saved=run.saved)


@pytest.mark.parametrize("edit", [free, lambda config: None], ids=["asynchronous", "deterministic"])
def test_a_pull_from_a_dead_trainer_is_no_failure_of_the_generator(run, edit):
    """The connection is lost before the death of the trainer is known, as over a network."""

    def prepare(trainer, generator):
        async def lose_connection():
            if trainer.version == 5 and trainer.starts == 1:
                trainer.is_dead = True
                asyncio.get_running_loop().call_later(0.1, trainer.lose)
                raise ActorFailure(
                    "generator-0: reset", actor="generator-0", rank=0, call="fetch", kind="raised"
                )

        generator.pulling = lose_connection

    _, rows = run(prepare, steps=8, staleness=1, save_every=3, edit=edit)
    assert (run.trainer.starts, run.generators[0].starts) == (2, 1)
    assert [row["step"] for row in rows] == [*range(1, 9)]


def test_a_trainer_that_is_lost_repeatedly_ends_the_run(run):
    def prepare(trainer, generator):
        async def die():
            if trainer.version == 2:
                raise trainer.lose("forward_backward")

        trainer.during["forward_backward"] = die

    with pytest.raises(ActorFailure, match="trainer rank 0, forward_backward: the process died"):
        run(prepare, save_every=1)
    assert run.trainer.starts == 4
