"""Files of rollouts read as they were written, or are refused as damaged."""

from pathlib import Path

import numpy as np
import pyarrow.parquet as parquet
import pytest

from rl.errors import RunError
from rl.observe.rollout_files import (
    Chunk,
    RolloutFolder,
    delete_oldest,
    read_rollouts,
    write_rollouts,
)
from tests.kit.records import chunk, rollout, two_chunks


@pytest.fixture
def path(tmp_path):
    return tmp_path / "step-3.parquet"


def test_chunks_come_back_bit_for_bit_and_in_order(path):
    def equal(read: list[Chunk], written: list[Chunk]) -> bool:
        return len(read) == len(written) and all(
            [*one.rollouts] == [*other.rollouts]
            and repr(one.rollouts) == repr(other.rollouts)  # types too: plain ints and floats
            and [*one.columns] == [*other.columns]
            and all(np.array_equal(one.columns[name], other.columns[name]) for name in one.columns)
            for one, other in zip(read, written, strict=True)
        )

    write_rollouts(path, two_chunks())
    assert equal(read_rollouts(path), two_chunks())
    assert [*path.parent.iterdir()] == [path]


def test_a_file_without_rollouts_is_a_file(path):
    write_rollouts(path, [Chunk(rollouts=[], columns={})])
    assert read_rollouts(path) == []


def test_other_programs_read_a_row_per_rollout_with_lists_of_tokens(path):
    write_rollouts(path, two_chunks(), version=12)
    table = parquet.read_table(path)
    assert table.schema.metadata[b"version"] == b"12"
    row = table.to_pylist()[1]
    assert (row["chunk"], row["prompt_id"], row["sample"], row["task"]) == (0, 9, 1, "sums")
    assert (row["stop_reason"], row["reward"]) == ("turns", 1 / 3)
    first, second = row["sequences"]
    assert first["sampled"] == [False, False, True]
    assert second["tokens"][:5] == [4] * 5
    assert second["versions"] == [-1] * 5 + [7, 8]
    assert second["trainer_logprobs"] == [-float(8 + i) for i in range(7)]


def test_files_of_sequences_without_masks_and_experts_have_no_columns_of_these(path):
    write_rollouts(path, [chunk(rollout(1, 0, (2, 2)))])
    names = {*parquet.read_table(path)["sequences"].type.value_type.names}
    write_rollouts(path, two_chunks())
    more = {*parquet.read_table(path)["sequences"].type.value_type.names}
    assert more - names == {"mask_sizes", "mask_words", "experts"}


def test_a_part_of_the_rows_is_kept(path):
    write_rollouts(path, two_chunks(), only=[0, 2])
    found = [each.prompt.prompt_id for one in read_rollouts(path) for each in one.rollouts]
    assert found == [9, 2]


def test_a_file_of_before_there_were_players_has_none(path):
    write_rollouts(path, two_chunks())
    parquet.write_table(parquet.read_table(path).drop_columns("players"), path)
    assert {each.players for one in read_rollouts(path) for each in one.rollouts} == {()}


def test_text_that_utf_8_lacks_is_replaced(path):
    odd = rollout(1, 0, (1, 1))
    object.__setattr__(odd, "text", "a\ud800b")
    write_rollouts(path, [chunk(odd)])
    assert read_rollouts(path)[0].rollouts[0].text == "a?b"


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-30])


def flip(path: Path) -> None:
    """Flip a bit of a token."""
    content = bytearray(path.read_bytes())
    group = parquet.read_metadata(path).row_group(0)
    columns = [group.column(number) for number in range(group.num_columns)]
    tokens = next(each for each in columns if each.path_in_schema.endswith("logprobs.list.element"))
    content[tokens.data_page_offset + tokens.total_compressed_size - 3] ^= 1
    path.write_bytes(content)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def other_columns(path: Path) -> None:
    parquet.write_table(parquet.read_table(path).drop_columns("sequences"), path)


@pytest.mark.parametrize("damage", [Path.unlink, cut, flip, empty, other_columns])
def test_a_damaged_file_is_named(path, damage):
    write_rollouts(path, two_chunks())
    damage(path)
    with pytest.raises(RunError, match=r"step-3.parquet cannot be read: "):
        read_rollouts(path)


def test_the_files_of_the_oldest_steps_of_all_folders_make_room(tmp_path):
    trained = RolloutFolder(tmp_path / "rollouts")
    evaluated = RolloutFolder(tmp_path / "evaluations")
    for step in range(1, 12):
        trained.write(step, two_chunks())
    for step in (3, 9, 10):
        evaluated.write(step, two_chunks())
    size = trained.path(1).stat().st_size
    delete_oldest([trained, evaluated], 14 * size, keep=trained.path(11))
    assert len(trained.steps()) == 11
    delete_oldest([trained, evaluated], 5.5 * size, keep=trained.path(11))
    assert (trained.steps(), evaluated.steps()) == ([9, 10, 11], [9, 10])
    again = RolloutFolder(trained.folder)  # counts what it finds
    delete_oldest([again, RolloutFolder(evaluated.folder)], 1.0, keep=again.path(10))
    assert (again.steps(), evaluated.steps()) == ([10], [])


def test_a_file_that_is_written_again_counts_once(tmp_path):
    folder = RolloutFolder(tmp_path / "rollouts")
    for _ in range(3):
        folder.write(1, two_chunks())
    assert folder.bytes == folder.path(1).stat().st_size


def test_a_resume_drops_later_steps_and_what_a_kill_left(tmp_path):
    folder = RolloutFolder(tmp_path / "rollouts")
    folder.drop_after(0)
    for step in (1, 2, 10):
        folder.write(step, two_chunks())
    partial = folder.folder / "step-11.parquet.partial"
    partial.write_bytes(b"PAR1")
    folder.drop_after(2)
    assert folder.steps() == [1, 2]
    assert not partial.exists()
