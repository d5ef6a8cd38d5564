"""Checkpoints survive full and slow disks, power failures and kills (C6)."""

import errno
import io
import os
import pickle
import shutil
import threading
import traceback
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

from rl.errors import RunError, StorageFull
from rl.model.digest import digests, merge_digests
from rl.step_folders import StepFolders
from rl.training.all_ranks import failures_as_run_error
from tests.training.disk import (
    checkpointer_of,
    everything,
    full_disk,
    held_writes,
    names_in,
    save_and_step_on,
    write_to_a_disk_full_on_rank_1,
)
from tests.training.layouts import LAYOUTS
from tests.training.ranks import on_ranks
from tests.training.scenes import TIED_FUSED, engine_of


def test_a_checkpoint_is_on_disk_before_older_ones_are_deleted(one, monkeypatch):
    _, checkpointer, checkpoints = one
    for step in (1, 2):
        checkpointer.save(step, {})
    synced = []
    sync = os.fsync
    rmtree = shutil.rmtree

    def fsync(descriptor):
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        sync(descriptor)

    def delete(path, **options):
        if path == checkpoints / "step-1":
            written = checkpoints / "step-3"
            assert {written / "__0_0.distcp", written / ".metadata.tmp"} <= {*synced}
            assert (
                synced.index(written / ".metadata.tmp")
                < synced.index(written)
                < synced.index(checkpoints)
            )
            assert synced[-1] == path, "it is known to be incomplete first"
        rmtree(path, **options)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr("rl.step_folders.shutil.rmtree", delete)
    checkpointer.save(3, {})
    assert names_in(checkpoints) == ["step-2", "step-3"]


def test_saved_weights_are_on_disk_before_they_replace_others(one, monkeypatch, tmp_path):
    _, checkpointer, _ = one
    synced = []
    sync = os.fsync

    def fsync(descriptor):
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    checkpointer.save_weights(tmp_path / "weights")
    assert synced[-2:] == [tmp_path / "weights.partial", tmp_path]


# Saves that fail.


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_a_full_disk_is_an_error_and_keeps_the_previous_checkpoint(folder, mode):
    engine = engine_of(TIED_FUSED, folder=folder)
    checkpointer = checkpointer_of(engine, folder, async_mode=mode)
    checkpointer.save(1, {"step": 1})
    checkpointer._finish_saving()
    with (
        pytest.raises(RunError, match="checkpoint 2 failed on rank 0: OSError: .*File too large"),
        full_disk(),
    ):
        checkpointer.save(2, {"step": 2})
        checkpointer.close()
    assert checkpointer.load() == {"step": 1}
    assert checkpointer.ignored == ["checkpoints/step-2"]
    checkpointer.save(3, {"step": 3})
    assert checkpointer.load() == {"step": 3}
    checkpointer.close()


class FullFile(io.BytesIO):
    """File on a disk with room for 1,000 bytes."""

    def write(self, data):
        if self.tell() + len(data) > 1000:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(data)


def test_a_disk_that_is_full_inside_torch_save_is_a_full_disk():
    """Another rank gets the error of torch.save without the OSError that caused it."""
    with pytest.raises(RuntimeError) as raised:
        torch.save(torch.zeros(1000), FullFile())
    lost = pickle.loads(pickle.dumps(raised.value))
    with (
        pytest.raises(StorageFull, match="checkpoint 1 failed on rank 0: .*the disk is full"),
        failures_as_run_error("checkpoint 1"),
    ):
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
    with pytest.raises(
        RunError, match=f"checkpoint 1 failed on rank 0: {cause}.*checkpoints/step-1"
    ):
        checkpointer.save(1, {})


def test_a_failure_of_one_rank_is_every_ranks_error(folder):
    for said in on_ranks(2, write_to_a_disk_full_on_rank_1, "fsdp2", folder):
        assert [line.partition(":")[0] for line in said] == [
            f"{what} failed on rank 1" for what in ("checkpoint 1", "export")
        ]
        assert all("File too large" in line for line in said)


# Saves beside the training.


@pytest.mark.parametrize("layout", [pytest.param("alone", marks=pytest.mark.long), "fsdp2_tp2"])
def test_an_async_save_holds_the_values_of_its_moment(folder, layout):
    """Weights and moments, although the steps after it are taken before a byte is written."""
    ranks = LAYOUTS[layout].ranks
    answers = (
        [save_and_step_on(layout, folder)]
        if ranks == 1
        else on_ranks(ranks, save_and_step_on, layout, folder)
    )
    for answer in answers:
        assert answer["complete while writing"] == [1, 2]  # not yet deleted
        assert answer["complete at the end"] == [2, 3]
    at_save, now = (
        merge_digests(a[when] for a in answers) for when in ("at the save", "a step later")
    )
    assert not set(at_save.values()) & set(now.values())

    engine = engine_of(TIED_FUSED, folder=folder)
    checkpointer = checkpointer_of(engine, folder)
    assert checkpointer.load() == {"step": 3}
    assert merge_digests([digests(everything(engine).values())]) == at_save
    checkpointer.close()


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
