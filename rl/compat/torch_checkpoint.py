"""Steps that ranks take together, and the types in a checkpoint's metadata, from torch's DCP."""

from collections.abc import Callable
from typing import TypeVar

from torch.distributed.checkpoint._nested_dict import set_element
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING
from torch.distributed.checkpoint.utils import _DistWrapper
from torch.serialization import _get_layout

__all__ = ["METADATA_PARTS", "first_rank_broadcasts", "ranks_gather", "set_element"]

T = TypeVar("T")

RELIES_ON = (
    # DefaultLoadPlanner.load_bytes, which reads and sets, allows any pickle
    "torch.distributed.checkpoint._nested_dict:set_element(root_dict, path, value)",
    # metadata files name these
    "torch.distributed.checkpoint.filesystem:_StorageInfo",
    "torch.distributed.checkpoint.metadata:_MEM_FORMAT_ENCODING",
    "torch.serialization:_get_layout",
    # torch.distributed's collectives do not pass exceptions on
    "torch.distributed.checkpoint.utils:_DistWrapper(group, use_dist, coordinator_rank)",
    "torch.distributed.checkpoint.utils:_DistWrapper.broadcast(step, map_fun)",
    "torch.distributed.checkpoint.utils:_DistWrapper.all_gather(step, map_fun)",
)

METADATA_PARTS = (_StorageInfo, _MEM_FORMAT_ENCODING, _get_layout)
"""Classes and function that the pickled metadata of a checkpoint names."""


def first_rank_broadcasts(what: str, step: Callable[[], T]) -> T:
    """Run ``step`` on rank 0 and return its result on every rank.

    Raises CheckpointException, on every rank, if ``step`` fails.
    """
    return _DistWrapper(None, True, 0).broadcast(what, step)


def ranks_gather(what: str, step: Callable[[], T]) -> list[T]:
    """Run ``step`` on every rank and return all results on every rank.

    Raises CheckpointException, on every rank, if ``step`` fails on any rank.
    """
    return _DistWrapper(None, True, 0).all_gather(what, step)
