"""How a run ends before its last step: by a signal or by a failure, and what it says then."""

import asyncio
import contextlib
import os
import signal
import traceback
from pathlib import Path
from types import FrameType

from rl.config import RLConfig
from rl.errors import (
    EXIT_AGAIN,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    ActorFailure,
    RunError,
    end_program,
    said_by,
)
from rl.frames import place_of
from rl.observe.progress import Progress
from rl.observe.record import RunRecord
from rl.step_folders import StepFolders
from rl.trainers.loop import RLTrainer

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


class GoingOn:
    """The command that goes on with a run."""

    def __init__(self, config: RLConfig, folder: Path, command: str):
        given = "" if config.output_dir else f" --output-dir {folder}"
        self.command = f"{command}{given}{'' if config.resume else ' --resume'}"
        self._checkpoints = StepFolders(folder / config.trainer.checkpoint.folder)

    @property
    def saved(self) -> int:
        """The step of the newest complete checkpoint; 0 without one."""
        return max(self._checkpoints.complete(), default=0)

    def __str__(self) -> str:
        step = self.saved
        way = f"go on from step {step}" if step else "nothing is saved; start again"
        return f"{way} with: {self.command}"


class Interrupts:
    """The first signal has the run finish its step, save and leave; Ctrl-C after it ends the
    program at once.
    """

    def __init__(self, trainer: RLTrainer, progress: Progress, going_on: GoingOn):
        self.name = ""
        self.exit_code = EXIT_INTERRUPTED
        self._trainer = trainer
        self._progress = progress
        self._going_on = going_on
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        for number in SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup(1)
                # the loop's own handlers wait for a step that blocks the loop
                signal.signal(number, self._receive)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.name and number == signal.SIGINT:
            text = (
                f"\nleft at once: what came after step {self._going_on.saved} is lost; "
                f"{self._going_on}\n"
            )
            with contextlib.suppress(OSError):  # the terminal is gone
                os.write(2, text.encode())  # print may be what was interrupted
            end_program(EXIT_INTERRUPTED)  # the processes of the run end with their parent
        if self.name or self._loop.is_closed():
            return
        self.name = signal.Signals(number).name
        self.exit_code = EXIT_INTERRUPTED if number == signal.SIGINT else EXIT_AGAIN
        self._loop.call_soon_threadsafe(self._leave)

    def _leave(self) -> None:
        trainer = self._trainer
        first = "leaving"
        if trainer.is_training:
            step = trainer.step
            per_step = trainer.config.rollout.prompts_per_step
            if trainer.ledger.lacks < per_step:
                first = f"finishing step {step + 1}, then saving"
            elif 0 < step < trainer.config.steps:
                first = f"saving step {step}"
            trainer.leave()
        elif self._task is not None:
            self._task.cancel()
        self._progress.note(
            f"{self.name}: {first}; Ctrl-C {'again ' * (self.name == 'SIGINT')}leaves at once"
        )


def fail(
    error: BaseException,
    trainer: RLTrainer | None,
    record: RunRecord,
    progress: Progress,
    going_on: GoingOn,
) -> int:
    """Say what failed, on the screen before ``failure.json``; returns the exit code."""
    failure = _facts(error, trainer)
    when = f"after step {trainer.step}" if trainer else "outside the steps"
    progress.error(f"failed {when}: {failure['detail']}\nat {failure['place']}")
    try:
        record.write_failure(failure | {"command": going_on.command})
        progress.error(f"details: {record.folder / 'failure.json'}")
    except RunError as unwritten:
        progress.error(f"no details: {unwritten}")
    progress.error(str(going_on))
    return error.exit_code if isinstance(error, RunError) else EXIT_FAILED


def _facts(error: BaseException, trainer: RLTrainer | None) -> dict[str, object]:
    """Content of ``failure.json``."""
    first = error if isinstance(error, ActorFailure) else error.__cause__
    detail = str(error) if isinstance(error, RunError) else said_by(error)
    facts: dict[str, object] = {"error": detail.splitlines()[0], "place": place_of(error)}
    if isinstance(first, ActorFailure):
        facts |= {"actor": first.actor, "rank": first.rank, "call": first.call}
    if trainer:
        facts |= {
            "step": trainer.step,
            "policy_version": trainer.session.version,
            "generator_versions": trainer.session.generator_versions,
            "ledger": trainer.ledger.counts(),
        }
    return facts | {"detail": detail, "traceback": "".join(traceback.format_exception(error))}
