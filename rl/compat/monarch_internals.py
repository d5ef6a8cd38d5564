"""Monarch's command that starts a process, and the rank that a failure names."""

import re

from monarch._rust_bindings.monarch_hyperactor.host_mesh import BootstrapCommand
from monarch.actor import MeshFailure

__all__ = ["BootstrapCommand", "failed_rank"]


def failed_rank(failure: MeshFailure) -> tuple[int, str]:
    """Return the rank that died and the reason, from the text of ``failure``. If the text names no
    rank, return 0 and the whole text.
    """
    parts = re.fullmatch(
        r"MeshFailure\(.*crashed_ranks=\[(\d+).*?event=(.*)\)", str(failure), re.DOTALL
    )
    return (int(parts[1]), parts[2]) if parts else (0, str(failure))
