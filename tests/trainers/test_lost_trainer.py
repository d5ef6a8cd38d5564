"""A run goes on from its newest checkpoint after its trainer was lost."""

import asyncio

import pytest

from rl.errors import ActorFailure, RunError
from rl.observe.checkpoint_folders import ROLLOUTS
from tests.trainers.loops import (
    EACH_PIPELINE,
    calls,
    dropped,
    during,
    ledger_of,
    lost_once,
    results,
    trained,
)


@EACH_PIPELINE
@pytest.mark.parametrize("staleness", [0, 2])
@pytest.mark.parametrize("call", ["push_weights", "forward_backward"])
def test_a_lost_trainer_returns_the_run_to_the_newest_checkpoint(run, pipeline, staleness, call):
    """Some groups are replaced on the way."""
    options = {"steps": 8, "staleness": staleness, "save_every": 3, "pipeline": pipeline}
    options["fields"] = {"rollout.max_resampled_groups": 2}

    def flat(*_):
        run.rewards.flat = (1, 4, 5, 13)

    run(flat, **options)
    whole, ledger = results(run.record), ledger_of(run.record)

    def prepare(trainer, *_):
        flat()
        lost_once(5, call)(trainer)
        start = trainer.start

        async def start_while_nothing_is_lost_by_leaving():
            assert not run.loop.run.is_training
            await start()

        trainer.start = start_while_nothing_is_lost_by_leaving

    _, rows = run(prepare, **options, folder="other")
    assert (run.trainer.starts, run.generators[0].starts) == (2, 1)
    assert rows[-1]["restarts/trainer"] == 1
    assert [row["step"] for row in rows] == [*range(1, 9)]
    counted = [*trained(run.record), *(prompt_id for _, prompt_id in dropped(run.record))]
    assert len(trained(run.record)) == 16
    assert len({*counted}) == len(counted)
    if pipeline == "deterministic":
        assert results(run.record) == whole
        assert ledger_of(run.record)[-1] == ledger[-1]
        if not staleness:  # above 0, how far sampling is when a step ends depends on the clock
            assert ledger_of(run.record) == ledger


@EACH_PIPELINE
@pytest.mark.parametrize("staleness", [0, 2])
def test_an_unfinished_checkpoint_is_ignored(run, pipeline, staleness):
    """The groups of step 4 are on disk, the weights are not: both are written again."""
    options = {"steps": 6, "staleness": staleness, "save_every": 2, "pipeline": pipeline}
    run(**options)
    whole = results(run.record)

    async def die():
        if run.trainer.version == 4 and run.trainer.starts == 1:
            assert run.loop.run.checkpoints.incomplete() == [4]
            raise run.trainer.lose("save_checkpoint")

    log, _ = run(during(save_checkpoint=die), **options, folder="other")
    assert run.trainer.starts == 2
    assert calls(log, "save") == ["save 2", "save 4", "save 4", "save 6"]
    assert run.loop.run.checkpoints.complete() == [2, 4, 6]
    assert trained(run.record) == [*range(12)]
    if pipeline == "deterministic":
        assert results(run.record) == whole


def test_a_checkpoint_without_its_groups_is_refused_with_a_remedy(run):
    run(steps=2, staleness=1, save_every=1)
    (run.loop.run.checkpoints.path(2) / ROLLOUTS).unlink()
    said = r"step-2/rollouts.parquet cannot be read: FileNotFound.*; deleting .*/step-2 goes"
    with pytest.raises(RunError, match=said):
        run(steps=4, staleness=1, saved=run.saved)


@EACH_PIPELINE
def test_a_pull_from_a_dead_trainer_is_no_failure_of_the_generator(run, pipeline):
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

    _, rows = run(prepare, steps=8, staleness=1, save_every=3, pipeline=pipeline)
    assert (run.trainer.starts, run.generators[0].starts) == (2, 1)
    assert [row["step"] for row in rows] == [*range(1, 9)]


def test_a_trainer_that_is_lost_repeatedly_ends_the_run(run):
    async def die():
        if run.trainer.version == 2:
            raise run.trainer.lose("forward_backward")

    with pytest.raises(ActorFailure, match="trainer rank 0, forward_backward: the process died"):
        run(during(forward_backward=die), save_every=1)
    assert run.trainer.starts == 4
