"""How Monarch starts a process, and how it describes a failure."""

import re

from monarch._rust_bindings.monarch_hyperactor.host_mesh import BootstrapCommand
from monarch.actor import MeshFailure

__all__ = ["BootstrapCommand", "failed_rank"]

RELIES_ON = {
    "monarch._rust_bindings.monarch_hyperactor.host_mesh:"
    "BootstrapCommand(program, arg0, args, env)": (
        "HostMesh.spawn_procs takes one, and monarch.actor does not export it"
    ),
    "monarch.actor:MeshFailure.mesh_name": "it is in the type's stub alone",
}


def failed_rank(failure: MeshFailure) -> tuple[int, str]:
    """Return the rank that died and why; rank 0 and the whole text where it names no rank.

    Only the text of a failure says which rank it is.
    """
    parts = re.fullmatch(
        r"MeshFailure\(.*crashed_ranks=\[(\d+).*?event=(.*)\)", str(failure), re.DOTALL
    )
    return (int(parts[1]), parts[2]) if parts else (0, str(failure))
