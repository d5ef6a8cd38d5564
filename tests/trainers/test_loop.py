"""Order of calls of the loop, over meshes that compute nothing."""

import asyncio
import gc

import pytest

from rl.errors import RunError
from rl.model.shards import Box
from rl.observe.checkpoint_folders import ROLLOUTS
from rl.observe.rollout_files import read_groups
from tests.trainers.loops import calls, during, evaluating, ledger_of, results

CANARY = {"weights.digests": False}
NO_CHECKS = CANARY | {"weights.canary_tolerance": 0.0}
ONE_STALE = ["train 0 on 0", "train 1 on 0", "train 2 on 1", "train 3 on 2"]


def test_in_lockstep_each_step_trains_on_what_its_own_weights_sampled(run):
    log, rows = run(steps=3)
    assert calls(log, "pull", "generate", "train", "step") == [
        *("pull 0", "generate 0", "train 0 on 0", "step"),
        *("pull 1", "generate 1", "train 1 on 1", "step"),
        *("pull 2", "generate 2", "train 2 on 2", "step"),
        "pull 3",
    ]
    assert [row["timing/hidden"] for row in rows] == [0, 0, 0]


def test_one_step_stale_a_generator_pulls_between_its_batches(run):
    log, rows = run(staleness=1)
    assert calls(log, "pull", "generate") == [
        *("pull 0", "generate 0", "generate 0", "pull 1", "generate 1"),
        *("pull 2", "generate 2", "pull 3", "pull 4"),
    ]
    canaries = [row["push/canary"] for row in rows]
    assert canaries == pytest.approx([0, 1e-5, 2e-5, 3e-5], abs=1e-6)  # its own version's
    assert all((row["push/bytes"], row["timing/push_pause"]) == (100, 0.25) for row in rows)


@pytest.mark.parametrize("staleness", [0, 1, 2, 3])
def test_a_batch_comes_from_the_weights_of_as_many_steps_before_it_as_the_staleness_says(
    run, staleness
):
    log, rows = run(steps=7, staleness=staleness)
    assert calls(log, "train") == [f"train {k} on {max(0, k - staleness)}" for k in range(7)]
    assert calls(log, "generate") == [f"generate {max(0, k - staleness)}" for k in range(7)]
    for rule in ("mean", "max"):
        ages = [row[f"rollout/staleness_{rule}"] for row in rows]
        assert ages == [min(k, staleness) for k in range(7)]
    assert run.generators[0].asked == [
        f"train/{prompt_id}/{sample}" for prompt_id in range(14) for sample in range(2)
    ]


def test_a_generator_without_a_share_of_the_prompts_is_not_asked(run):
    run(steps=2, replicas=3)  # two prompts a step, two samples each
    sizes = [len(names) for generator in run.generators for names, _ in generator.calls]
    assert sizes == [2] * 4


def test_the_trainer_computes_its_side_of_the_checks_once_for_all_generators(run):
    digested = []

    def prepare(trainer, *generators):
        digests_of = trainer.weight_digests

        async def weight_digests(dtype=None, source=None):
            digested.append(trainer.version)
            return await digests_of(dtype)

        trainer.weight_digests = weight_digests

    log, _ = run(prepare, steps=2, replicas=3, fields={"weights.digests": True})
    assert calls(log, "canary") == ["canary 0"] * 3 + ["canary 1"] * 3 + ["canary 2"] * 3
    assert calls(log, "forward") == ["forward 0", "forward 1", "forward 2"]
    assert digested == [0, 1, 2, 2]  # the last one is for the summary


@pytest.mark.parametrize("checks", [NO_CHECKS, CANARY], ids=["no checks", "canary"])
def test_one_step_stale_a_pull_slower_than_the_step_changes_no_order(run, checks):
    """The next version is published before the generator holds this one."""

    log, rows = run(having={"generator.pull_takes": 0.02}, staleness=1, fields=checks)
    assert calls(log, "train") == ONE_STALE
    assert [row["rollout/staleness_max"] for row in rows] == [0, 1, 1, 1]


@pytest.mark.parametrize("checks", [CANARY, {}, NO_CHECKS], ids=["canary", "all", "none"])
def test_one_step_stale_generating_training_and_publishing_are_behind_each_other(run, checks):
    """Each of the three starts before any of them ends."""

    training = asyncio.Event()
    generating = asyncio.Event()
    publishing = asyncio.Event()

    async def train():
        if run.trainer.version in (1, 2):
            training.set()
            await publishing.wait()
            await generating.wait()
            for event in (training, generating, publishing):
                event.clear()

    async def generate(request):
        if run.generators[0].version in (1, 2):
            generating.set()
            await training.wait()

    async def publish():
        if run.trainer.version in (1, 2):
            publishing.set()
            await training.wait()

    hooks = during(push_weights=publish, forward_backward=train, generate=generate)
    _, rows = run(hooks, staleness=1, fields=checks)
    assert [row["rollout/staleness_max"] for row in rows] == [0, 1, 1, 1]
    assert all(row["timing/hidden"] > 0 for row in rows[1:3])


def test_an_optimizer_step_waits_for_the_push_and_what_was_waited_for_is_not_hidden(
    run, monkeypatch
):
    """Training takes one second, and two of the pushes go on for another five."""
    now = [0.0]
    monkeypatch.setattr("rl.observe.spans.time.perf_counter", lambda: now[0])

    published = set()
    trained = set()

    async def train():
        while run.trainer.version not in published:
            await asyncio.sleep(0)
        now[0] += 1.0
        trained.add(run.trainer.version)

    async def publish():
        published.add(run.trainer.version)
        if run.trainer.version in (1, 2):
            while run.trainer.version not in trained:
                await asyncio.sleep(0)
            for _ in range(20):  # until the loop waits
                await asyncio.sleep(0)
            now[0] += 5.0

    hooks = during(push_weights=publish, forward_backward=train)
    _, rows = run(hooks, staleness=1, fields={"weights.canary_tolerance": 0.0})
    assert [row["timing/push_wait"] for row in rows] == [0, 5, 5, 0]
    assert [row["timing/hidden"] for row in rows[1:3]] == [1, 1]
    assert [row["timing/step"] for row in rows] == [1, 6, 6, 1]


@pytest.mark.parametrize(
    ("staleness", "steps", "wrong"),
    [(0, 4, 2), (1, 4, 2), pytest.param(0, 3, 3, id="last weights")],
)
def test_a_check_that_fails_ends_the_run_before_the_weights_change_again(
    run, staleness, steps, wrong
):
    said = f"canary of policy version {wrong}: a log-prob of generator-0 differs by 1 .* all param"
    with pytest.raises(RunError, match=said):
        run(having={"trainer.wrong_since": wrong}, steps=steps, staleness=staleness)
    assert len(calls(run.log, "step")) == run.loop.step == wrong
    gc.collect()
    assert not run.unheard


def test_a_bf16_generator_left_one_version_behind_is_found_by_default(run):
    def prepare(trainer, generator):
        async def digests_of_the_version_before():
            return [{("w", Box.whole((4,))): max(0, generator.version - 1)}]

        generator.weight_digests = digests_of_the_version_before

    said = "push of policy version 1: 1 of 1 parameters of generator-0 differ"
    with pytest.raises(RunError, match=said):
        run(prepare, staleness=1, fields={"generator.dtype": "bfloat16"})


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_failed_pull_is_reported_once(run, staleness):
    with pytest.raises(ZeroDivisionError, match="no pull today"):
        run(having={"generator.pull_fails": True}, staleness=staleness)
    gc.collect()
    assert not run.unheard


def test_a_skipped_step_pushes_nothing_and_makes_nothing_stale(run):
    log, rows = run(having={"trainer.skips": {1}}, staleness=1)
    assert calls(log, "publish") == ["publish 0", "publish 1", "publish 2", "publish 3"]
    assert calls(log, "train") == ["train 0 on 0", "train 1 on 0", "train 1 on 1", "train 2 on 1"]
    assert [row["policy_version"] for row in rows] == [1, 1, 2, 3]


def test_a_resume_in_lockstep_puts_prompts_sampled_ahead_again(run):
    run(steps=5, staleness=1, save_every=2)
    saved = run.saved[2]
    assert saved["ledger"]["submitted"] == 6
    assert [*read_groups(run.record.checkpoints / "step-2" / ROLLOUTS)] == [4, 5]
    log, rows = run(steps=5, saved={2: saved})
    assert calls(log, "train") == ["train 2 on 2", "train 3 on 3", "train 4 on 4"]
    assert [row["rollout/staleness_max"] for row in rows] == [0, 1, 0, 0, 0]
    assert run.loop.ledger.submitted == 10


@pytest.mark.parametrize(("staleness", "killed_after"), [(0, 3), (1, 4), (2, 1), (2, 5), (3, 3)])
def test_stopped_anywhere_and_resumed_a_run_trains_on_the_same(run, staleness, killed_after):
    """Some groups are replaced or lost, and the run evaluates."""
    fields = evaluating() | {"rollout.max_resampled_groups": 2}
    options = {"steps": 6, "staleness": staleness, "save_every": 1, "fields": fields}

    having = {"rewards.flat": (1, 4, 5, 13), "rewards.lost": (7,)}

    run(having=having, **options)
    whole = results(run.record)
    assert [row["step"] for row in run.record.read_evaluations()] == [2, 4]
    run(having=having, **options, saved={killed_after: run.saved[killed_after]})
    assert results(run.record) == whole


def test_rollouts_of_weights_older_than_the_bound_are_never_trained_on(run):
    with pytest.raises(RunError, match="a token of policy version 1 reached version 3: bound=1"):
        run(having={"generator.says": lambda version: min(version, 1)}, steps=5, staleness=1)
    assert calls(run.log, "train")[-1] == "train 2 on 1"


@pytest.mark.parametrize("staleness", [2, 3])
def test_a_version_that_generators_still_pull_is_not_overwritten(run, staleness):
    """The trainer could be done with three steps while the generator is busy with one batch."""

    async def generate(request):
        await asyncio.sleep(0.05 if int(request.split("/")[1]) >= 2 * staleness else 0)

    run(during(generate=generate), steps=8, staleness=staleness)
    assert calls(run.log, "generate") == [f"generate {max(0, k - staleness)}" for k in range(8)]


def test_weights_that_arrive_while_the_trainer_leaves_them_are_not_compared(run):
    stepping = asyncio.Event()

    async def step():
        if run.trainer.version == 1:
            stepping.set()
            while "canary 1" not in run.log:
                await asyncio.sleep(0)
            for _ in range(10):
                await asyncio.sleep(0)

    async def generate(request):
        if request.startswith("train/4/"):
            await stepping.wait()

    log, _ = run(during(optim_step=step, generate=generate), steps=5, staleness=2)
    assert log.index("canary 1") < log.index("publish 2")
    compared = [entry.removeprefix("forward ") for entry in calls(log, "forward")]
    assert "1" not in compared
    for version in compared:
        assert log.index(f"canary {version}") < log.index(f"forward {version}")


@pytest.mark.parametrize(
    ("every", "first", "steps"), [(3, True, [1, 3, 5]), (3, False, [3, 5]), (0, True, [5])]
)
def test_checkpoints_are_saved_when_the_config_asks_for_them(run, every, first, steps):
    first_step = {"trainer.checkpoint.enable_first_step_checkpoint": first}
    run(steps=5, save_every=every, fields=first_step)
    assert [*run.saved] == steps


def test_requests_have_the_parameters_of_sampling_of_the_config(run):
    asked = []

    def noted(trainer, generator):
        generate = generator.generate

        async def generate_noted(requests, **options):
            asked.extend(each for each in requests if "canary" not in each.request_id)
            return await generate(requests, **options)

        generator.generate = generate_noted

    wanted = {"max_tokens": 5, "temperature": 0.7, "top_p": 0.8, "top_k": 9, "min_p": 0.1}
    fields = {f"rollout.{name}": value for name, value in wanted.items()}
    run(noted, steps=1, fields=fields | evaluating(every=0, samples=2))
    found = {
        (each.request_id.rsplit("/", 2)[0], *(getattr(each.sampling, name) for name in wanted))
        for each in asked
    }
    assert found == {
        ("train", 5, 0.7, 0.8, 9, 0.1),
        ("eval/greedy", 5, 0.0, 1.0, 0, 0.0),
        ("eval/sampled", 5, 0.7, 1.0, 0, 0.0),
    }


@pytest.mark.parametrize("staleness", [0, 2])
def test_both_sides_change_the_temperature_from_step_to_step(run, staleness):
    sampled, trained = {}, []

    def noted(trainer, generator):
        generate, backward = generator.generate, trainer.forward_backward

        async def generate_noted(requests, **options):
            for each in requests:
                if each.request_id.startswith("train/"):
                    sampled[int(each.request_id.split("/")[1])] = each.sampling.temperature
            return await generate(requests, **options)

        async def backward_noted(*arguments, temperature, **options):
            trained.append(temperature)
            return await backward(*arguments, temperature=temperature, **options)

        generator.generate = generate_noted
        trainer.forward_backward = backward_noted

    fields = {"rollout.temperature": 0.5, "rollout.final_temperature": 2.0}
    _, rows = run(noted, steps=4, staleness=staleness, fields=fields)
    temperatures = [0.5, 1.0, 1.5, 2.0]
    by_step = [{sampled[each] for each in row["trained_now"]} for row in ledger_of(run.record)]
    assert by_step == [{each} for each in temperatures]
    assert trained == [row["rollout/temperature"] for row in rows] == temperatures
