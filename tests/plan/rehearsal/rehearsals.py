"""Rehearsals in processes that are forked from one that has imported everything."""

import shlex
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

from rl.plan.rehearsal.start import NOT_REHEARSED

DEADLINE_S = 240
Change = Callable[[], None]


def planned_bytes(planned: dict[str, int]) -> int:
    """Return the sum of the planned sizes by item that a rehearsal has too."""
    return sum(bytes for name, bytes in planned.items() if name not in NOT_REHEARSED)


class Rehearsals:
    """Process that forks one for each rehearsal, because a rehearsal changes torch."""

    def __init__(self) -> None:
        self._warm = ProcessPoolExecutor(1, mp_context=get_context("spawn"))

    def of(
        self,
        arguments: str,
        *,
        rank: int = 0,
        role: str = "trainer",
        change: Change | None = None,
    ) -> dict[str, Any]:
        """Return the result of a role, after ``change`` changed Tiller's code, with ``planned``
        sizes by item.
        """
        job = self._warm.submit(_forked, arguments, rank, role, change)
        found = job.result(timeout=DEADLINE_S)
        if isinstance(found, str):
            raise AssertionError(found)
        return found

    def close(self) -> None:
        self._warm.shutdown()


def _forked(arguments: str, rank: int, role: str, change: Change | None) -> dict[str, Any] | str:
    import rl.plan.rehearsal.rehearse  # noqa: F401, so that no fork imports it again

    context = get_context("fork")
    reads, writes = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(writes, arguments, rank, role, change))
    process.start()
    writes.close()
    try:
        if not reads.poll(DEADLINE_S):
            process.kill()
            return f"{arguments}: nothing within {DEADLINE_S} s"
        return reads.recv()  # type: ignore[no-any-return]
    except EOFError:
        return f"{arguments}: the process died"
    finally:
        process.join()


def _send(writes: Any, *job: Any) -> None:
    import traceback

    try:
        writes.send(_rehearsed(*job))
    except BaseException:
        writes.send(traceback.format_exc())


def _rehearsed(arguments: str, rank: int, role: str, change: Change | None) -> dict[str, Any]:
    import warnings

    from rl.cli import parse_config
    from rl.plan.memory import all_ranks
    from rl.plan.rehearsal.rehearse import fake_device, rehearse
    from rl.plan.setting import Setting

    warnings.simplefilter("ignore")
    setting = Setting(parse_config(shlex.split(arguments), program="rl.plan")[1])
    planned = next(each for each in all_ranks(setting) if (each.mesh, each.rank) == (role, rank))
    if change is not None:
        change()
    result = rehearse(fake_device(setting), setting, role, rank)
    items = {item.name: item.bytes for item in planned.items if not item.on_host}
    return result | {"planned": items}
