"""Lost actors, alarms and requests to leave in the loop, over meshes that compute nothing."""

import asyncio
import json
from contextlib import nullcontext

import pytest

from rl.errors import ActorFailure, RunError
from tests.trainers.loops import calls, free, ledger_of, without_times


@pytest.mark.parametrize("skipped", [{0, 1, 2, 3}, {1, 2}])
def test_the_summary_counts_the_steps_that_changed_weights(run, skipped):
    nothing = pytest.raises(RunError, match="none of 4 steps changed the weights: ")
    with nothing if len(skipped) == 4 else nullcontext():
        run(lambda trainer, _: setattr(trainer, "skips", skipped), save_every=1)
    summary = json.loads((run.record.folder / "summary.json").read_text())
    assert summary["steps_learned"] == 4 - len(skipped)


@pytest.mark.parametrize("edit", [free, lambda config: None], ids=["asynchronous", "deterministic"])
@pytest.mark.parametrize(
    ("update", "during"), [("simultaneous", "pull"), ("rolling", "generate"), ("rolling", "pull")]
)
def test_a_lost_generator_is_restarted_and_its_requests_are_repeated(run, edit, during, update):
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
    assert sorted(prompt_id for row in ledger for prompt_id in row["trained_now"]) == [*range(16)]
    assert max(row["rollout/staleness_max"] for row in rows) <= 1


@pytest.mark.parametrize("edit", [free, lambda config: None], ids=["asynchronous", "deterministic"])
def test_weights_are_not_compared_with_a_generator_that_was_started_again(run, edit):
    """The generator is lost while the trainer computes its digests, and has no weights yet."""

    def prepare(trainer, generator):
        connected = asyncio.Event()
        digests, connect = trainer.weight_digests, generator.connect

        async def weight_digests(dtype=None):
            found = await digests(dtype)
            if trainer.version == 2 and generator.starts == 1:
                generator.lose()
                connected.clear()
                await asyncio.wait_for(connected.wait(), 60)
            return found

        async def connect_and_tell(*args, **kwargs):
            await connect(*args, **kwargs)
            connected.set()

        trainer.weight_digests = weight_digests
        generator.connect = connect_and_tell
        generator.pulling = lambda: asyncio.sleep(0.02)

    _, rows = run(prepare, steps=4, edit=edit, digests=True)
    assert run.generators[0].starts == 2
    assert [row["step"] for row in rows] == [1, 2, 3, 4]


def test_a_generator_that_is_lost_repeatedly_ends_the_run(run):
    def prepare(trainer, generator):
        async def generate(request):
            generator.lose("generate")

        generator.during = generate

    with pytest.raises(RunError, match="generator-0 rank 0, generate: the process died") as info:
        run(prepare)
    assert info.value.__cause__.actor == "generator-0"
    assert run.generators[0].starts == 4


def test_a_generator_that_cannot_be_restarted_ends_the_run(run):
    def prepare(trainer, generator):
        start = generator.start

        async def only_once():
            await start()
            if generator.starts > 1:
                raise generator.lose("start")

        async def generate(request):
            if generator.version == 2:
                generator.lose("generate")

        generator.start = only_once
        generator.during = generate

    with pytest.raises(
        RunError, match="generator-0 rank 0, start: the process died\nit was lost 4 times"
    ):
        run(prepare)
    assert run.generators[0].starts == 4


def test_a_failed_start_of_one_mesh_starts_no_other_mesh_twice(run):
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


def test_an_exception_of_an_actor_ends_the_run_at_once(run):
    def prepare(trainer, generator):
        async def die():
            raise ActorFailure(
                "trainer rank 0: broken", actor="trainer", rank=0, call="step", kind="raised"
            )

        trainer.during["forward_backward"] = die

    with pytest.raises(ActorFailure, match="broken"):
        run(prepare)
    assert run.trainer.starts == 1


@pytest.mark.parametrize("edit", [free, lambda config: None], ids=["asynchronous", "deterministic"])
def test_generators_join_and_leave_during_a_run(run, edit, monkeypatch):
    monkeypatch.setattr("rl.session.pool.LOOK_EVERY_S", 0.005)

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


def test_a_generator_that_leaves_while_the_trainer_dies_is_stopped(run, monkeypatch):
    monkeypatch.setattr("rl.session.pool.LOOK_EVERY_S", 0.005)

    def prepare(trainer, first, second):
        stop = second.stop
        stopping = asyncio.Event()

        async def stop_slowly():
            if second.is_running:
                stopping.set()
                await asyncio.sleep(0.05)
            await stop()

        async def train():
            if trainer.version == 2 and trainer.starts == 1:
                (run.record.folder / "replicas").write_text("1")
                await stopping.wait()
                raise trainer.lose("forward_backward")

        second.stop = stop_slowly
        trainer.during["forward_backward"] = train

    run(prepare, steps=4, replicas=2, save_every=1)
    first, second = run.generators
    assert run.trainer.starts == 2
    assert (first.is_running, second.is_running, second.starts) == (True, False, 1)
    assert run.loop.session.pool.meshes == [first]


def test_a_generator_may_leave_while_it_pulls(run, monkeypatch):
    monkeypatch.setattr("rl.session.pool.LOOK_EVERY_S", 0.005)

    def prepare(trainer, first, second):
        async def leave():
            if trainer.version == 2:
                (run.record.folder / "replicas").write_text("1")
                while second.is_running:
                    await asyncio.sleep(0.005)

        second.pulling = leave

    _, rows = run(prepare, steps=4, replicas=2)
    first, second = run.generators
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert (first.version, second.version) == (4, 1)
    assert run.loop.session.pool.meshes == [first]
    assert (rows[-1]["restarts/generators"], rows[-1]["restarts/trainer"]) == (0, 0)


def over_a_network(config):
    config.weights.transport = "rdma"


def on_three_gpus(config):
    config.hardware.device = "h100"
    config.hardware.gpus_per_node = 3


@pytest.mark.parametrize("edit", [over_a_network, on_three_gpus])
def test_no_more_generators_join_than_have_places(run, monkeypatch, edit):
    monkeypatch.setattr("rl.session.pool.LOOK_EVERY_S", 0.005)

    def prepare(trainer, *generators):
        (run.record.folder / "replicas").write_text("3")

        async def train():
            await asyncio.sleep(0.02)

        trainer.during["forward_backward"] = train

    run(prepare, replicas=2, edit=edit)
    assert len(run.loop.session.pool.meshes) == len(run.generators) == 2


@pytest.mark.parametrize("staleness", [0, 2])
@pytest.mark.parametrize("edit", [free, lambda config: None], ids=["asynchronous", "deterministic"])
def test_leaving_finishes_the_step_and_saves_a_resumable_checkpoint(run, edit, staleness):
    def prepare(trainer, generator):
        async def train():
            if trainer.version == 2:
                run.loop.leave()

        trainer.during["forward_backward"] = train

    log, rows = run(prepare, steps=6, staleness=staleness, edit=edit)
    assert run.summary is None
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert calls(log, "save") == ["save 3"]
    _, rows = run(steps=6, staleness=staleness, edit=edit, saved=run.saved)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    ledger = ledger_of(run.record)
    assert sorted(prompt_id for row in ledger for prompt_id in row["trained_now"]) == [*range(12)]


@pytest.mark.parametrize("edit", [free, lambda config: None], ids=["asynchronous", "deterministic"])
def test_evaluation_during_training_does_not_change_training(run, edit):
    _, without = run(steps=6, staleness=1, edit=edit)

    def evaluating(config):
        edit(config)
        config.evaluation.every = 2
        config.evaluation.prompts = 3
        config.record.rollouts = "none"  # a file takes longer than several of these steps

    _, rows = run(steps=6, staleness=1, edit=evaluating, folder="evaluated")
    assert [row["step"] for row in run.record.read_evaluations()] == [2, 4]
    asked = [request for request in run.generators[0].asked if request.startswith("eval/greedy")]
    assert len(asked) == 3 * 3  # and once at the end
    if edit is not free:
        assert without_times(rows) == without_times(without)


def test_an_alarm_that_fails_ends_the_run_after_writing_metrics(run):
    def prepare(trainer, generator):
        run.rewards.flat = range(4, 100)

    def edit(config):
        config.watchdog.zero_std = "fail"
        config.watchdog.zero_std_steps = 2

    with pytest.raises(RunError, match="step 4: zero_std: "):
        run(prepare, steps=9, edit=edit)
    assert [row["watchdog/zero_std"] for row in run.record.read_metrics()] == [0, 0, 0, 1]


def test_a_run_that_stands_still_is_ended_by_the_watchdog(run):
    def prepare(trainer, generator):
        async def hang(request):
            await asyncio.sleep(60)

        generator.during = hang

    def edit(config):
        config.watchdog.stalled_s = 0.5

    with pytest.raises(
        RunError, match=r"stalled: no step was done for \d+ s, watchdog.stalled_s=0.5"
    ):
        run(prepare, edit=edit)


def test_a_rank_that_dies_while_a_complete_run_closes_is_a_warning(run):
    def prepare(trainer, _):
        async def close():
            raise trainer.lose("close")

        trainer.close = close

    run(prepare, save_every=1, close=True)
    assert json.loads((run.record.folder / "summary.json").read_text())["steps"] == 4
    said = run.record.events_path.read_text()
    assert "trainer rank 0, close: the process died; the run was complete by then" in said
