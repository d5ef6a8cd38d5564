"""The loop over meshes that compute nothing: what is asked for in which order, and what waits for what."""

import asyncio
import gc
import json
import random

import pytest

from rl.cli import find_config
from rl.controller.loop import Controller
from rl.errors import ActorFailure, GroupLost, RunError
from rl.observe.progress import Progress
from rl.observe.record import RunRecord
from tests.controller.meshes import Generator, Rewards, Trainer


@pytest.fixture
def run(tmp_path):
    """Runs the loop; what is passed is called with the meshes before. Gives the log of calls, and the rows."""

    def run(
        prepare=lambda trainer, *generators: None,
        *,
        staleness=0,
        steps=4,
        saved=None,
        save_every=0,
        folder="run",
        replicas=1,
        edit=lambda config: None,
        **weights,
    ):
        config = find_config("quickstart")()
        config.steps, config.rollout.max_staleness, config.evaluation.prompts = steps, staleness, 0
        config.rollout.prompts_per_step, config.rollout.samples_per_prompt = 2, 2
        config.trainer.checkpoint.enable, config.trainer.checkpoint.interval = save_every > 0, max(save_every, 1)
        config.generator.replicas = replicas
        for name, value in weights.items():
            setattr(config.weights, name, value)
        config.weights.transport = "shared_memory"
        edit(config)
        log, record = [], RunRecord(tmp_path / folder)
        unheard: list[dict] = []

        async def main():
            asyncio.get_running_loop().set_exception_handler(lambda _, context: unheard.append(context))
            trainer, rewards = Trainer(log), Rewards()
            generators = [Generator(log, number, trainer.slots) for number in range(replicas)]
            trainer.saved = saved or {}
            run.trainer, run.generators, run.rewards = trainer, generators, rewards
            prepare(trainer, *generators)
            task = config.data.build(seed=0, model=config.model)

            def make(number):
                while len(generators) <= number:
                    generators.append(Generator(log, len(generators), trainer.slots))
                return generators[number]

            controller = Controller(config, task, trainer, make, rewards, record, Progress(steps, quiet=True))
            run.controller = controller
            try:
                return await asyncio.wait_for(controller.run(), 60)
            finally:
                run.saved = trainer.saved

        run.log, run.unheard, run.record = log, unheard, record
        run.summary = asyncio.run(main())
        return log, record.read_metrics()

    return run


def calls(log: list[str], *kinds: str) -> list[str]:
    return [entry for entry in log if entry.startswith(kinds)]


def test_in_lockstep_each_step_trains_on_what_its_own_weights_sampled(run):
    log, rows = run(steps=3)
    assert calls(log, "pull", "generate", "train", "step") == [
        *("pull 0", "generate 0", "train 0 on 0", "step"),
        *("pull 1", "generate 1", "train 1 on 1", "step"),
        *("pull 2", "generate 2", "train 2 on 2", "step"),
        "pull 3",
    ]
    assert [row["rollout/staleness_max"] for row in rows] == [0, 0, 0]
    assert [row["timing/hidden"] for row in rows] == [0, 0, 0]


def test_one_step_stale_each_step_trains_on_what_the_weights_before_sampled(run):
    log, rows = run(steps=4, staleness=1)
    assert calls(log, "train") == ["train 0 on 0", "train 1 on 0", "train 2 on 1", "train 3 on 2"]
    assert calls(log, "pull", "generate") == [
        *("pull 0", "generate 0", "generate 0", "pull 1", "generate 1", "pull 2", "generate 2", "pull 3", "pull 4")
    ]
    assert [row["rollout/staleness_max"] for row in rows] == [0, 1, 1, 1]
    assert [row["push/canary"] for row in rows] == pytest.approx([0, 1e-5, 2e-5, 3e-5], abs=1e-6)  # its own version's
    assert all((row["push/bytes"], row["timing/push_pause"]) == (100, 0.25) for row in rows)


@pytest.mark.parametrize("tolerance", [0.0, None], ids=["no checks", "canary"])
def test_one_step_stale_a_pull_slower_than_the_step_changes_no_order(run, tolerance):
    """The next version is published before the generator holds this one, which it generates with all the same."""

    def prepare(trainer, generator, *_):
        generator.pull_takes = 0.02

    log, rows = run(prepare, steps=4, staleness=1, canary_tolerance=tolerance)
    assert calls(log, "train") == ["train 0 on 0", "train 1 on 0", "train 2 on 1", "train 3 on 2"]
    assert [row["rollout/staleness_max"] for row in rows] == [0, 1, 1, 1]


@pytest.mark.parametrize("checks", [{}, {"digests": True}, {"canary_tolerance": 0.0}], ids=["canary", "all", "none"])
def test_one_step_stale_generating_training_and_publishing_are_behind_each_other(run, checks):
    """None of the three ends before the others have begun."""

    def prepare(trainer, generator, *_):
        training, generating, publishing = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def train():
            if trainer.version in (1, 2):
                training.set()
                await publishing.wait()
                await generating.wait()
                for event in (training, generating, publishing):
                    event.clear()

        async def generate(request):
            if generator.version in (1, 2):
                generating.set()
                await training.wait()

        async def publish():
            if trainer.version in (1, 2):
                publishing.set()
                await training.wait()

        trainer.during |= {"forward_backward": train, "push_weights": publish}
        generator.during = generate

    _, rows = run(prepare, steps=4, staleness=1, **checks)
    assert [row["rollout/staleness_max"] for row in rows] == [0, 1, 1, 1]
    assert all(row["timing/hidden"] > 0 for row in rows[1:3])


def test_an_optimizer_step_waits_for_the_push_and_what_was_waited_for_is_not_hidden(run, monkeypatch):
    """Training takes one second, and two of the pushes go on for another five."""
    now = [0.0]
    monkeypatch.setattr("rl.observe.spans.time.perf_counter", lambda: now[0])

    def prepare(trainer, generator, *_):
        published, trained = set(), set()

        async def train():
            while trainer.version not in published:
                await asyncio.sleep(0)
            now[0] += 1.0
            trained.add(trainer.version)

        async def publish():
            published.add(trainer.version)
            if trainer.version in (1, 2):
                while trainer.version not in trained:
                    await asyncio.sleep(0)
                for _ in range(20):  # until the loop waits
                    await asyncio.sleep(0)
                now[0] += 5.0

        trainer.during |= {"forward_backward": train, "push_weights": publish}

    _, rows = run(prepare, steps=4, staleness=1, canary_tolerance=0.0)
    assert [row["timing/push_wait"] for row in rows] == [0, 5, 5, 0]
    assert [row["timing/hidden"] for row in rows[1:3]] == [1, 1]
    assert [row["timing/step"] for row in rows] == [1, 6, 6, 1]


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_check_that_fails_ends_the_run_before_the_weights_change_again(run, staleness):
    def prepare(trainer, generator, *_):
        trainer.wrong_since = 2

    with pytest.raises(
        RunError, match="canary of policy version 2: a log-prob of generator-0 differs by 1 .* all param"
    ):
        run(prepare, steps=4, staleness=staleness)
    assert len(calls(run.log, "step")) == 2
    assert run.controller.step == 2
    gc.collect()
    assert not run.unheard


def test_the_last_weights_are_checked_too(run):
    def prepare(trainer, generator, *_):
        trainer.wrong_since = 3

    with pytest.raises(RunError, match="canary of policy version 3"):
        run(prepare, steps=3)


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_pull_that_fails_is_told_once(run, staleness):
    def prepare(trainer, generator, *_):
        generator.pull_fails = True

    with pytest.raises(ZeroDivisionError, match="no pull today"):
        run(prepare, staleness=staleness)
    gc.collect()
    assert not run.unheard


def test_a_skipped_step_pushes_nothing_and_makes_nothing_stale(run):
    def prepare(trainer, generator, *_):
        trainer.skips = {1}

    log, rows = run(prepare, steps=4, staleness=1)
    assert calls(log, "publish") == ["publish 0", "publish 1", "publish 2", "publish 3"]
    assert calls(log, "train") == ["train 0 on 0", "train 1 on 0", "train 1 on 1", "train 2 on 1"]
    assert [row["policy_version"] for row in rows] == [1, 1, 2, 3]


@pytest.mark.parametrize("step", [1, 2, 4])
def test_what_was_sampled_ahead_is_trained_on_after_a_resume(run, step):
    _, whole = run(steps=5, staleness=1, save_every=1)
    saved = json.loads(json.dumps(run.saved[step]))
    log, resumed = run(steps=5, staleness=1, saved={step: saved})
    assert calls(log, "train") == ["train 1 on 0", "train 2 on 1", "train 3 on 2", "train 4 on 3"][step - 1 :]
    assert without_times(resumed) == without_times(whole)
    assert run.controller.ledger.submitted == 10


def test_what_was_sampled_ahead_is_put_again_by_a_resume_in_lockstep(run):
    run(steps=5, staleness=1, save_every=2)
    saved = run.saved[2]
    assert (saved["ledger"]["submitted"], [*saved["ledger"]["finished"]]) == (6, ["4", "5"])
    log, rows = run(steps=5, staleness=0, saved={2: saved})
    assert calls(log, "train") == ["train 2 on 2", "train 3 on 3", "train 4 on 4"]
    assert [row["rollout/staleness_max"] for row in rows] == [0, 1, 0, 0, 0]
    assert run.controller.ledger.submitted == 10


def test_rollouts_of_weights_older_than_the_bound_are_never_trained_on(run):
    def prepare(trainer, generator):
        generator.says = lambda version: min(version, 1)

    with pytest.raises(RunError, match="a token of policy version 1 reached version 3: bound=1"):
        run(prepare, steps=5, staleness=1)
    assert calls(run.log, "train")[-1] == "train 2 on 1"


@pytest.mark.parametrize("staleness", [0, 1, 2, 3])
def test_a_batch_comes_from_the_weights_of_as_many_steps_before_it_as_the_staleness_says(run, staleness):
    _, rows = run(steps=7, staleness=staleness)
    assert calls(run.log, "train") == [f"train {k} on {max(0, k - staleness)}" for k in range(7)]
    assert calls(run.log, "generate") == [f"generate {max(0, k - staleness)}" for k in range(7)]
    assert [row["rollout/staleness_mean"] for row in rows] == [min(k, staleness) for k in range(7)]
    assert run.generators[0].asked == [f"train/{ordinal}/{sample}" for ordinal in range(14) for sample in range(2)]


@pytest.mark.parametrize("staleness", [0, 2, 3])
@pytest.mark.parametrize("killed_after", [1, 3, 5])
def test_stopped_anywhere_and_resumed_a_run_trains_on_the_same(run, staleness, killed_after):
    """With groups that are replaced or lost on the way, and evaluations."""

    def edit(config):
        config.rollout.max_replacements, config.evaluation.every, config.evaluation.prompts = 2, 2, 2

    def prepare(trainer, generator):
        run.rewards.flat, run.rewards.lost = (1, 4, 5, 13), (7,)

    _, whole = run(prepare, steps=6, staleness=staleness, save_every=1, edit=edit)
    trained, evaluated = whereabouts(run.record), run.record.read_evaluations()
    assert [row["step"] for row in evaluated] == [2, 4]
    saved = {killed_after: run.saved[killed_after]}
    _, rows = run(prepare, steps=6, staleness=staleness, save_every=1, edit=edit, saved=saved)
    assert without_times(rows) == without_times(whole)
    assert whereabouts(run.record) == trained
    assert run.record.read_evaluations() == evaluated


@pytest.mark.parametrize("staleness", [2, 3])
def test_what_generators_are_still_to_pull_is_not_overwritten(run, staleness):
    """The trainer could be done with three steps while the generator is busy with one batch."""

    def prepare(trainer, generator):
        async def generate(request):
            await asyncio.sleep(0.05 if int(request.split("/")[1]) >= 2 * staleness else 0)

        generator.during = generate

    run(prepare, steps=8, staleness=staleness)
    assert calls(run.log, "generate") == [f"generate {max(0, k - staleness)}" for k in range(8)]


def test_weights_that_arrive_while_the_trainer_leaves_them_are_not_compared(run):
    def prepare(trainer, generator):
        stepping = asyncio.Event()

        async def step():
            if trainer.version == 1:
                stepping.set()
                while "canary 1" not in run.log:
                    await asyncio.sleep(0)
                for _ in range(10):
                    await asyncio.sleep(0)

        async def generate(request):
            if request.startswith("train/4/"):
                await stepping.wait()

        trainer.during["optim_step"], generator.during = step, generate

    log, _ = run(prepare, steps=5, staleness=2)
    assert log.index("canary 1") < log.index("publish 2")
    compared = [entry.removeprefix("forward ") for entry in calls(log, "forward")]
    assert "1" not in compared
    assert all(log.index(f"canary {version}") < log.index(f"forward {version}") for version in compared)


def test_replicas_share_a_batch_in_a_way_that_no_timing_changes(run):
    def prepare(trainer, first, second):
        second.pull_takes = 0.01

    run(prepare, steps=3, replicas=2)
    asked = [[request.split("/")[1] for request in each.asked[::2]] for each in run.generators]
    assert sorted(asked) == [["0", "2", "4"], ["1", "3", "5"]]


def test_groups_whose_rewards_are_equal_are_replaced_up_to_a_limit(run):
    def prepare(trainer, generator):
        run.rewards.flat = range(1, 100)

    def edit(config):
        config.rollout.max_replacements = 3

    _, rows = run(prepare, steps=2, edit=edit)
    ledger = ledger_of(run.record)
    assert [row["trained_now"] for row in ledger] == [[0, 4], [8, 9]]
    assert [row["dropped_now"] for row in ledger] == [
        {"rewards all equal": [1, 2, 3]},
        {"rewards all equal": [5, 6, 7]},
    ]
    assert [row["ledger/dropped"] for row in rows] == [3, 6]


def test_steps_that_are_trained_while_a_batch_is_sampled_lift_no_limit_of_it(run):
    def prepare(trainer, generator):
        run.rewards.flat = range(100)
        generator.during = lambda request: asyncio.sleep(0.01)
        trainer.during["forward_backward"] = lambda: asyncio.sleep(0.015)

    def edit(config):
        config.rollout.max_replacements = 1

    run(prepare, steps=6, staleness=2, edit=edit)
    assert [row["trained_now"] for row in ledger_of(run.record)] == [[3 * k + 1, 3 * k + 2] for k in range(6)]


@pytest.mark.parametrize("pipeline", ["deterministic", "asynchronous"])
def test_lost_groups_make_room_until_they_are_too_many(run, pipeline):
    def edit(config):
        config.rollout.pipeline = pipeline

    def prepare(trainer, generator):
        run.rewards.lost = range(3, 30, 3)

    run(prepare, steps=4, staleness=1, edit=edit)
    assert run.controller.ledger.counts()["trained"] == 8
    assert run.controller.ledger.dropped == {"reward raised": 3}
    with pytest.raises(
        RunError, match=r"11 of the last \d+ groups were lost, .*max_lost=0.1.*no reward for 32"
    ) as info:
        run(lambda *_: setattr(run.rewards, "lost", range(2, 100, 3)), steps=20, staleness=1, edit=edit)
    assert isinstance(info.value.__cause__, GroupLost)


def free(config):
    config.rollout.pipeline = "asynchronous"


@pytest.mark.parametrize("staleness", [0, 1, 2])
@pytest.mark.parametrize("parts", [1, 2])
def test_an_asynchronous_run_trains_every_ordinal_once_within_the_bound(run, staleness, parts):
    def edit(config):
        free(config)
        config.rollout.parts_per_step = parts

    def prepare(trainer, *generators):
        async def slowly(request):
            await asyncio.sleep(random.random() / 100)

        for generator in generators:
            generator.during = slowly

    _, rows = run(prepare, steps=12, staleness=staleness, replicas=2, edit=edit)
    assert max(row["rollout/staleness_max"] for row in rows) <= staleness
    ledger = ledger_of(run.record)
    assert sorted(ordinal for row in ledger for ordinal in row["trained_now"]) == [*range(24)]
    assert all(len(row["trained_now"]) == 2 for row in ledger)
    assert len(calls(run.log, "train")) == 12 * parts
    assert all(len(generator.asked) > 8 for generator in run.generators)


def test_training_begins_while_the_rest_of_the_batch_is_generated(run):
    def edit(config):
        free(config)
        config.rollout.parts_per_step = 2

    def prepare(trainer, generator):
        begun = asyncio.Event()

        async def train():
            begun.set()

        async def generate(request):
            if request.startswith("train/1/"):
                await begun.wait()

        trainer.during["forward_backward"], generator.during = train, generate

    log, _ = run(prepare, steps=1, edit=edit)
    assert calls(log, "generate", "train", "step") == [
        "generate 0",
        "generate 0",
        "train 0 on 0",
        "train 0 on 0",
        "step",
    ]


def test_one_long_rollout_holds_up_no_step_while_its_bound_allows(run):
    """Ordinal 0 goes on until two steps are done, and is trained on at the last moment."""

    def prepare(trainer, generator):
        async def generate(request):
            if request.startswith("train/0/"):
                while trainer.version < 2:
                    await asyncio.sleep(0.001)

        generator.during = generate

    run(prepare, steps=4, staleness=2, edit=free)
    ledger = ledger_of(run.record)
    assert [row["trained_now"][0] for row in ledger].index(0) == 2
    assert ledger[2]["staleness"]["2"] > 0


@pytest.mark.parametrize("edit", [free, lambda config: None], ids=["asynchronous", "deterministic"])
@pytest.mark.parametrize("update", ["together", "rolling"])
@pytest.mark.parametrize("during", ["generate", "pull"])
def test_a_lost_generator_comes_back_and_what_it_had_is_asked_again(run, edit, during, update):
    def rolling(config):
        edit(config)
        config.generator.update = update

    def prepare(trainer, first, second):
        async def generate(request):
            if first.version == 2 and first.starts == 1:
                first.lose("generate")

        pull = first.pull_weights

        async def pull_weights(version):
            if version == 2 and first.starts == 1:
                raise first.lose("pull_weights")
            return await pull(version)

        async def train():
            await asyncio.sleep(0.01)  # so that there is still work when it is back

        trainer.during["forward_backward"] = train
        if during == "generate":
            first.during = generate
        else:
            first.pull_weights = pull_weights

    _, rows = run(prepare, steps=8, staleness=1, replicas=2, edit=rolling)
    assert run.generators[0].starts == 2
    assert rows[-1]["restarts/generators"] == 1
    ledger = ledger_of(run.record)
    assert sorted(ordinal for row in ledger for ordinal in row["trained_now"]) == [*range(16)]
    assert max(row["rollout/staleness_max"] for row in rows) <= 1


def test_a_generator_that_is_lost_again_and_again_ends_the_run_by_name(run):
    def prepare(trainer, generator):
        async def generate(request):
            generator.lose("generate")

        generator.during = generate

    with pytest.raises(RunError, match="generator-0 rank 0, generate: the process died") as info:
        run(prepare)
    assert info.value.__cause__.actor == "generator-0"
    assert run.generators[0].starts == 4


def test_a_generator_that_cannot_be_started_again_ends_the_run_by_name(run):
    def prepare(trainer, generator):
        start = generator.start

        async def only_once():
            await start()
            if generator.starts > 1:
                raise generator.lose("start")

        async def generate(request):
            if generator.version == 2:
                generator.lose("generate")

        generator.start, generator.during = only_once, generate

    with pytest.raises(RunError, match="generator-0 rank 0, start: the process died\nthat was the 4th time"):
        run(prepare)
    assert run.generators[0].starts == 4


def test_where_one_mesh_fails_to_start_none_is_started_twice_at_once(run):
    def prepare(trainer, generator):
        starting = []

        def start_of(mesh, fails, takes):
            start = mesh.start

            async def start_slowly():
                assert mesh not in starting
                starting.append(mesh)
                try:
                    await asyncio.sleep(takes)
                    await start()
                finally:
                    starting.remove(mesh)
                if fails and mesh.starts == 1:
                    raise mesh.lose("start")

            return start_slowly

        trainer.start = start_of(trainer, fails=False, takes=0.1)
        generator.start = start_of(generator, fails=True, takes=0.0)

    run(prepare)
    assert (run.trainer.starts, run.generators[0].starts) == (1, 2)
    assert not run.unheard


@pytest.mark.parametrize("staleness", [0, 2])
@pytest.mark.parametrize("edit", [free, lambda config: None], ids=["asynchronous", "deterministic"])
@pytest.mark.parametrize("call", ["forward_backward", "push_weights"])
def test_with_a_lost_trainer_the_run_goes_back_to_the_newest_checkpoint(run, edit, staleness, call):
    _, whole = run(steps=8, staleness=staleness, save_every=3, edit=edit)

    def prepare(trainer, *generators):
        async def die():
            if trainer.version == 5 and trainer.starts == 1:
                raise trainer.lose(call)

        trainer.during[call] = die

    _, rows = run(prepare, steps=8, staleness=staleness, save_every=3, edit=edit, folder="other")
    assert run.trainer.starts == 2
    assert run.generators[0].starts == 1
    assert rows[-1]["restarts/trainer"] == 1
    assert [row["step"] for row in rows] == [*range(1, 9)]
    ledger = ledger_of(run.record)
    assert sorted(ordinal for row in ledger for ordinal in row["trained_now"]) == [*range(16)]
    if edit is not free:
        assert without_times(rows) == without_times(whole)


def test_a_trainer_that_is_lost_again_and_again_ends_the_run_by_name(run):
    def prepare(trainer, generator):
        async def die():
            if trainer.version == 2:
                raise trainer.lose("forward_backward")

        trainer.during["forward_backward"] = die

    with pytest.raises(ActorFailure, match="trainer rank 0, forward_backward: the process died"):
        run(prepare, save_every=1)
    assert run.trainer.starts == 4


def test_what_an_actor_raises_ends_the_run_at_once(run):
    def prepare(trainer, generator):
        async def die():
            raise ActorFailure("trainer rank 0: broken", actor="trainer", rank=0, call="step", kind="raised")

        trainer.during["forward_backward"] = die

    with pytest.raises(ActorFailure, match="broken"):
        run(prepare)
    assert run.trainer.starts == 1


@pytest.mark.parametrize("edit", [free, lambda config: None], ids=["asynchronous", "deterministic"])
def test_generators_join_and_leave_while_the_run_goes_on(run, edit, monkeypatch):
    monkeypatch.setattr("rl.controller.fleet.LOOK_EVERY_S", 0.005)

    def prepare(trainer, generator):
        async def train():
            if trainer.version in (2, 6):
                (run.record.folder / "replicas").write_text({2: "2", 6: "1"}[trainer.version])
            await asyncio.sleep(0.02)

        trainer.during["forward_backward"] = train

    _, rows = run(prepare, steps=12, staleness=1, edit=edit)
    first, second = run.generators
    assert (first.starts, second.starts, second.is_running) == (1, 1, False)
    assert second.number == 1
    if edit is free:
        assert second.asked
        assert len({*first.asked, *second.asked}) == len(first.asked) + len(second.asked) >= 48
    assert max(row["rollout/staleness_max"] for row in rows) == 1


def test_no_more_generators_join_than_a_network_push_has_places_for(run, monkeypatch):
    monkeypatch.setattr("rl.controller.fleet.LOOK_EVERY_S", 0.005)

    def edit(config):
        config.weights.transport = "rdma"

    def prepare(trainer, *generators):
        (run.record.folder / "replicas").write_text("3")

        async def train():
            await asyncio.sleep(0.02)

        trainer.during["forward_backward"] = train

    run(prepare, replicas=2, edit=edit)
    assert len(run.controller.fleet.meshes) == len(run.generators) == 2


@pytest.mark.parametrize("staleness", [0, 2])
@pytest.mark.parametrize("edit", [free, lambda config: None], ids=["asynchronous", "deterministic"])
def test_a_run_that_is_left_finishes_its_step_saves_and_can_go_on(run, edit, staleness):
    def prepare(trainer, generator):
        async def train():
            if trainer.version == 2:
                run.controller.leave()

        trainer.during["forward_backward"] = train

    log, rows = run(prepare, steps=6, staleness=staleness, edit=edit)
    assert run.summary is None
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert calls(log, "save") == ["save 3"]
    _, rows = run(steps=6, staleness=staleness, edit=edit, saved=run.saved)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    ledger = ledger_of(run.record)
    assert sorted(ordinal for row in ledger for ordinal in row["trained_now"]) == [*range(12)]


@pytest.mark.parametrize("edit", [free, lambda config: None], ids=["asynchronous", "deterministic"])
def test_evaluation_on_the_way_changes_nothing_of_the_training(run, edit):
    _, without = run(steps=6, staleness=1, edit=edit)

    def evaluating(config):
        edit(config)
        config.evaluation.every, config.evaluation.prompts = 2, 3

    _, rows = run(steps=6, staleness=1, edit=evaluating, folder="evaluated")
    assert [row["step"] for row in run.record.read_evaluations()] == [2, 4]
    asked = [request for request in run.generators[0].asked if request.startswith("eval/greedy")]
    assert len(asked) == 3 * 3  # and once at the end
    if edit is not free:
        assert without_times(rows) == without_times(without)


def test_an_alarm_that_is_to_fail_ends_the_run_with_its_step_in_the_metrics(run):
    def prepare(trainer, generator):
        run.rewards.flat = range(4, 100)

    def edit(config):
        config.watchdog.flat, config.watchdog.flat_steps = "fail", 2

    with pytest.raises(RunError, match="step 4: flat: "):
        run(prepare, steps=9, edit=edit)
    assert [row["watchdog/flat"] for row in run.record.read_metrics()] == [0, 0, 0, 1]


def test_a_run_that_stands_still_is_ended_by_the_watchdog(run):
    def prepare(trainer, generator):
        async def hang(request):
            await asyncio.sleep(30)

        generator.during = hang

    def edit(config):
        config.watchdog.stalled_s = 0.5

    with pytest.raises(RunError, match=r"stalled: no step was done for \d s, watchdog.stalled_s=0.5"):
        run(prepare, edit=edit)


def ledger_of(record: RunRecord) -> list[dict]:
    return [json.loads(line) for line in record.ledger_path.read_text().splitlines()]


def whereabouts(record: RunRecord) -> tuple[list[list[int]], list[tuple[str, int]]]:
    """The ordinals of each step, and those that were dropped."""
    rows = ledger_of(record)
    dropped = [(reason, o) for row in rows for reason, ordinals in row["dropped_now"].items() for o in ordinals]
    return [row["trained_now"] for row in rows], sorted(dropped)


def without_times(rows: list[dict]) -> list[dict]:
    """What a run computed, without what it measured of time, and of where ordinals and weights are at that time."""
    measured = ("timing/", "tokens_per_s", "ledger/", "push/", "restarts/")
    return [{k: v for k, v in row.items() if not k.startswith(measured)} for row in rows]
