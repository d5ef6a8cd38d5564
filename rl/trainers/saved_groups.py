"""File of sampled groups in a checkpoint: arrays of tokens, and JSON for the rest."""

import json
import zipfile
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from rl.disk import write_whole
from rl.errors import RunError
from rl.metrics import Entry, Value
from rl.trainers.ledger import Group
from rl.types import Prompt, Rollout, Sequence

Arrays = dict[str, np.ndarray]

COLUMNS = {"tokens": np.int32, "sampled": np.bool_, "logprobs": np.float32, "versions": np.int32}
"""Arrays of a sequence."""


def write_groups(path: Path, groups: dict[int, Group]) -> None:
    """Write ``groups``, by prompt_id. Complete on disk on return.

    The file is a numpy archive. ``groups`` is UTF-8, one line of JSON per group. ``prompt_tokens``
    [P] has the prompts of all groups end to end and ``prompt_lengths`` [G] their lengths.
    ``tokens``, ``sampled``, ``logprobs`` and ``versions`` [T] have all sequences end to end, cut by
    ``lengths`` [N], in the order of the lines.
    """
    arrays = _arrays(groups)
    write_whole(path, lambda file: np.savez(file, allow_pickle=False, **arrays))


def read_groups(path: Path) -> dict[int, Group]:
    """Return what ``write_groups`` wrote, in the same order.

    Raises RunError if the file is missing or damaged.
    """
    try:
        with np.load(path, allow_pickle=False) as archive:
            _require_known(path, archive.files)
            return _groups({name: archive[name] for name in archive.files})
    except (OSError, ValueError, KeyError, EOFError, TypeError, zipfile.BadZipFile) as error:
        raise RunError(
            f"{path} cannot be read: {type(error).__name__}: {error}; deleting {path.parent} goes "
            "back to the checkpoint before it"
        ) from error


def _require_known(path: Path, names: list[str]) -> None:
    if {*COLUMNS} - {*names}:
        raise RunError(
            f"{path} was written by another version of Tiller, whose runs cannot be resumed; "
            "start anew with another output_dir"
        )


def _arrays(groups: dict[int, Group]) -> Arrays:
    rollouts = [rollout for group in groups.values() for rollout in group]
    sequences = [sequence for rollout in rollouts for sequence in rollout.sequences]
    prompts = [group[0].prompt.tokens for group in groups.values()]
    lines = "\n".join(json.dumps(_line(prompt_id, group)) for prompt_id, group in groups.items())
    return {
        "groups": np.frombuffer(lines.encode(), dtype=np.uint8),
        "prompt_lengths": np.array([len(tokens) for tokens in prompts], dtype=np.int64),
        "prompt_tokens": np.array([token for tokens in prompts for token in tokens], np.int32),
        "lengths": np.array([len(sequence) for sequence in sequences], dtype=np.int64),
        **{
            name: np.concatenate([np.empty(0, kind), *(getattr(each, name) for each in sequences)])
            for name, kind in COLUMNS.items()
        },
    }


def _groups(arrays: Arrays) -> dict[int, Group]:
    prompts = iter(_cut(arrays["prompt_tokens"], arrays["prompt_lengths"]))
    columns = {name: iter(_cut(arrays[name], arrays["lengths"])) for name in COLUMNS}

    def sequence() -> Sequence:
        return Sequence(**{name: next(column) for name, column in columns.items()})

    groups: dict[int, Group] = {}
    for line in arrays["groups"].tobytes().decode().splitlines():
        group = json.loads(line)
        prompt = Prompt(tokens=next(prompts).tolist(), **group["prompt"])
        groups[group["prompt_id"]] = [
            Rollout(
                prompt=prompt,
                sequences=tuple(sequence() for _ in range(count)),
                **rollout
                | {
                    "metrics": _metrics(rollout["metrics"]),
                    "turn_rewards": tuple(rollout["turn_rewards"]),
                    "turn_lengths": tuple(rollout["turn_lengths"]),
                },
            )
            for rollout, count in group["rollouts"]
        ]
    return groups


def _metrics(content: dict[str, Any]) -> dict[str, Entry]:
    """Return metrics as they were before they became JSON, in which a Value is a list."""
    return {
        name: Value(*entry) if isinstance(entry, list) else entry for name, entry in content.items()
    }


def _line(prompt_id: int, group: Group) -> dict[str, Any]:
    return {
        "prompt_id": prompt_id,
        "prompt": _fields(group[0].prompt, without=["tokens"]),
        "rollouts": [
            (_fields(rollout, without=["prompt", "sequences"]), len(rollout.sequences))
            for rollout in group
        ],
    }


def _fields(value: Any, *, without: list[str]) -> dict[str, Any]:
    names = (field.name for field in fields(value))
    return {name: getattr(value, name) for name in names if name not in without}


def _cut(column: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
    return np.split(column, lengths.cumsum()[:-1]) if len(lengths) else []
