"""Checkpoints survive full and slow disks, power failures and kills (C6)."""

import contextlib
import errno
import io
import os
import pickle
import shutil
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException

from rl.errors import RunError, StorageFull
from rl.model.digest import digests, merge_digests
from rl.observe.checkpoint_folders import StepFolders
from rl.training.all_ranks import failures_as_run_error
from tests.kit.batches import ragged_batch
from tests.kit.layouts import LAYOUTS
from tests.kit.ranks import in_layout, on_ranks
from tests.kit.scenes import (
    MODELS,
    TIED_FUSED,
    checkpointer_of,
    engine_of,
    everything,
    full_disk,
    learn,
    loaded,
)
from tests.kit.tables import long


def write_to_a_disk_full_on_rank_1(layout: str, folder: str) -> list[str]:
    """Return this rank's errors of a checkpoint and an export if rank 1's disk is full."""
    engine = engine_of(TIED_FUSED, folder=folder, layout=LAYOUTS[layout])
    checkpointer = checkpointer_of(engine, folder)
    said = []
    for write in (
        lambda: checkpointer.save(1, {}),
        lambda: checkpointer.export_hf(f"{folder}/export"),
    ):
        with full_disk() if os.environ["RANK"] == "1" else contextlib.nullcontext():
            try:
                write()
            except RunError as error:
                said.append(str(error))
    checkpointer.close()
    return said


def save_and_step_on(model: str, layout: str, folder: str) -> dict[str, Any]:
    """Three async saves, the last of them held back until the optimizer has stepped."""
    engine = engine_of(MODELS[model], folder=folder, layout=LAYOUTS[layout])
    checkpointer = checkpointer_of(engine, folder, async_mode="async", keep_latest_k=2)
    for step in (1, 2):
        learn(engine, ragged_batch(seed=step))
        checkpointer.save(step, {"step": step})
    learn(engine, ragged_batch(seed=3))
    answer: dict[str, Any] = {"at the save": digests(everything(engine).values())}
    with held_writes("step-3"):
        checkpointer.save(3, {"step": 3})
        learn(engine, ragged_batch(seed=4))
        answer["a step later"] = digests(everything(engine).values())
        answer["complete while writing"] = StepFolders(Path(folder) / "checkpoints").complete()
    checkpointer.close()
    dist.barrier()
    answer["complete at the end"] = StepFolders(Path(folder) / "checkpoints").complete()
    return answer


@contextlib.contextmanager
def held_writes(name: str) -> Iterator[Callable[[], None]]:
    """DCP writes no data into the folder before the end of the block or a call of the result."""
    end = threading.Event()
    write = FileSystemWriter.write_data

    def write_later(writer: FileSystemWriter, *args: Any) -> Any:
        assert writer.path.name != name or end.wait(60)
        return write(writer, *args)

    with mock.patch.object(FileSystemWriter, "write_data", write_later):
        try:
            yield end.set
        finally:
            end.set()


@pytest.fixture
def synced(monkeypatch) -> list[Path]:
    """Paths that are synced to disk."""
    paths = []
    sync = os.fsync

    def fsync(descriptor):
        paths.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    return paths


def test_a_checkpoint_is_on_disk_before_older_ones_are_deleted(one, synced, monkeypatch):
    _, checkpointer, checkpoints = one
    for step in (1, 2):
        checkpointer.save(step, {})
    written = checkpoints / "step-3"
    rmtree = shutil.rmtree

    def delete(path, **options):
        if path == checkpoints / "step-1":
            order = (written / "__0_0.distcp", written / ".metadata.tmp", written, checkpoints)
            data, metadata, folder, parent = map(synced.index, order)
            assert max(data, metadata) < folder < parent
            assert synced[-1] == path, "it is known to be incomplete first"
        rmtree(path, **options)

    synced.clear()
    monkeypatch.setattr("rl.observe.checkpoint_folders.shutil.rmtree", delete)
    checkpointer.save(3, {})
    assert sorted(os.listdir(checkpoints)) == ["step-2", "step-3"]


def test_saved_weights_are_on_disk_before_they_replace_others(one, synced, tmp_path):
    one[1].save_weights(tmp_path / "weights")
    assert synced[-2:] == [tmp_path / "weights.partial", tmp_path]


# Saves that fail.


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_a_full_disk_is_an_error_and_keeps_the_previous_checkpoint(folder, mode):
    engine = engine_of(TIED_FUSED, folder=folder)
    checkpointer = checkpointer_of(engine, folder, async_mode=mode)
    checkpointer.save(1, {"step": 1})
    checkpointer._finish_saving()
    failure = pytest.raises(RunError, match="checkpoint 2 failed on rank 0: OSError: .*File too l")
    with failure, full_disk():
        checkpointer.save(2, {"step": 2})
        checkpointer.close()
    assert checkpointer.load() == {"step": 1}
    assert checkpointer.ignored == ["checkpoints/step-2"]
    checkpointer.save(3, {"step": 3})
    assert checkpointer.load() == {"step": 3}
    checkpointer.close()


def test_a_disk_that_is_full_inside_torch_save_is_a_full_disk():
    """Another rank gets the error of torch.save without the OSError that caused it."""

    class FullFile(io.BytesIO):
        """File on a disk with room for 1,000 bytes."""

        def write(self, data):
            if self.tell() + len(data) > 1000:
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(data)

    with pytest.raises(RuntimeError) as raised:
        torch.save(torch.zeros(1000), FullFile())
    lost = pickle.loads(pickle.dumps(raised.value))
    full = pytest.raises(StorageFull, match="checkpoint 1 failed on rank 0: .*the disk is full")
    with full, failures_as_run_error("checkpoint 1"):
        raise CheckpointException("write", {0: (lost, traceback.StackSummary())})


def test_the_state_of_a_save_that_failed_is_not_loaded(one):
    _, checkpointer, _ = one
    with pytest.raises(RunError, match="File too large"), full_disk():
        checkpointer.save(1, {"step": 1})
    assert (checkpointer.load(), checkpointer.loaded) == ({}, None)


@pytest.mark.parametrize(
    ("place", "cause"),
    [("checkpoints", "NotADirectoryError"), ("checkpoints/step-1", "FileExists")],
)
def test_a_folder_that_cannot_be_written_is_an_error_that_names_it(one, place, cause):
    _, checkpointer, checkpoints = one
    (checkpoints.parent / place).parent.mkdir(exist_ok=True)
    (checkpoints.parent / place).write_text("in the way")
    message = f"checkpoint 1 failed on rank 0: {cause}.*checkpoints/step-1"
    with pytest.raises(RunError, match=message):
        checkpointer.save(1, {})


def test_a_failure_of_one_rank_is_every_ranks_error(folder):
    for said in on_ranks(2, write_to_a_disk_full_on_rank_1, "fsdp2", folder):
        assert [line.partition(":")[0] for line in said] == [
            f"{what} failed on rank 1" for what in ("checkpoint 1", "export")
        ]
        assert all("File too large" in line for line in said)


# Saves beside the training.


@pytest.mark.parametrize("layout", ["alone", long("fsdp2_tp2")])
def test_an_async_save_holds_the_values_of_its_moment(folder, layout):
    """Weights and moments, although the steps after it are taken before a byte is written."""
    answers = in_layout(save_and_step_on, "tied_fused", layout, folder)
    for answer in answers:
        assert answer["complete while writing"] == [1, 2]  # not yet deleted
        assert answer["complete at the end"] == [2, 3]
    moments = ("at the save", "a step later")
    at_save, now = (merge_digests(answer[when] for answer in answers) for when in moments)
    assert not set(at_save.values()) & set(now.values())

    engine = engine_of(TIED_FUSED, folder=folder)
    assert loaded(engine, folder) == {"step": 3}
    assert merge_digests([digests(everything(engine).values())]) == at_save


def test_export_waits_for_the_checkpoint_being_written(folder):
    """No failure after the export loses the checkpoint of the last step."""
    engine = engine_of(TIED_FUSED, folder=folder)
    checkpointer = checkpointer_of(engine, folder, async_mode="async")
    with held_writes("step-1") as write:
        checkpointer.save(1, {})
        threading.Timer(0.3, write).start()
        checkpointer.export_hf(f"{folder}/export")
        assert StepFolders(Path(folder) / "checkpoints").complete() == [1]
    checkpointer.close()
