"""The loop over meshes that compute nothing: evaluations, on the way and at the end."""

import asyncio
import json

import pytest

from rl.errors import ActorFailure, RunError
from tests.controller.loops import free


def deterministic(config):
    pass


BOTH = pytest.mark.parametrize("edit", [free, deterministic], ids=["asynchronous", "deterministic"])


def evaluation_calls(generators) -> list[tuple[list[str], bool]]:
    """Requests of each call to any generator that evaluates, and whether the prefix cache was reset before."""
    return [call for generator in generators for call in generator.calls if call[0][0].startswith("eval")]


@BOTH
def test_evaluation_asks_every_replica_for_no_more_than_an_engine_runs_at_once(run, edit):
    in_flight = []

    def prepare(trainer, *generators):
        async def generate(request):
            if request.startswith("eval"):
                in_flight.append(request)
                assert len(in_flight) <= len(generators)
                await asyncio.sleep(0.001)
                in_flight.remove(request)

        for generator in generators:
            generator.during = generate

    def evaluating(config):
        edit(config)
        config.evaluation.prompts, config.evaluation.samples, config.generator.max_running_requests = 20, 3, 6

    run(prepare, steps=1, replicas=2, edit=evaluating)
    calls = evaluation_calls(run.generators)
    asked = [request for requests, _ in calls for request in requests]
    assert sorted(asked) == sorted(
        [f"eval/greedy/{prompt}/0" for prompt in range(20)]
        + [f"eval/sampled/{prompt}/{sample}" for prompt in range(20) for sample in range(3)]
    )
    assert max(len(requests) for requests, _ in calls) == 6
    assert all(len(evaluation_calls([generator])) >= 4 for generator in run.generators)
    assert {fresh for _, fresh in calls} == {edit is deterministic}


def test_a_generator_lost_in_an_evaluation_changes_no_share_of_it(run):
    def edit(config):
        config.evaluation.prompts, config.evaluation.samples, config.generator.max_running_requests = 9, 0, 2

    run(steps=1, replicas=2, edit=edit)
    shares = {tuple(requests) for requests, _ in evaluation_calls(run.generators)}
    scores = {name: value for name, value in run.summary.items() if name.startswith("eval/")}

    def prepare(trainer, first, second):
        async def generate(request):
            if request.startswith("eval") and first.starts == 1:
                first.lose("generate")

        first.during = generate

    run(prepare, steps=1, replicas=2, edit=edit, folder="other")
    calls = evaluation_calls(run.generators)
    assert run.summary["restarts"] == 1
    assert {tuple(requests) for requests, _ in calls} == shares
    assert {fresh for _, fresh in calls} == {True}
    assert {name: value for name, value in run.summary.items() if name.startswith("eval/")} == scores


@BOTH
def test_time_after_the_last_step_is_no_stall(run, edit):
    """The watchdog looks every second."""

    def prepare(trainer, generator):
        async def generate(request):
            await asyncio.sleep(0.6 * request.startswith("eval"))

        generator.during = generate
        trainer.during["export_hf"] = lambda: asyncio.sleep(0.6)

    def evaluating(config):
        edit(config)
        config.evaluation.prompts, config.evaluation.samples, config.watchdog.stalled_s = 2, 0, 0.5

    run(prepare, steps=1, edit=evaluating)
    assert run.summary["eval/prompts"] == 2


@BOTH
def test_time_in_which_an_evaluation_on_the_way_goes_on_is_no_stall(run, edit):
    def prepare(trainer, generator):
        async def generate(request):
            await asyncio.sleep(1.2 * request.startswith("eval"))

        generator.during = generate

    def evaluating(config):
        edit(config)
        config.evaluation.prompts, config.evaluation.samples, config.evaluation.every = 2, 0, 1
        config.watchdog.stalled_s = 0.5

    run(prepare, steps=2, edit=evaluating)
    assert len(run.record.read_evaluations()) == 1


@BOTH
def test_an_evaluation_that_fails_after_the_last_step_costs_neither_export_nor_summary(run, edit):
    def prepare(trainer, generator):
        async def generate(request):
            if request.startswith("eval"):
                raise ActorFailure("generator-0: no", actor="generator-0", rank=0, call="generate", kind="raised")

        generator.during = generate

    def evaluating(config):
        edit(config)
        config.evaluation.prompts = 2

    with pytest.raises(RunError, match="generator-0: no"):
        run(prepare, steps=2, edit=evaluating)
    export = run.record.folder / "export"
    assert (export / "tokenizer.json").exists()
    assert "eos_token_id" in json.loads((export / "generation_config.json").read_text())
    summary = json.loads((run.record.folder / "summary.json").read_text())
    assert (summary["steps"], summary["export"]) == (2, str(export))
    assert not [name for name in summary if name.startswith("eval/")]
