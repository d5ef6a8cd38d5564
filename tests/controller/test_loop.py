"""The loop over meshes that compute nothing: what is asked for in which order, and what waits for what."""

import asyncio
import gc
import json

import pytest

from rl.cli import find_config
from rl.controller.loop import Controller
from rl.errors import RunError
from rl.observe.progress import Progress
from rl.observe.record import RunRecord
from tests.controller.meshes import Generator, Trainer


@pytest.fixture
def run(tmp_path):
    """Runs the loop; what is passed is called with both meshes before. Gives the log of calls, and the rows."""

    def run(prepare=lambda trainer, generator: None, *, staleness=0, steps=4, saved=None, save_every=0, **weights):
        config = find_config("quickstart")()
        config.steps, config.rollout.max_staleness, config.evaluation.prompts = steps, staleness, 0
        config.rollout.prompts_per_step, config.rollout.samples_per_prompt = 2, 2
        config.trainer.checkpoint.enable, config.trainer.checkpoint.interval = save_every > 0, max(save_every, 1)
        for name, value in weights.items():
            setattr(config.weights, name, value)
        config.weights.transport = "shared_memory"
        log, record = [], RunRecord(tmp_path / "run")
        unheard: list[dict] = []

        async def main():
            asyncio.get_running_loop().set_exception_handler(lambda _, context: unheard.append(context))
            trainer, generator = Trainer(log), Generator(log)
            trainer.saved = saved or {}
            prepare(trainer, generator)
            task = config.data.build(seed=0, model=config.model)
            controller = Controller(config, task, trainer, generator, record, Progress(steps, quiet=True))
            try:
                return await controller.run()
            finally:
                run.state, run.saved = controller.state, trainer.saved

        run.log, run.unheard = log, unheard
        asyncio.run(main())
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

    def prepare(trainer, generator):
        generator.pull_takes = 0.02

    log, rows = run(prepare, steps=4, staleness=1, canary_tolerance=tolerance)
    assert calls(log, "train") == ["train 0 on 0", "train 1 on 0", "train 2 on 1", "train 3 on 2"]
    assert [row["rollout/staleness_max"] for row in rows] == [0, 1, 1, 1]


@pytest.mark.parametrize("checks", [{}, {"digests": True}, {"canary_tolerance": 0.0}], ids=["canary", "all", "none"])
def test_one_step_stale_generating_training_and_publishing_are_behind_each_other(run, checks):
    """None of the three ends before the others have begun."""

    def prepare(trainer, generator):
        training, generating, publishing = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def train():
            if trainer.version in (1, 2):
                training.set()
                await publishing.wait()
                await generating.wait()
                for event in (training, generating, publishing):
                    event.clear()

        async def generate():
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

    def prepare(trainer, generator):
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
    def prepare(trainer, generator):
        trainer.wrong_since = 2

    with pytest.raises(
        RunError, match="canary of policy version 2: a log-prob of generator 0 differs by 1 .* all param"
    ):
        run(prepare, steps=4, staleness=staleness)
    assert len(calls(run.log, "step")) == 2
    assert run.state.step == 2
    gc.collect()
    assert not run.unheard


def test_the_last_weights_are_checked_too(run):
    def prepare(trainer, generator):
        trainer.wrong_since = 3

    with pytest.raises(RunError, match="canary of policy version 3"):
        run(prepare, steps=3)


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_pull_that_fails_is_told_once(run, staleness):
    def prepare(trainer, generator):
        generator.pull_fails = True

    with pytest.raises(ZeroDivisionError, match="no pull today"):
        run(prepare, staleness=staleness)
    gc.collect()
    assert not run.unheard


def test_a_skipped_step_pushes_nothing_and_makes_nothing_stale(run):
    def prepare(trainer, generator):
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
    assert run.state.next_ordinal == 10


def test_what_was_sampled_ahead_is_put_again_by_a_resume_in_lockstep(run):
    run(steps=5, staleness=1, save_every=2)
    saved = run.saved[2]
    assert (saved["next_ordinal"], len(saved["ahead"])) == (6, 2)
    log, rows = run(steps=5, staleness=0, saved={2: saved})
    assert calls(log, "train") == ["train 2 on 2", "train 3 on 3", "train 4 on 4"]
    assert [row["rollout/staleness_max"] for row in rows] == [0, 1, 0, 0, 0]
    assert run.state.next_ordinal == 10


def test_rollouts_of_weights_older_than_the_bound_are_never_trained_on(run):
    run(steps=5, staleness=1, save_every=2)
    with pytest.raises(RunError, match="a token of policy version 1 reached version 3: bound=1"):
        run(steps=5, staleness=1, saved={3: run.saved[2]})
    assert not calls(run.log, "train")


def without_times(rows: list[dict]) -> list[dict]:
    return [{k: v for k, v in row.items() if not k.startswith(("timing/", "tokens_per_s"))} for row in rows]
