"""File of sampled groups in a checkpoint."""

from itertools import chain
from pathlib import Path

from rl.errors import RunError
from rl.observe.rollouts import Chunk, read_rollouts, write_rollouts
from rl.trainers.ledger import Group


def write_groups(path: Path, groups: dict[int, Group]) -> None:
    """Write ``groups``, by prompt_id. On disk on return."""
    rollouts = [*chain.from_iterable(groups.values())]
    write_rollouts(path, [Chunk(rollouts=rollouts, columns={})])


def read_groups(path: Path) -> dict[int, Group]:
    """Return what ``write_groups`` wrote, in the same order.

    Raises RunError if the file is missing or damaged.
    """
    try:
        chunks = read_rollouts(path)
    except RunError as error:
        advice = f"deleting {path.parent} goes back to the checkpoint before it"
        raise RunError(f"{error}; {advice}") from error
    groups: dict[int, Group] = {}
    for rollout in chain.from_iterable(chunk.rollouts for chunk in chunks):
        groups.setdefault(rollout.prompt.prompt_id, []).append(rollout)
    return groups
