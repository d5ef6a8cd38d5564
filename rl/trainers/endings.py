"""Ends of a run before its last step: by a signal or a failure."""

import asyncio
import contextlib
import os
import signal
from typing import Any, Self

from rl.config.users_code import place_of
from rl.errors import (
    EXIT_AGAIN,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    ActorFailure,
    GroupLost,
    Interrupted,
    RunError,
    end_program,
    error_text,
    trace_of,
)
from rl.host.process import Signals
from rl.trainers.advice import FailedCall, advice_after, lost_group
from rl.trainers.run import Run
from rl.trainers.run_folder import RunFolder


class Interrupts(Signals):
    """Signal handlers of a run, inside a ``with`` block in a coroutine.

    - The first signal makes the run finish its step, save and leave.
    - Ctrl-C after it ends the program at once.
    """

    def __init__(self, run: Run):
        super().__init__(self._leave, self._end)
        self._run = run
        self._folder = run.claim()

    def __enter__(self) -> Self:
        self._task = asyncio.current_task()
        return super().__enter__()

    async def train(self, step: int = -1) -> dict[str, Any]:
        """Return the summary of :meth:`rl.trainers.run.Run.train_until_done`.

        Raises Interrupted after ``leave`` and after a signal.
        """
        try:
            summary = await self._run.train_until_done(step)
        except asyncio.CancelledError:
            if not self.name:
                raise  # the caller's, or the loop ends
            if self._task is not None:
                self._task.uncancel()
            raise self.interrupted() from None
        if summary is None:
            raise self.interrupted()
        return summary

    def interrupted(self) -> Interrupted:
        """Return the error that ends the run after the signal."""
        step = max(self._run.trainer.step, self._folder.saved)  # before a resumed run has loaded
        error = Interrupted(
            f"interrupted by {self.name or 'leave()'} after step {step}; "
            f"{self._folder.how_to_resume()}"
        )
        error.exit_code = EXIT_INTERRUPTED if self.name == "SIGINT" else EXIT_AGAIN
        return error

    def _end(self, number: int) -> None:
        if number == signal.SIGINT:
            text = (
                f"\nquit immediately: the work after step {self._folder.saved} is lost; "
                f"{self._folder.how_to_resume()}\n"
            )
            with contextlib.suppress(OSError):  # the terminal is gone
                os.write(2, text.encode())  # print may be what was interrupted
            end_program(EXIT_INTERRUPTED)  # the processes of the run end with their parent

    def _leave(self) -> None:
        trainer = self._run.trainer
        first = "leaving"
        if self._run.is_training:
            if self._run.is_in_step:
                first = f"finishing step {trainer.step + 1}, then saving"
            elif 0 < trainer.step < trainer.total_steps:
                first = f"saving step {trainer.step}"
            self._run.leave()
        elif self._task is not None:
            self._task.cancel()
        again = "again " if self.name == "SIGINT" else ""
        self._folder.progress.note(f"{self.name}: {first}; Ctrl-C {again}quits immediately")


def fail(error: BaseException, folder: RunFolder, run: Run | None = None) -> int:
    """Show what failed and what to do, and write ``failure.json``; return the exit code."""
    progress = folder.progress
    facts = facts_of(error)
    detail = detail_of(error)
    when = f"after step {run.trainer.step}" if run else "outside the steps"
    progress.error(f"failed {when}: {detail}\nat {facts['place']}")
    try:
        failed_call = run.keep_failed(error) if run else FailedCall.outside_steps(error, 0)
    except Exception as unwritten:  # the failure itself is reported in any case
        why_not = f"The failing call cannot be made again: {detail_of(unwritten)}"
        failed_call = FailedCall(why_not=why_not)
    cause, advice = advice_after(error, folder, failed_call)
    facts |= {"cause": cause, "advice": advice, "again": failed_call.call}
    facts["command"] = folder.command
    if run is not None:
        facts["step"] = run.trainer.step
    if run is not None and run.is_open:
        session = run.session
        facts["policy_version"] = session.version
        facts |= {"generator_versions": session.generator_versions, **run.trainer.facts()}
    lost = lost_group(error)
    facts |= {"lost_group": facts_of(lost)} if lost is not None else {}
    try:
        folder.record.write_failure(facts | {"detail": detail, "traceback": trace_of(error)})
        folder.events.emit("failed", text=detail)
        progress.error(f"details: {folder.record.failure_path}")
    except RunError as unwritten:
        progress.error(f"no details: {unwritten}")
    for sentence in advice[:-1]:
        progress.error(f"- {sentence}")
    progress.error(folder.how_to_go_on())
    return error.exit_code if isinstance(error, RunError) else EXIT_FAILED


def facts_of(error: BaseException) -> dict[str, Any]:
    """Return what failed where, for ``failure.json``: ``error``, ``type``, ``place``, and for the
    failure of a process ``actor``, ``rank`` and ``call``.
    """
    first = error if isinstance(error, ActorFailure) else error.__cause__
    raised = first.__cause__ if isinstance(first, ActorFailure) else None
    facts: dict[str, Any] = {
        "error": detail_of(error).splitlines()[0],
        "type": (isinstance(error, GroupLost) and error.kind) or type(raised or error).__name__,
        "place": place_of(error),
    }
    return facts | (first.facts() if isinstance(first, ActorFailure) else {})


def detail_of(error: BaseException) -> str:
    """Return the whole text of ``error``."""
    return str(error) if isinstance(error, RunError) else error_text(error)
