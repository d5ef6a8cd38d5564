"""Steps that ranks take together, and the types in a checkpoint's metadata, from torch's DCP."""

from torch.distributed.checkpoint._nested_dict import set_element
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING
from torch.distributed.checkpoint.utils import _DistWrapper
from torch.serialization import _get_layout

__all__ = ["METADATA_PARTS", "all_ranks", "set_element"]


METADATA_PARTS = (_StorageInfo, _MEM_FORMAT_ENCODING, _get_layout)
"""Classes and function that the pickled metadata of a checkpoint names."""


def all_ranks() -> _DistWrapper:
    """Return the collectives of all ranks: ``broadcast(what, step)`` returns the result of rank 0,
    and ``all_gather(what, step)`` the results of all ranks.

    Both raise CheckpointException, on every rank, if ``step`` fails on one of them.
    """
    return _DistWrapper(None, True, 0)
