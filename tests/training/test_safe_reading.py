"""A checkpoint with pickles that would run code is refused, and none of the code runs."""

import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest

from rl.errors import RunError
from rl.training.checkpoint import Checkpointer, _TrainState
from tests.training.disk import checkpointer_of
from tests.training.scenes import TIED_FUSED, engine_of


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
