"""Protocol of trainers: one object for programs, scripts and coroutines."""

import asyncio
import signal
import threading

import pytest

from rl.errors import Interrupted, RunError
from rl.trainers.rl import RLTrainer
from tests.trainers.loops import evaluating


class Leaves(RLTrainer):
    leaves_after = 0

    async def between_steps(self):
        await super().between_steps()
        if self.run.is_training and self.step == self.leaves_after:
            self.leave()


def longest(groups):
    return {"longest": max(each.sampled_count for group in groups for each in group)}


def in_script(work):
    work()


def in_notebook(work):
    """Call ``work`` as a cell of a notebook does: an event loop runs in its thread."""

    async def cell():
        work()

    asyncio.run(cell())


@pytest.mark.parametrize("within", [in_script, in_notebook])
def test_a_script_and_a_cell_train_leave_go_on_and_evaluate(run, within):
    options = {"steps": 2, "save_every": 1, "command": "", "fields": evaluating(every=0)}
    made = run.make(kind=Leaves, **options)
    with pytest.raises(RunError, match="the trainer is not open; call train or evaluate first"):
        _ = made.model

    def work():
        with made as trainer:
            trainer.leaves_after = 1
            said = r"after step 1; go on from step 1 with: config\.output_dir = '.*/run'; config"
            with pytest.raises(Interrupted, match=said):
                trainer.train()
            state = trainer.train()
            assert (state.step, state.version, trainer.step) == (2, 2, 2)
            scores = trainer.evaluate(metric_calculator=longest)
        assert scores["eval/prompts"] == 3
        assert scores["eval/longest"] >= 1
        assert not run.trainer.is_running

    within(work)


class Interrupts(RLTrainer):
    interrupts = 0

    async def between_steps(self):
        await super().between_steps()
        if self.run.is_training and self.interrupts:
            interrupt_main_thread()
            await self.run.changed.until(lambda: self.run.leaving)
        if self.run.is_training and self.interrupts > 1:
            interrupt_main_thread()
            await asyncio.Event().wait()


def interrupt_main_thread():
    signal.pthread_kill(threading.main_thread().ident, signal.SIGALRM)


def in_interrupted_notebook(work):
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    in_notebook(work)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("interrupts, error", [(1, Interrupted), (2, KeyboardInterrupt)])
def test_the_first_interrupt_of_a_cell_leaves_and_the_second_cancels(run, interrupts, error):
    made = run.make(kind=Interrupts, steps=2, save_every=1, command="")

    def work():
        with made as trainer:
            trainer.interrupts = interrupts
            with pytest.raises(error):
                trainer.train()
            trainer.interrupts = 0
            assert trainer.train().step == 2

    in_interrupted_notebook(work)


def test_an_interrupt_while_the_first_is_handled_cancels(run, monkeypatch):
    made = run.make(kind=Interrupts, steps=2, save_every=1, command="")

    def interrupted(text):
        if text.startswith("interrupt"):
            raise KeyboardInterrupt

    def work():
        with made as trainer:
            trainer.interrupts = 1
            with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                patch.setattr(trainer.run.progress, "note", interrupted)
                trainer.train()
            trainer.interrupts = 0
            assert trainer.train().step == 2

    in_interrupted_notebook(work)


async def test_a_coroutine_awaits_the_same_verbs(run):
    async with run.make(steps=2, fields=evaluating(every=0)) as trainer:
        assert (await trainer.train()).step == 2
        assert (await trainer.evaluate())["eval/prompts"] == 3
