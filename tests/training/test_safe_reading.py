"""A checkpoint with pickles that would run code is refused, and none of the code runs."""

import os
import pickle
from collections.abc import Callable
from enum import Enum
from pathlib import Path

import pytest
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties

from rl.compat.torch_checkpoint import METADATA_PARTS
from rl.errors import RunError
from rl.training.checkpoint import Checkpointer, _TrainState
from rl.training.safe_reading import read_metadata
from tests.training.disk import checkpointer_of
from tests.training.scenes import TIED_FUSED, engine_of

MEMORY_FORMAT = METADATA_PARTS[1]
"""Enum in the metadata of a checkpoint."""


class Command:
    """Runs a command when it is unpickled."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self):
        return os.system, (f"touch {self.mark}",)


@pytest.fixture
def engine(folder):
    return engine_of(TIED_FUSED, folder=folder)


def saved(engine, folder: str) -> Path:
    """A checkpoint of another run."""
    checkpointer = checkpointer_of(engine, folder)
    checkpointer.save(1, {"step": 1})
    checkpointer.close()
    return Path(folder) / "checkpoints" / "step-1"


def with_command_in_metadata(engine, folder: str, mark: Path, monkeypatch) -> Path:
    checkpoint = saved(engine, folder)
    metadata = pickle.loads((checkpoint / ".metadata").read_bytes())
    metadata.planner_data["train_state.version"] = Command(mark)
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))
    return checkpoint


def with_command_in_an_entry(engine, folder: str, mark: Path, monkeypatch) -> Path:
    state_dict = _TrainState.state_dict
    with monkeypatch.context() as patched:
        patched.setattr(
            _TrainState, "state_dict", lambda self: state_dict(self) | {"version": Command(mark)}
        )
        return saved(engine, folder)


def resume(engine, checkpoint: Path, folder: str) -> None:
    loading(checkpointer_of(engine, str(checkpoint.parents[1])), Checkpointer.load)


def start_from_it(engine, checkpoint: Path, folder: str) -> None:
    loading(checkpointer_of(engine, folder, initial_load_path=str(checkpoint)), Checkpointer.load)


def start_from_its_weights(engine, checkpoint: Path, folder: str) -> None:
    initial = {"initial_load_path": str(checkpoint), "initial_load_model_only": True}
    loading(checkpointer_of(engine, folder, **initial), Checkpointer.load)


def load_weights(engine, checkpoint: Path, folder: str) -> None:
    loading(
        checkpointer_of(engine, folder), lambda checkpointer: checkpointer.load_weights(checkpoint)
    )


def loading(checkpointer: Checkpointer, load: Callable[[Checkpointer], object]) -> None:
    try:
        load(checkpointer)
    finally:
        checkpointer.close()


READS = [resume, start_from_it, start_from_its_weights, load_weights]


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("poison", [with_command_in_metadata, with_command_in_an_entry])
def test_a_checkpoint_that_would_run_a_command_is_refused_and_nothing_runs(
    engine, folder, tmp_path, monkeypatch, poison, read
):
    mark = tmp_path / "mark"
    checkpoint = poison(engine, folder, mark, monkeypatch)
    if poison is with_command_in_an_entry and read in (start_from_its_weights, load_weights):
        read(
            engine, checkpoint, str(tmp_path / "another run")
        )  # entries are not read for weights alone
    else:
        with pytest.raises(
            RunError,
            match=r"step-1 is refused: (.metadata|its entry train_state.version) names posix",
        ):
            read(engine, checkpoint, str(tmp_path / "another run"))
    assert not mark.exists()


@pytest.mark.parametrize(
    "name", ["builtins.eval", "torch.load", "torch.hub.load", "pathlib.Path.touch"]
)
def test_only_names_of_metadata_are_unpickled(engine, folder, name):
    checkpoint = saved(engine, folder)
    module, _, function = name.partition(".")
    (checkpoint / ".metadata").write_bytes(
        b"\x80\x04"
        + b"".join(b"\x8c" + bytes([len(each)]) + each.encode() for each in (module, function))
        + b"\x93."
    )
    with pytest.raises(RunError, match=f"step-1 is refused: .metadata names {name}"):
        resume(engine, checkpoint, folder)


class PicklerOfPython311(pickle.Pickler):
    """Pickles members of enums as Python 3.11.0 to 3.11.3 does, Debian 12's Python for one."""

    def reducer_override(self, value):
        return (getattr, (type(value), value.name)) if isinstance(value, Enum) else NotImplemented


def test_metadata_of_early_versions_of_python_3_11_is_read(tmp_path):
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
