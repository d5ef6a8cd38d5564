"""The file of a checkpoint's groups reads as it was written, or names the way back."""

import pytest

from rl.errors import RunError
from rl.observe.checkpoint_folders import ROLLOUTS, StepFolders
from rl.observe.record import RunRecord
from rl.observe.rollout_files import read_groups
from tests.kit.records import rollout


def groups():
    return {
        prompt_id: [rollout(prompt_id, sample, (prompt_id, 3 - sample)) for sample in range(3)]
        for prompt_id in (9, 2)
    }


@pytest.mark.parametrize("written", [groups(), {}], ids=["ragged", "none"])
def test_groups_come_back_bit_for_bit_and_in_order(tmp_path, written):
    record = RunRecord(tmp_path / "run")
    checkpoints = StepFolders(record.checkpoints)
    record.write_groups(checkpoints, 3, written)
    read = read_groups(checkpoints.path(3) / ROLLOUTS)
    assert read == written
    assert [*read] == [*written]
    assert repr(read) == repr(written)  # types too: plain ints and floats


def test_a_damaged_file_is_named_with_the_way_back(tmp_path):
    path = tmp_path / "step-3" / "rollouts.parquet"
    with pytest.raises(
        RunError, match=r"step-3/rollouts.parquet cannot be read: .*; deleting .*/step-3 goes back"
    ):
        read_groups(path)
