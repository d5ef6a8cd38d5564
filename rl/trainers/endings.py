"""Ways in which a run ends before its last step: a signal or a failure."""

import asyncio
import contextlib
import os
import signal
import threading
import traceback
from types import FrameType
from typing import TYPE_CHECKING, Any, Self

from rl.errors import (
    EXIT_AGAIN,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    ActorFailure,
    Interrupted,
    RunError,
    end_program,
    said_by,
)
from rl.frames import place_of
from rl.trainers.run_folder import RunFolder

if TYPE_CHECKING:
    from rl.trainers.life_cycle import LifeCycle

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


class Interrupts:
    """Signal handlers of a run, inside a ``with`` block in a coroutine.

    - The first signal makes the run finish its step, save and leave.
    - Ctrl-C after it ends the program at once.

    In a thread other than the main one the block does nothing, since Python handles signals in the
    main thread alone.
    """

    def __init__(self, trainer: "LifeCycle[Any]", run: RunFolder):
        self.name = ""
        """Name of the first signal; empty before it."""
        self._trainer = trainer
        self._run = run
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                handler = signal.getsignal(number)
                if number != signal.SIGHUP or handler != signal.SIG_IGN:  # nohup(1)
                    # the loop's own handlers wait for a step that blocks the loop
                    self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def interrupted(self) -> Interrupted:
        """Return the error that ends the run after the signal."""
        step = max(self._trainer.step, self._run.saved)  # a resumed run may not have loaded yet
        error = Interrupted(
            f"interrupted by {self.name or 'leave()'} after step {step}; "
            f"{self._run.how_to_resume()}"
        )
        error.exit_code = EXIT_INTERRUPTED if self.name == "SIGINT" else EXIT_AGAIN
        return error

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.name and number == signal.SIGINT:
            text = (
                f"\nleft at once: what came after step {self._run.saved} is lost; "
                f"{self._run.how_to_resume()}\n"
            )
            with contextlib.suppress(OSError):  # the terminal is gone
                os.write(2, text.encode())  # print may be what was interrupted
            end_program(EXIT_INTERRUPTED)  # the processes of the run end with their parent
        if self.name or self._loop.is_closed():
            return
        self.name = signal.Signals(number).name
        self._loop.call_soon_threadsafe(self._leave)

    def _leave(self) -> None:
        trainer = self._trainer
        first = "leaving"
        if trainer.is_training:
            if trainer.is_in_step:
                first = f"finishing step {trainer.step + 1}, then saving"
            elif 0 < trainer.step < trainer.total_steps:
                first = f"saving step {trainer.step}"
            trainer.leave()
        elif self._task is not None:
            self._task.cancel()
        again = "again " if self.name == "SIGINT" else ""
        self._run.progress.note(f"{self.name}: {first}; Ctrl-C {again}leaves at once")


def fail(error: BaseException, run: RunFolder, trainer: "LifeCycle[Any] | None" = None) -> int:
    """Show what failed, then write ``failure.json``; return the exit code."""
    failure = _facts(error, trainer)
    progress = run.progress
    when = f"after step {trainer.step}" if trainer else "outside the steps"
    progress.error(f"failed {when}: {failure['detail']}\nat {failure['place']}")
    try:
        run.record.write_failure(failure | {"command": run.command})
        run.events.emit("failed", text=failure["detail"])
        progress.error(f"details: {run.folder / 'failure.json'}")
    except RunError as unwritten:
        progress.error(f"no details: {unwritten}")
    progress.error(run.how_to_resume())
    return error.exit_code if isinstance(error, RunError) else EXIT_FAILED


def _facts(error: BaseException, trainer: "LifeCycle[Any] | None") -> dict[str, object]:
    """Return the content of ``failure.json``."""
    first = error if isinstance(error, ActorFailure) else error.__cause__
    detail = str(error) if isinstance(error, RunError) else said_by(error)
    facts: dict[str, object] = {"error": detail.splitlines()[0], "place": place_of(error)}
    if isinstance(first, ActorFailure):
        facts |= first.facts()
    if trainer:
        facts |= trainer.whereabouts()
    return facts | {"detail": detail, "traceback": "".join(traceback.format_exception(error))}
