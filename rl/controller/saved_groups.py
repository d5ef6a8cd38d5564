"""The file of a checkpoint that holds sampled groups: what is long as arrays, the rest as JSON."""

import json
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from rl.controller.ledger import Group
from rl.disk import write_whole
from rl.errors import RunError
from rl.types import Completion, Prompt, Rollout

Arrays = dict[str, np.ndarray]

COLUMNS: dict[str, DTypeLike] = {"tokens": np.int32, "logprobs": np.float64, "versions": np.int32}
"""Per-token lists of a completion, by field; float64 holds a Python float exactly."""


def write_groups(path: Path, groups: dict[int, Group]) -> None:
    """Write ``groups``, by prompt_id. Complete on disk on return.

    The file is a numpy archive. ``groups`` is UTF-8, one line of JSON per group. ``prompt_tokens``
    [P] has the prompts of all groups end to end and ``prompt_lengths`` [G] says where to cut.
    ``tokens``, ``logprobs`` and ``versions`` [T] have all completions end to end, cut by
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
            return _groups({name: archive[name] for name in archive.files})
    except (OSError, ValueError, KeyError, EOFError, TypeError, zipfile.BadZipFile) as error:
        raise RunError(
            f"{path} cannot be read: {type(error).__name__}: {error}; deleting {path.parent} goes "
            "back to the checkpoint before it"
        ) from error


def _arrays(groups: dict[int, Group]) -> Arrays:
    completions = [rollout.completion for group in groups.values() for rollout in group]
    prompts = [group[0].prompt.tokens for group in groups.values()]
    lines = "\n".join(json.dumps(_line(prompt_id, group)) for prompt_id, group in groups.items())
    return {
        "groups": np.frombuffer(lines.encode(), dtype=np.uint8),
        "prompt_lengths": np.array([len(tokens) for tokens in prompts], dtype=np.int64),
        "prompt_tokens": _joined(prompts, np.int32),
        "lengths": np.array([len(each.tokens) for each in completions], dtype=np.int64),
        **{
            name: _joined((getattr(each, name) for each in completions), kind)
            for name, kind in COLUMNS.items()
        },
    }


def _groups(arrays: Arrays) -> dict[int, Group]:
    prompts = _pieces(arrays["prompt_tokens"], arrays["prompt_lengths"])
    columns = [_pieces(arrays[name], arrays["lengths"]) for name in COLUMNS]
    tokens = (dict(zip(COLUMNS, each, strict=True)) for each in zip(*columns, strict=True))
    groups: dict[int, Group] = {}
    for line in arrays["groups"].tobytes().decode().splitlines():
        group = json.loads(line)
        prompt = Prompt(tokens=next(prompts), **group["prompt"])
        groups[group["prompt_id"]] = [
            Rollout(prompt=prompt, completion=Completion(**next(tokens), **completion), **rollout)
            for rollout, completion in group["rollouts"]
        ]
    return groups


def _line(prompt_id: int, group: Group) -> dict[str, Any]:
    return {
        "prompt_id": prompt_id,
        "prompt": _fields(group[0].prompt, but=["tokens"]),
        "rollouts": [
            (
                _fields(rollout, but=["prompt", "completion"]),
                _fields(rollout.completion, but=COLUMNS),
            )
            for rollout in group
        ],
    }


def _fields(value: Any, *, but: Iterable[str]) -> dict[str, Any]:
    return {
        field.name: getattr(value, field.name) for field in fields(value) if field.name not in but
    }


def _joined(lists: Iterable[Sequence[float]], kind: DTypeLike) -> np.ndarray:
    return np.concatenate([np.empty(0, kind), *(np.array(each, dtype=kind) for each in lists)])


def _pieces(column: np.ndarray, lengths: np.ndarray) -> Iterator[list[Any]]:
    end = 0
    for length in lengths.tolist():
        end += length
        yield column[end - length : end].tolist()
