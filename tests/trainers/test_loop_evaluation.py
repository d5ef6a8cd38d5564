"""Evaluations of the loop during training and at its end, over meshes that compute nothing."""

import asyncio
import json

import pytest

from rl.errors import ActorFailure, GroupLost, RunError
from tests.trainers.loops import free, whereabouts, without_times


def deterministic(config):
    pass


BOTH = pytest.mark.parametrize("edit", [free, deterministic], ids=["asynchronous", "deterministic"])


def evaluation_calls(generators) -> list[tuple[list[str], bool]]:
    """Requests of each call to any generator that evaluates, and whether the prefix cache was reset
    before.
    """
    return [
        call
        for generator in generators
        for call in generator.calls
        if call[0][0].startswith("eval")
    ]


def evaluating(edit, **fields):
    """``edit``, with an evaluation of three prompts after every second step."""

    def edited(config):
        edit(config)
        config.evaluation.prompts = 3
        config.evaluation.samples = 0
        config.evaluation.every = 2
        for name, value in fields.items():
            setattr(config.evaluation, name, value)

    return edited


def impatient(edit):
    """``edit``, with a watchdog that waits for half a second."""

    def edited(config):
        edit(config)
        config.watchdog.stalled_s = 0.5

    return edited


@pytest.fixture
def time_passes(monkeypatch):
    """A function that lets minutes pass, and the watchdog look at them the first time. The clock of
    a run moves by a microsecond with each look otherwise.
    """
    now = [0.0]

    def clock():
        now[0] += 1e-6
        return now[0]

    monkeypatch.setattr("rl.observe.spans.time.perf_counter", clock)

    async def passes(*_):
        is_first = now[0] < 1000.0
        now[0] += 1000.0
        if is_first:
            await asyncio.sleep(1.1)  # it looks every second

    return passes


def while_evaluating(generator, begun):
    """Have ``generator`` await ``begun(version)`` in the middle of each evaluation."""

    async def generate(request):
        if request.startswith("eval"):
            await begun(generator.version)

    generator.during = generate


@BOTH
def test_evaluation_sends_no_more_requests_than_engines_run_at_once(run, edit):
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
        config.evaluation.prompts = 20
        config.evaluation.samples = 3
        config.generator.max_running_requests = 6

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


def test_a_generator_lost_in_an_evaluation_changes_no_score(run):
    def edit(config):
        config.evaluation.prompts = 9
        config.evaluation.samples = 0
        config.generator.max_running_requests = 2

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
    assert {
        name: value for name, value in run.summary.items() if name.startswith("eval/")
    } == scores


@BOTH
def test_time_after_the_last_step_is_no_stall(run, edit, time_passes):
    def prepare(trainer, generator):
        while_evaluating(generator, time_passes)
        trainer.during["export_hf"] = time_passes

    run(prepare, steps=1, edit=evaluating(impatient(edit), every=0))
    assert run.summary["eval/prompts"] == 3


@BOTH
def test_an_evaluation_in_progress_is_no_stall(run, edit, time_passes):
    def prepare(trainer, generator):
        while_evaluating(generator, time_passes)

    run(prepare, steps=2, edit=evaluating(impatient(edit), every=1))
    assert len(run.record.read_evaluations()) == 1


@BOTH
def test_a_failed_last_evaluation_leaves_export_and_summary(run, edit):
    def prepare(trainer, generator):
        async def begun(version):
            raise ActorFailure(
                "generator-0: no", actor="generator-0", rank=0, call="generate", kind="raised"
            )

        while_evaluating(generator, begun)

    with pytest.raises(RunError, match="generator-0: no"):
        run(prepare, steps=2, edit=evaluating(edit, every=0))
    export = run.record.folder / "export"
    assert (export / "tokenizer.json").exists()
    assert "eos_token_id" in json.loads((export / "generation_config.json").read_text())
    summary = json.loads((run.record.folder / "summary.json").read_text())
    assert (summary["steps"], summary["export"]) == (2, str(export))
    assert not [name for name in summary if name.startswith("eval/")]


@pytest.mark.parametrize("every", [1, 2, 3])
def test_an_asynchronous_evaluation_names_its_weights_and_skipped_steps(run, every):
    """Each evaluation takes three steps at least."""

    def prepare(trainer, generator):
        async def begun(version):
            while generator.version < min(version + 3, 12):
                await asyncio.sleep(0.001)

        while_evaluating(generator, begun)

    run(prepare, steps=12, staleness=1, edit=evaluating(free, every=every))
    rows = run.record.read_evaluations()
    steps = [row["step"] for row in rows]
    assert [row["eval/version_min"] for row in rows] == steps
    assert all(row["eval/version_max"] >= min(row["step"] + 3, 12) for row in rows)
    made = len(rows) + sum(row["eval/skipped"] for row in rows) + run.summary.get("eval/skipped", 0)
    assert made == 11 // every
    assert [step // every for step in steps] == sorted({step // every for step in steps})
    assert (run.summary["eval/version_min"], run.summary["eval/version_max"]) == (12, 12)


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_a_deterministic_evaluation_is_of_the_weights_of_its_step(run, staleness):
    run(steps=7, staleness=staleness, edit=evaluating(deterministic, every=1))
    rows = run.record.read_evaluations()
    named = [
        [row["step"], row["eval/version_min"], row["eval/version_max"], row["eval/skipped"]]
        for row in rows
    ]
    assert named == [[step, step, step, 0] for step in range(1, 7)]


@BOTH
@pytest.mark.parametrize("staleness", [0, 1])
def test_evaluations_on_the_way_end_before_the_run_is_finished(run, edit, staleness):
    exported = []

    def prepare(trainer, generator):
        async def begun(version):
            await asyncio.sleep(0.05)
            exported.append("export" in run.log)

        while_evaluating(generator, begun)

    run(prepare, steps=4, staleness=staleness, edit=evaluating(edit, every=1))
    rows = run.record.read_evaluations()
    assert (
        len(rows) + sum(row["eval/skipped"] for row in rows) + run.summary.get("eval/skipped", 0)
        == 3
    )
    assert exported == [*[False] * len(rows), True]


@pytest.mark.parametrize(("staleness", "ahead"), [(0, 0), (1, 1), (2, 1), (2, 3)])
def test_leaving_postpones_an_evaluation_until_the_resume(run, staleness, ahead):
    """The trainer may be ``ahead`` of the weights that are evaluated; it cannot always be
    so far. The resumed run begins at their checkpoint.
    """
    _, whole = run(
        steps=6, staleness=staleness, edit=evaluating(deterministic, every=1), folder="whole"
    )
    trained = whereabouts(run.record)
    evaluated = run.record.read_evaluations()

    def prepare(trainer, generator):
        async def begun(version):
            if version == 2:
                for _ in range(50):
                    if trainer.version < 2 + ahead:
                        await asyncio.sleep(0.001)
                run.loop.leave()
                await asyncio.sleep(60)

        while_evaluating(generator, begun)

    run(prepare, steps=6, staleness=staleness, edit=evaluating(deterministic, every=1))
    assert run.summary is None
    assert max(run.saved) == 2 <= run.loop.step
    assert [row["step"] for row in run.record.read_evaluations()] == [1]

    _, rows = run(
        steps=6, staleness=staleness, edit=evaluating(deterministic, every=1), saved=run.saved
    )
    assert run.record.read_evaluations() == evaluated
    assert without_times(rows) == without_times(whole)
    assert whereabouts(run.record) == trained


def test_leaving_does_not_wait_for_an_asynchronous_evaluation(run):
    def prepare(trainer, generator):
        async def begun(version):
            run.loop.leave()
            await asyncio.sleep(60)

        while_evaluating(generator, begun)

    run(prepare, steps=9, edit=evaluating(free))
    assert run.summary is None
    assert run.record.read_evaluations() == []
    resumed = max(run.saved)
    run(steps=9, edit=evaluating(free), saved=run.saved)
    first = run.record.read_evaluations()[0]
    assert (first["step"], first["eval/version_min"]) == (resumed, resumed)


@BOTH
def test_leaving_in_the_last_evaluation_is_quick_and_resumable(run, edit):
    def prepare(trainer, generator):
        async def begun(version):
            if version == 3:
                run.loop.leave()
                await asyncio.sleep(60)

        while_evaluating(generator, begun)

    _, rows = run(prepare, steps=3, edit=evaluating(edit))
    assert run.summary is None
    assert max(run.saved) == 3
    log, resumed = run(steps=3, edit=evaluating(edit), saved=run.saved)
    assert (run.summary["steps"], run.summary["eval/version_max"]) == (3, 3)
    assert resumed == rows
    assert not [entry for entry in log if entry.startswith("train")]


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_no_checkpoint_is_newer_than_an_evaluation_under_way(run, staleness):
    edit = evaluating(deterministic, every=1)
    _, whole = run(steps=6, staleness=staleness, save_every=1, edit=edit, folder="whole")
    evaluated = run.record.read_evaluations()

    def prepare(trainer, generator):
        async def begun(version):
            if version == 2:
                while trainer.version < 3:
                    await asyncio.sleep(0.001)
                for _ in range(50):  # in which the trainer would save
                    await asyncio.sleep(0.001)
                raise ZeroDivisionError("killed")

        while_evaluating(generator, begun)

    with pytest.raises(ZeroDivisionError, match="killed"):
        run(prepare, steps=6, staleness=staleness, save_every=1, edit=edit)
    assert max(run.saved) == 2
    _, rows = run(steps=6, staleness=staleness, save_every=1, edit=edit, saved=run.saved)
    assert run.record.read_evaluations() == evaluated
    assert without_times(rows) == without_times(whole)


@pytest.mark.parametrize("staleness", [0, 1])
def test_lost_actors_do_not_change_a_repeated_evaluation(run, staleness):
    """The trainer is lost in an evaluation; a generator in the evaluation that is made again for
    it.
    """
    edit = evaluating(deterministic)
    run(steps=6, staleness=staleness, save_every=1, replicas=2, edit=edit, folder="whole")
    evaluated = run.record.read_evaluations()

    def prepare(trainer, first, second):
        async def begun(version):
            if version == 2 and trainer.starts == 1:
                while trainer.version < 3:
                    await asyncio.sleep(0.001)
                trainer.lose()
                await asyncio.sleep(60)
            elif version == 2 and first.starts == 1:
                first.lose("generate")

        while_evaluating(first, begun)

    run(prepare, steps=6, staleness=staleness, save_every=1, replicas=2, edit=edit)
    assert (run.trainer.starts, run.generators[0].starts) == (2, 2)
    assert run.record.read_evaluations() == evaluated


def test_prompts_with_a_failed_reward_are_counted(run):
    def prepare(trainer, generator):
        score = run.rewards.score

        async def score_or_lose(prompt, said):
            if len(said) == 1 and prompt.prompt_id in (1, 2):
                raise GroupLost("reward raised", "no reward today")
            return await score(prompt, said)

        run.rewards.score = score_or_lose

    run(prepare, steps=3, edit=evaluating(deterministic))
    assert [row["eval/lost"] for row in run.record.read_evaluations()] == [2]
    assert run.summary["eval/lost"] == 2
