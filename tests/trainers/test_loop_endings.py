"""Lost actors, alarms and requests to leave in the loop, over meshes that compute nothing."""

import asyncio
import json
from contextlib import nullcontext

import pytest

from rl.errors import ActorFailure, RunError
from tests.trainers.loops import (
    EACH_PIPELINE,
    calls,
    during,
    evaluating,
    generator_lost_once,
    left,
    trained,
    without_times,
)


@pytest.fixture
def replicas(run, monkeypatch):
    """Function that sets the number of generators of the run, which it looks at often."""
    monkeypatch.setattr("rl.session.pool.LOOK_EVERY_S", 0.005)
    return lambda count: (run.record.folder / "replicas").write_text(f"{count}")


@pytest.mark.parametrize("skipped", [{0, 1, 2, 3}, {1, 2}])
def test_the_summary_counts_the_steps_that_changed_weights(run, skipped):
    nothing = pytest.raises(RunError, match="none of 4 steps changed the weights: ")
    with nothing if len(skipped) == 4 else nullcontext():
        run(lambda trainer, _: setattr(trainer, "skips", skipped), save_every=1)
    summary = json.loads((run.record.folder / "summary.json").read_text())
    assert summary["steps_learned"] == 4 - len(skipped)


@EACH_PIPELINE
@pytest.mark.parametrize(
    ("update", "during"), [("simultaneous", "pull"), ("rolling", "generate"), ("rolling", "pull")]
)
def test_a_lost_generator_is_restarted_and_its_requests_are_repeated(run, pipeline, during, update):
    def prepare(trainer, first, second):
        pull = first.pull_weights

        async def pull_weights(version):
            if version == 2 and first.starts == 1:
                raise first.lose("pull_weights")
            return await pull(version)

        generator_lost_once(trainer, first)
        if during == "pull":
            first.during = None
            first.pull_weights = pull_weights

    fields = {"generator.update": update}
    _, rows = run(prepare, steps=8, staleness=1, replicas=2, pipeline=pipeline, fields=fields)
    assert run.generators[0].starts == 2
    assert rows[-1]["restarts/generators"] == 1
    assert trained(run.record) == [*range(16)]
    assert max(row["rollout/staleness_max"] for row in rows) <= 1


@EACH_PIPELINE
def test_weights_are_not_compared_with_a_generator_that_was_started_again(run, pipeline):
    """The generator is lost while the trainer computes its digests, and has no weights yet."""

    def prepare(trainer, generator):
        connected = asyncio.Event()
        digests, connect = trainer.weight_digests, generator.connect

        async def weight_digests(dtype=None, source=None):
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

    _, rows = run(prepare, pipeline=pipeline, fields={"weights.digests": True})
    assert run.generators[0].starts == 2
    assert [row["step"] for row in rows] == [1, 2, 3, 4]


@pytest.mark.parametrize("call", ["generate", "start"])
def test_a_generator_that_is_lost_repeatedly_ends_the_run(run, call):
    def prepare(trainer, generator):
        start = generator.start

        async def start_once():
            await start()
            if call == "start" and generator.starts > 1:
                raise generator.lose("start")

        async def generate(request):
            if call == "generate" or generator.version == 2:
                generator.lose("generate")

        generator.start = start_once
        generator.during = generate

    said = f"generator-0 rank 0, {call}: the process died\nit was lost 4 times"
    with pytest.raises(RunError, match=said) as info:
        run(prepare)
    assert info.value.__cause__.actor == "generator-0"
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
    async def die():
        raise ActorFailure(
            "trainer rank 0: broken", actor="trainer", rank=0, call="step", kind="raised"
        )

    with pytest.raises(ActorFailure, match="broken"):
        run(during(forward_backward=die))
    assert run.trainer.starts == 1


@EACH_PIPELINE
def test_generators_join_and_leave_during_a_run(run, pipeline, replicas):
    async def train():
        if run.trainer.version in (2, 6):
            replicas({2: 2, 6: 1}[run.trainer.version])
        await asyncio.sleep(0.02)

    _, rows = run(during(forward_backward=train), steps=12, staleness=1, pipeline=pipeline)
    first, second = run.generators
    assert (first.starts, second.starts, second.is_running) == (1, 1, False)
    assert second.number == 1
    if pipeline == "asynchronous":
        assert second.asked
        assert len({*first.asked, *second.asked}) == len(first.asked) + len(second.asked) >= 48
    assert max(row["rollout/staleness_max"] for row in rows) == 1


def test_a_generator_that_leaves_while_the_trainer_dies_is_stopped(run, replicas):
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
                replicas(1)
                await stopping.wait()
                raise trainer.lose("forward_backward")

        second.stop = stop_slowly
        trainer.during["forward_backward"] = train

    run(prepare, replicas=2, save_every=1)
    first, second = run.generators
    assert run.trainer.starts == 2
    assert (first.is_running, second.is_running, second.starts) == (True, False, 1)
    assert run.loop.session.pool.meshes == [first]


def test_a_generator_may_leave_while_it_pulls(run, replicas):
    def prepare(trainer, first, second):
        async def leave():
            if trainer.version == 2:
                replicas(1)
                while second.is_running:
                    await asyncio.sleep(0.005)

        second.pulling = leave

    _, rows = run(prepare, replicas=2)
    first, second = run.generators
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert (first.version, second.version) == (4, 1)
    assert run.loop.session.pool.meshes == [first]
    assert (rows[-1]["restarts/generators"], rows[-1]["restarts/trainer"]) == (0, 0)


@pytest.mark.parametrize(
    "fields",
    [{"weights.transport": "rdma"}, {"hardware.device": "h100", "hardware.gpus_per_node": 3}],
    ids=["over a network", "on three GPUs"],
)
def test_no_more_generators_join_than_have_places(run, replicas, fields):
    def prepare(trainer, *generators):
        replicas(3)
        trainer.during["forward_backward"] = lambda: asyncio.sleep(0.02)

    run(prepare, replicas=2, fields=fields)
    assert len(run.loop.session.pool.meshes) == len(run.generators) == 2


@pytest.mark.parametrize("staleness", [0, 2])
@EACH_PIPELINE
def test_leaving_finishes_the_step_and_saves_a_resumable_checkpoint(run, pipeline, staleness):
    options = {"steps": 6, "staleness": staleness, "pipeline": pipeline}
    log, rows = run(left(run), **options)
    assert run.summary is None
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert calls(log, "save") == ["save 3"]
    _, rows = run(**options, saved=run.saved)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert trained(run.record) == [*range(12)]


@EACH_PIPELINE
def test_evaluation_during_training_does_not_change_training(run, pipeline):
    options = {"steps": 6, "staleness": 1, "pipeline": pipeline}
    _, without = run(**options)
    fields = evaluating() | {"record.rollouts": "none"}  # a file takes longer than several steps
    _, rows = run(**options, fields=fields, folder="evaluated")
    assert [row["step"] for row in run.record.read_evaluations()] == [2, 4]
    asked = [request for request in run.generators[0].asked if request.startswith("eval/greedy")]
    assert len(asked) == 3 * 3  # and once at the end
    if pipeline == "deterministic":
        assert without_times(rows) == without_times(without)


def test_an_alarm_that_fails_ends_the_run_after_writing_metrics(run):
    with pytest.raises(RunError, match="step 4: zero_std: "):
        run(
            having={"rewards.flat": range(4, 100)},
            steps=9,
            fields={"watchdog.zero_std": "fail", "watchdog.zero_std_steps": 2},
        )
    assert [row["watchdog/zero_std"] for row in run.record.read_metrics()] == [0, 0, 0, 1]


def test_a_run_that_stands_still_is_ended_by_the_watchdog(run):

    said = r"stalled: no step was done for \d+ s, watchdog.stalled_s=0.5"
    with pytest.raises(RunError, match=said):
        run(during(generate=lambda request: asyncio.sleep(60)), fields={"watchdog.stalled_s": 0.5})


def test_a_rank_that_dies_while_a_complete_run_closes_is_a_warning(run):
    def prepare(trainer, _):
        async def close():
            raise trainer.lose("close")

        trainer.close = close

    run(prepare, save_every=1, close=True)
    assert run.summary["steps"] == 4
    said = run.record.events_path.read_text()
    assert "trainer rank 0, close: the process died; the run was complete by then" in said
