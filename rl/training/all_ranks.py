"""Steps that the ranks take together. If one rank fails, all ranks raise its error."""

import contextlib
from collections.abc import Callable, Iterator
from typing import TypeVar

from torch.distributed.checkpoint.api import CheckpointException

from rl.compat.torch_checkpoint import all_ranks
from rl.errors import RunError, StorageFull, is_full

T = TypeVar("T")

LOST_WRITE = "unexpected pos"
"""Words of torch.save after a write that failed. The OSError does not reach other ranks."""


def on_first_rank(what: str, step: Callable[[], T], *, advice: str = "") -> T:
    """Run ``step`` on rank 0 and return its result on every rank.

    Raises RunError, on every rank, if ``step`` fails.
    """
    with failures_as_run_error(what, advice=advice):
        return all_ranks().broadcast(what, step)


def on_every_rank(what: str, step: Callable[[], T]) -> list[T]:
    """Run ``step`` on every rank and return all results on every rank.

    Raises RunError, on every rank, if ``step`` fails on any rank.
    """
    with failures_as_run_error(what):
        return all_ranks().all_gather(what, step)


@contextlib.contextmanager
def failures_as_run_error(what: str, *, advice: str = "") -> Iterator[None]:
    """Turn DCP's CheckpointException into a RunError that names the first failed rank and the
    cause.
    """
    try:
        yield
    except CheckpointException as error:  # a BaseException: it would end the actor silently
        rank, (cause, _) = next(iter(error.failures.items()))
        if isinstance(cause, RunError):
            raise cause from error
        kind = StorageFull if is_full(cause) or LOST_WRITE in str(cause) else RunError
        if LOST_WRITE in str(cause):
            advice = f": a write failed, since the disk is full or broken{advice}"
        raise kind(
            f"{what} failed on rank {rank}: {type(cause).__name__}: {cause}{advice}"
        ) from error
