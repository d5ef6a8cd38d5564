"""The file of a checkpoint's groups reads as it was written, or is refused as damaged."""

import math
import zipfile
from pathlib import Path

import numpy as np
import pytest

from rl.errors import RunError
from rl.metrics import Value
from rl.trainers.saved_groups import read_groups, write_groups
from rl.types import Completion, Prompt, Rollout


def rollout(prompt: Prompt, sample: int, length: int) -> Rollout:
    completion = Completion(
        tokens=[2**31 - 1 - i for i in range(length)],
        logprobs=[-math.pi / (i + 1) for i in range(length)],
        versions=[7 + i for i in range(length)],
        finish_reason="stop",
    )
    metrics = {"correct": 0.1 + sample, "odd": math.inf, "calls": Value.of(0.3, "std", 2.0)}
    return Rollout.single_turn(
        prompt,
        completion,
        sample=sample,
        text="é\n\u2028",
        reward=1 / 3,
        metrics=metrics,
        turn_rewards=(0.1, 0.2),
        turn_lengths=(1, length - 1),
    )


def groups():
    prompts = [
        Prompt(prompt_id=prompt_id, tokens=[4] * prompt_id, text="q\n", answer="", task="t")
        for prompt_id in (9, 2)
    ]
    return {
        prompt.prompt_id: [rollout(prompt, sample, 3 - sample) for sample in range(3)]
        for prompt in prompts
    }


@pytest.mark.parametrize("written", [groups(), {}], ids=["ragged", "none"])
def test_groups_come_back_bit_for_bit_and_in_order(tmp_path, written):
    path = tmp_path / "rollouts.npz"
    write_groups(path, written)
    read = read_groups(path)
    assert read == written
    assert [*read] == [*written]
    assert repr(read) == repr(written)  # types too: plain ints and floats
    assert [*tmp_path.iterdir()] == [path]


def test_a_file_of_another_version_is_refused_as_such(tmp_path):
    path = tmp_path / "rollouts.npz"
    write_groups(path, groups())
    with np.load(path) as archive:
        older = {name: archive[name] for name in archive.files if name != "sampled"}
    np.savez(path, **older)
    with pytest.raises(RunError, match=r"rollouts.npz was written by another version of Tiller"):
        read_groups(path)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-30])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        content[archive.getinfo("logprobs.npy").header_offset + 200] ^= 1
    path.write_bytes(content)


def empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("damage", [Path.unlink, cut, flip, empty])
def test_a_damaged_file_is_named_with_the_way_back(tmp_path, damage):
    path = tmp_path / "step-3" / "rollouts.npz"
    path.parent.mkdir()
    write_groups(path, groups())
    damage(path)
    with pytest.raises(
        RunError, match=r"step-3/rollouts.npz cannot be read: .*; deleting .*/step-3 goes back"
    ):
        read_groups(path)
