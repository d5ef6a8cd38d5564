"""Evaluations of the loop at its start, in training and at its end, without real meshes."""

import asyncio
import json
from contextlib import nullcontext

import pytest

from rl.errors import ActorFailure, GroupLost, RunError
from rl.metrics import Value
from rl.tasks.copy_digits import CopyDigits
from rl.tasks.mixture import Mixture
from rl.types import Rollout
from tests.trainers.loops import EACH_PIPELINE, calls, evaluating, results, while_evaluating


def evaluation_calls(generators) -> list[tuple[list[str], bool]]:
    """Return requests of each evaluation call, and whether prefixes were forgotten before."""
    every = (call for generator in generators for call in generator.calls)
    return [call for call in every if call[0][0].startswith("eval")]


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


@EACH_PIPELINE
def test_evaluation_sends_no_more_requests_than_engines_run_at_once(run, pipeline):
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

    fields = evaluating(0, prompts=20, samples=3) | {"generator.max_running_requests": 6}
    run(prepare, steps=1, replicas=2, pipeline=pipeline, fields=fields)
    requests = evaluation_calls(run.generators)
    asked = [request for names, _ in requests for request in names]
    assert sorted(asked) == sorted(
        [f"eval/greedy/{prompt}/0" for prompt in range(20)]
        + [f"eval/sampled/{prompt}/{sample}" for prompt in range(20) for sample in range(3)]
    )
    assert max(len(names) for names, _ in requests) == 6
    assert all(len(evaluation_calls([generator])) >= 4 for generator in run.generators)
    assert {fresh for _, fresh in requests} == {pipeline == "deterministic"}


def test_a_generator_lost_in_an_evaluation_changes_no_score(run):
    fields = evaluating(0, prompts=9) | {"generator.max_running_requests": 2}

    def found():
        shares = {(*names, fresh) for names, fresh in evaluation_calls(run.generators)}
        return shares, {name: each for name, each in run.summary.items() if "eval/" in name}

    def prepare(trainer, first, second):
        async def generate(request):
            if request.startswith("eval") and first.starts == 1:
                first.lose("generate")

        first.during = generate

    run(steps=1, replicas=2, fields=fields)
    whole = found()
    run(prepare, steps=1, replicas=2, fields=fields, folder="other")
    assert run.summary["restarts"] == 1
    assert found() == whole


@EACH_PIPELINE
@pytest.mark.parametrize("on_the_way", [True, False])
def test_evaluation_and_export_are_no_stall(run, pipeline, time_passes, on_the_way):
    def prepare(trainer, generator):
        while_evaluating(time_passes)(trainer, generator)
        if not on_the_way:
            trainer.during["export_hf"] = time_passes

    fields = evaluating(every=int(on_the_way)) | {"watchdog.stalled_s": 0.5}
    run(prepare, steps=1 + on_the_way, pipeline=pipeline, fields=fields)
    assert len(run.record.read_evaluations()) == on_the_way
    assert run.summary["eval/prompts"] == 3


@EACH_PIPELINE
def test_a_failed_last_evaluation_leaves_export_and_summary(run, pipeline):
    async def begun(version):
        raise ActorFailure(
            "generator-0: no", actor="generator-0", rank=0, call="generate", kind="raised"
        )

    with pytest.raises(RunError, match="generator-0: no"):
        run(while_evaluating(begun), steps=2, pipeline=pipeline, fields=evaluating(every=0))
    export = run.record.folder / "export"
    assert (export / "tokenizer.json").exists()
    assert "eos_token_id" in json.loads((export / "generation_config.json").read_text())
    summary = json.loads((run.record.folder / "summary.json").read_text())
    assert (summary["steps"], summary["export"]) == (2, str(export))
    assert not [name for name in summary if name.startswith("eval/")]


@pytest.mark.parametrize("every", [1, 2, 3])
def test_an_asynchronous_evaluation_names_its_weights_and_skipped_steps(run, every):
    """Each evaluation takes three steps at least. Those on the way end before the run does."""
    exported = []

    async def begun(version):
        while run.generators[0].version < min(version + 3, 12):
            await asyncio.sleep(0.001)
        exported.append("export" in run.log)

    fields = evaluating(every=every)
    run(while_evaluating(begun), steps=12, staleness=1, pipeline="asynchronous", fields=fields)
    rows = run.record.read_evaluations()
    steps = [row["step"] for row in rows]
    assert [row["eval/version_min"] for row in rows] == steps
    assert all(row["eval/version_max"] >= min(row["step"] + 3, 12) for row in rows)
    skipped = sum(row["eval/skipped"] for row in rows) + run.summary.get("eval/skipped", 0)
    assert len(rows) + skipped == 11 // every
    assert [step // every for step in steps] == sorted({step // every for step in steps})
    assert (run.summary["eval/version_min"], run.summary["eval/version_max"]) == (12, 12)
    assert exported == [*[False] * len(rows), True]


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_a_deterministic_evaluation_is_of_the_weights_of_its_step(run, staleness):
    exported = []

    async def begun(version):
        await asyncio.sleep(0.01)
        exported.append("export" in run.log)

    run(while_evaluating(begun), steps=7, staleness=staleness, fields=evaluating(every=1))
    names = ("step", "eval/version_min", "eval/version_max", "eval/skipped")
    named = [tuple(row[name] for name in names) for row in run.record.read_evaluations()]
    assert named == [(step, step, step, 0) for step in range(1, 7)]
    assert exported == [*[False] * 6, True]


@EACH_PIPELINE
@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("every", [0, 2])
def test_the_initial_weights_are_evaluated_before_the_first_step(run, pipeline, staleness, every):
    fields = evaluating(every, at_start=True)
    run(steps=4, staleness=staleness, pipeline=pipeline, fields=fields)
    first, *others = run.record.read_evaluations()
    assert (first["step"], first["eval/version_min"], first["eval/version_max"]) == (0, 0, 0)
    assert first["eval/skipped"] == run.summary.get("eval/skipped", 0) == 0
    assert [row["step"] for row in others if row["step"] < 2] == []
    assert bool(others) == (every > 0)
    is_evaluation = [name.startswith("eval/") for name in asked_of_the_initial_weights(run)]
    assert is_evaluation == sorted(is_evaluation, reverse=True)
    assert is_evaluation[0]
    assert run.record.evaluated.path(0).exists()


def asked_of_the_initial_weights(run) -> list[str]:
    """Return the ids of the first requests of the calls that the initial weights answer."""
    by_version = zip(calls(run.log, "generate"), run.generators[0].calls, strict=True)
    return [requests[0] for entry, (requests, _) in by_version if entry == "generate 0"]


@EACH_PIPELINE
@pytest.mark.parametrize("disturbance", ["kill", "kill in the first step", "leave", "loss"])
def test_a_disturbed_run_evaluates_the_initial_weights_once(run, pipeline, disturbance):
    options = {"steps": 3, "pipeline": pipeline, "fields": evaluating(at_start=True)}

    def prepare(trainer, generator):
        async def kill():
            raise ZeroDivisionError("killed")

        async def begun(version):
            if disturbance == "kill" and version == 0:
                await kill()
            if disturbance == "loss" and trainer.starts == 1:
                trainer.lose()
                await asyncio.sleep(60)
            if disturbance == "leave":
                run.loop.leave()
                await asyncio.sleep(60)

        if disturbance == "kill in the first step":
            trainer.during["forward_backward"] = kill
        else:
            while_evaluating(begun)(trainer, generator)

    run(**options, folder="whole")
    evaluated, whole = run.record.read_evaluations(), results(run.record)
    is_written = disturbance == "kill in the first step"
    with pytest.raises(ZeroDivisionError) if "kill" in disturbance else nullcontext():
        run(prepare, **options)
    if disturbance != "loss":
        assert [row["step"] for row in run.record.read_evaluations()] == [0] * is_written
        run(**options, saved=run.saved)
        asked = asked_of_the_initial_weights(run)
        assert any(name.startswith("eval/") for name in asked) != is_written
    assert [row for row in run.record.read_evaluations() if row["step"] == 0] == evaluated[:1]
    if pipeline == "deterministic":
        assert results(run.record) == whole


@pytest.mark.parametrize(
    ("staleness", "ahead", "ends"),
    [
        *((0, 0, "left"), (1, 1, "left"), (2, 1, "left"), (2, 3, "left")),
        *((0, 1, "killed"), (1, 1, "killed"), (2, 1, "killed")),
    ],
)
def test_a_run_that_ends_in_an_evaluation_repeats_it_from_the_same_weights(
    run, staleness, ahead, ends
):
    """The trainer may be ``ahead`` of the weights that are evaluated; it cannot always be so far.
    The resumed run begins at their checkpoint.
    """
    options = {"steps": 6, "staleness": staleness, "fields": evaluating(every=1)}
    options["save_every"] = int(ends == "killed")
    run(**options, folder="whole")
    whole = results(run.record)

    async def begun(version):
        if version == 2:
            while ends == "killed" and run.trainer.version < 2 + ahead:
                await asyncio.sleep(0.001)
            for _ in range(50):  # in which a trainer that is killed would save
                if ends == "killed" or run.trainer.version < 2 + ahead:
                    await asyncio.sleep(0.001)
            if ends == "killed":
                raise ZeroDivisionError("killed")
            run.loop.leave()
            await asyncio.sleep(60)

    with pytest.raises(ZeroDivisionError, match="killed") if ends == "killed" else nullcontext():
        run(while_evaluating(begun), **options)
    assert [row["step"] for row in run.record.read_evaluations()] == [1]
    assert max(run.saved) == 2 <= run.loop.step
    run(**options, saved=run.saved)
    assert results(run.record) == whole


def test_leaving_does_not_wait_for_an_asynchronous_evaluation(run):
    async def begun(version):
        run.loop.leave()
        await asyncio.sleep(60)

    options = {"steps": 9, "pipeline": "asynchronous", "fields": evaluating()}
    run(while_evaluating(begun), **options)
    assert run.summary is None
    assert run.record.read_evaluations() == []
    resumed = max(run.saved)
    run(**options, saved=run.saved)
    first = run.record.read_evaluations()[0]
    assert (first["step"], first["eval/version_min"]) == (resumed, resumed)


@EACH_PIPELINE
def test_leaving_in_the_last_evaluation_is_quick_and_resumable(run, pipeline):
    async def begun(version):
        if version == 3:
            run.loop.leave()
            await asyncio.sleep(60)

    options = {"steps": 3, "pipeline": pipeline, "fields": evaluating()}
    _, rows = run(while_evaluating(begun), **options)
    assert run.summary is None
    assert max(run.saved) == 3
    log, resumed = run(**options, saved=run.saved)
    assert (run.summary["steps"], run.summary["eval/version_max"]) == (3, 3)
    assert resumed == rows
    assert calls(log, "train") == []


@pytest.mark.parametrize("staleness", [0, 1])
def test_lost_actors_do_not_change_a_repeated_evaluation(run, staleness):
    """The trainer is lost in an evaluation; a generator while the evaluation is repeated."""
    options = {"steps": 6, "staleness": staleness, "save_every": 1, "replicas": 2}
    run(**options, fields=evaluating(), folder="whole")
    evaluated = run.record.read_evaluations()

    async def begun(version):
        if version == 2 and run.trainer.starts == 1:
            while run.trainer.version < 3:
                await asyncio.sleep(0.001)
            run.trainer.lose()
            await asyncio.sleep(60)
        elif version == 2 and run.generators[0].starts == 1:
            run.generators[0].lose("generate")

    run(while_evaluating(begun), **options, fields=evaluating())
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

    run(prepare, steps=3, fields=evaluating())
    assert [row["eval/lost"] for row in run.record.read_evaluations()] == [2]
    assert run.summary["eval/lost"] == 2


def test_each_task_of_a_mixture_has_scores_of_its_own(run):
    """Greedy completions of every second prompt are right, and one sample of each is."""
    tasks = {"one": CopyDigits.Config(digits=1), "two": CopyDigits.Config(digits=2)}
    weights = {"weights": {"one": 1.0}, "held_out_weights": {"two": 3.0, "one": 1.0}}
    task = Mixture.Config(tasks=tasks, **weights, max_prompt_tokens=16)

    def prepare(trainer, generator):
        async def score(prompt, said):
            right = [sample == 2 or (prompt.prompt_id + sample) % 2 == 0 for sample in range(4)]
            if prompt.task == "one" and len(said) == 4:
                raise GroupLost("reward raised", "no reward today")
            weight = 1.0 + prompt.prompt_id
            return [
                Rollout.single_turn(
                    prompt,
                    each,
                    sample=sample,
                    reward=2.0 * right[sample],
                    text="",
                    metrics={
                        "correct": float(right[sample]),
                        "id": Value.of(weight, "mean", weight),
                    },
                )
                for sample, each in enumerate(said)
            ]

        run.rewards.score = score

    run(prepare, steps=1, fields=evaluating(prompts=4, samples=4, every=0) | {"task": task})
    scores = {name: value for name, value in run.summary.items() if name.startswith("eval/")}
    ids = {name: scores.pop(f"eval/{name}reward/id") for name in ("", "one/", "two/")}
    assert ids == {"": 3.0, "one/": 2.0, "two/": (1 + 9 + 16) / (1 + 3 + 4)}
    assert scores == {
        **{"eval/prompts": 4, "eval/exact_match": 0.5, "eval/reward_mean": 1.0, "eval/lost": 1},
        **{"eval/pass@4": 0.75, "eval/mean@4": 7 / 16},
        **{"eval/one/prompts": 1, "eval/one/exact_match": 0.0, "eval/one/reward_mean": 0.0},
        **{"eval/one/pass@4": 0.0, "eval/one/mean@4": 0.0},
        **{"eval/two/prompts": 3, "eval/two/exact_match": 2 / 3, "eval/two/reward_mean": 4 / 3},
        **{"eval/two/pass@4": 1.0, "eval/two/mean@4": 7 / 12},
        **{"eval/version_min": 1, "eval/version_max": 1},
    }
