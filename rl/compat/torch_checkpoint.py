"""Steps that ranks take together, and the types in a checkpoint's metadata, from torch's DCP."""

from torch.distributed.checkpoint._nested_dict import set_element
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING
from torch.distributed.checkpoint.utils import _DistWrapper
from torch.serialization import _get_layout

__all__ = ["METADATA_PARTS", "all_ranks", "set_element"]

RELIES_ON = (
    # DefaultLoadPlanner.load_bytes, which reads and sets, allows any pickle
    "torch.distributed.checkpoint._nested_dict:set_element(root_dict, path, value)",
    # metadata files name these
    "torch.distributed.checkpoint.filesystem:_StorageInfo",
    "torch.distributed.checkpoint.metadata:_MEM_FORMAT_ENCODING",
    "torch.serialization:_get_layout",
    # torch.distributed's collectives do not pass exceptions on
    "torch.distributed.checkpoint.utils:_DistWrapper(group, use_dist, coordinator_rank)",
    "torch.distributed.checkpoint.utils:_DistWrapper.broadcast(step, map_fun)"
    " all_gather(step, map_fun)",
)

METADATA_PARTS = (_StorageInfo, _MEM_FORMAT_ENCODING, _get_layout)
"""Classes and function that the pickled metadata of a checkpoint names."""


def all_ranks() -> _DistWrapper:
    """Return the collectives of all ranks: ``broadcast(what, step)`` returns the result of rank 0,
    and ``all_gather(what, step)`` the results of all ranks.

    Both raise CheckpointException, on every rank, if ``step`` fails on one of them.
    """
    return _DistWrapper(None, True, 0)
