"""A checkpoint with pickles that would run code is refused, and none of the code runs."""

import os
import pickle
import re
from enum import Enum
from pathlib import Path

import pytest
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties

from configs.quickstart import quickstart
from rl.compat.torch_checkpoint import METADATA_PARTS
from rl.errors import ConfigError, RunError
from rl.training.checkpoint import _TrainState
from rl.training.safe_reading import read_metadata
from rl.validation.folders import check_numbers

MEMORY_FORMAT = METADATA_PARTS[1]
"""Enum in the metadata of a checkpoint."""


class Command:
    """Runs a command when it is unpickled."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self):
        return os.system, (f"touch {self.mark}",)


@pytest.fixture
def checkpoint(one):
    """A checkpoint of another run."""
    _, checkpointer, checkpoints = one
    checkpointer.save(1, {"step": 1})
    return checkpoints / "step-1"


READS = {
    "resume": lambda checkpointer, path: checkpointer.load(),
    "load weights": lambda checkpointer, path: checkpointer.load_weights(path),
}


@pytest.mark.parametrize("read", READS)
def test_metadata_that_would_run_a_command_is_refused_and_nothing_runs(
    one, checkpoint, tmp_path, read
):
    mark = tmp_path / "mark"
    metadata = pickle.loads((checkpoint / ".metadata").read_bytes())
    metadata.planner_data["train_state.version"] = Command(mark)
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(RunError, match="step-1 is refused: .metadata names posix.system"):
        READS[read](one[1], checkpoint)
    assert not mark.exists()


def test_an_entry_that_would_run_a_command_is_refused_and_nothing_runs(one, tmp_path, monkeypatch):
    _, checkpointer, checkpoints = one
    mark = tmp_path / "mark"
    state = _TrainState.state_dict
    with monkeypatch.context() as patched:
        command = {"version": Command(mark)}
        patched.setattr(_TrainState, "state_dict", lambda self: state(self) | command)
        checkpointer.save(1, {})
    message = "step-1 is refused: its entry train_state.version names posix"
    with pytest.raises(RunError, match=message):
        checkpointer.load()
    checkpointer.load_weights(checkpoints / "step-1")  # reads no entries
    assert not mark.exists()


@pytest.mark.parametrize("read", READS)
def test_weights_that_are_no_numbers_are_refused(one, read):
    engine, checkpointer, checkpoints = one
    name, shard = next(iter(engine.shards().items()))
    shard.tensor.view(-1)[-1] = float("nan")
    checkpointer.save(1, {})
    message = f"step-1 is refused: .*{re.escape(name)} holds NaN or infinity"
    with pytest.raises(RunError, match=message):
        READS[read](checkpointer, checkpoints / "step-1")
    config = quickstart()
    config.trainer.checkpoint.initial_load_path = str(checkpoints / "step-1")
    message = f"initial_load_path: .*step-1: {re.escape(name)} holds NaN"
    with pytest.raises(ConfigError, match=message):
        check_numbers(config)  # of plan and doctor


@pytest.mark.parametrize(
    "name", ["builtins.eval", "torch.load", "torch.hub.load", "pathlib.Path.touch"]
)
def test_only_names_of_metadata_are_unpickled(tmp_path, name):
    module, _, function = name.partition(".")
    names = (b"\x8c" + bytes([len(each)]) + each.encode() for each in (module, function))
    (tmp_path / ".metadata").write_bytes(b"\x80\x04" + b"".join(names) + b"\x93.")
    with pytest.raises(RunError, match=f"is refused: .metadata names {name}"):
        read_metadata(tmp_path)


def test_metadata_of_early_versions_of_python_3_11_is_read(tmp_path):
    class PicklerOfPython311(pickle.Pickler):
        """Pickles members of enums as Python 3.11.0 to 3.11.3 does, Debian 12's Python for one."""

        def reducer_override(self, value):
            return (
                (getattr, (type(value), value.name)) if isinstance(value, Enum) else NotImplemented
            )

    properties = TensorProperties()
    content = Metadata({}, planner_data={"weight": properties})
    with open(tmp_path / ".metadata", "wb") as file:
        PicklerOfPython311(file).dump(content)
    assert b"getattr" in (tmp_path / ".metadata").read_bytes()
    assert read_metadata(tmp_path).planner_data == {"weight": properties}


class Attribute:
    """Attribute of an object that is no member of an enum."""

    def __init__(self, owner: object, name: str):
        self.owner = owner
        self.name = name

    def __reduce__(self):
        return getattr, (self.owner, self.name)


@pytest.mark.parametrize("name", ["mro", "__class__", "__init__"])
@pytest.mark.parametrize("owner", [Metadata, MEMORY_FORMAT, {}])
def test_other_attributes_are_not_unpickled(tmp_path, owner, name):
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Attribute(owner, name)))
    with pytest.raises(RunError, match="is refused: .metadata names builtins.getattr"):
        read_metadata(tmp_path)
