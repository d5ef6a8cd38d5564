"""Rehearsals in processes that are forked from one that has imported everything."""

import re
import shlex
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

from rl.plan.rehearsal.rehearsed_batches import MICRO_BATCHES
from rl.plan.rehearsal.start import NOT_REHEARSED
from rl.plan.report import NAMES
from tests.warm import FORK

DEADLINE_S = 900
PHASES = {"forward 2": False, "forward_backward 2": True}
"""Phases of the last step with collectives of large tensors, and whether they train."""
KNOWN = {
    "rl/training/token_metrics.py over_ranks",  # micro-batches; weight of the whole batch
    "rl/training/micro_batches.py outputs_of",
    "rl/training/gradient.py _norm",
    "rl/training/token_metrics.py reduce",
    "rl/training/routing.py metrics",
    # torchtitan's, in each micro-batch
    "torchtitan/models/common/attention.py create_varlen_metadata_for_document",
    "torchtitan/models/common/token_dispatcher.py _sync_token_count_exchange",
}
"""Lines at which a step may wait for the device."""
Change = Callable[[], None]


def planned_bytes(planned: dict[str, int]) -> int:
    """Return the sum of the planned sizes by item that a rehearsal has too."""
    return sum(bytes for name, bytes in planned.items() if name not in NOT_REHEARSED)


def moved_bytes(found: dict[str, Any]) -> dict[str, Counter[str]]:
    """Return the bytes of the collectives by phase and kind."""
    moved = {each["phase"]: Counter() for each in found["phases"] if each["phase"] in PHASES}
    for each in found["collectives"]:
        if each["phase"] in moved:
            moved[each["phase"]][NAMES.get(each["kind"], each["kind"])] += each["bytes"]
    return moved


def waits_of(rehearsed: dict) -> list[dict]:
    """Return the waits of steps, with ``place``, the line without its number."""
    return [
        wait | {"place": re.sub(r":\d+", "", wait["line"])}
        for wait in rehearsed["syncs"]
        if wait["phase"] != "init"
    ]


def is_known(wait: dict) -> bool:
    """Return whether the wait may happen."""
    return wait["place"] in KNOWN


class Rehearsals:
    """Process that forks one for each rehearsal, because a rehearsal changes torch."""

    def __init__(self) -> None:
        self._warm = ProcessPoolExecutor(1, mp_context=FORK)

    def of(
        self,
        arguments: str,
        *,
        rank: int = 0,
        role: str = "trainer",
        change: Change | None = None,
        allocated: int = 0,
    ) -> dict[str, Any]:
        """Return the result of a role, after ``change`` changed Tiller's code, with the plan's
        sizes by item as ``planned`` and ``planned_on_host``, and its bytes of collectives as
        ``planned_moves``. ``token`` is the planned size of a token in the KV cache. A negative rank
        counts from the last one. ``allocated`` is the number of steps for the allocator.
        """
        job = self._warm.submit(_forked, arguments, rank, role, change, allocated)
        found = job.result(timeout=DEADLINE_S)
        if isinstance(found, str):
            raise AssertionError(found)
        return found

    def close(self) -> None:
        self._warm.shutdown()


def _forked(arguments: str, *job: Any) -> dict[str, Any] | str:
    import rl.generation.vllm_model  # so that no fork imports these again
    import rl.plan.rehearsal.rehearse
    import rl.trainers.algorithm  # noqa: F401

    context = get_context("fork")
    reads, writes = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(writes, arguments, *job))
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


def _rehearsed(
    arguments: str, rank: int, role: str, change: Change | None, allocated: int
) -> dict[str, Any]:
    import warnings

    from rl.cli.arguments import parse_config
    from rl.generation.generator_config import kv_bytes_per_token
    from rl.plan.memory import all_ranks
    from rl.plan.planned_run import GENERATOR, PlannedRun
    from rl.plan.rehearsal.rehearse import fake_device, rehearse

    warnings.simplefilter("ignore")
    setting = PlannedRun(parse_config(shlex.split(arguments), program="rl.plan")[1])
    rank %= setting.rehearsed[role]
    planned = next(each for each in all_ranks(setting) if (each.mesh, each.rank) == (role, rank))
    if change is not None:
        change()
    device = fake_device(setting, generates=role == GENERATOR)
    result = rehearse(device, setting, role, rank, allocated=allocated)
    items = {item.name: item.bytes for item in planned.items if not item.on_host}
    phases = PHASES if role in setting.roles else {}
    moved = {phase: _planned_bytes(setting, role, train) for phase, train in phases.items()}
    on_host = {item.name: item.bytes for item in planned.items if item.on_host}
    token = kv_bytes_per_token(setting.rl.generator, setting.shape) if setting.generators else 0
    plan = {"planned": items, "planned_on_host": on_host, "planned_moves": moved, "token": token}
    return result | plan


def _planned_bytes(setting: Any, role: str, train: bool) -> Counter[str]:
    from rl.plan.collectives import collectives_of

    bytes: Counter[str] = Counter()
    for each in collectives_of(setting, role, train=train):
        bytes[each.kind] += each.bytes * (1 if each.once else MICRO_BATCHES)
    return bytes
