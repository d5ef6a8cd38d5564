"""A checkpoint of any layout goes on in any other, exactly where it was; an incomplete one does not exist (C6)."""

import shutil
from pathlib import Path

import pytest

from rl.errors import RunError
from rl.training.checkpoint import Checkpointer
from tests.training.ranks import on_ranks
from tests.training.scenes import LAYOUTS, RUN_STATE, TIED_FUSED, engine_of, resume

SAVED_BY = ("tied_fused", "fsdp2_tp2")


@pytest.fixture
def saved(played, folder) -> tuple[dict, str]:
    """What four ranks did after they saved step 2, and a copy of their folder."""
    answers, origin = played(*SAVED_BY)
    shutil.copytree(Path(origin) / "checkpoints", Path(folder) / "checkpoints")
    return answers[0]["steps"][-1], folder


def check(answer: dict, next_step: dict) -> None:
    assert answer["run_state"] == RUN_STATE
    assert answer["loaded"] == (2, 1)  # the version, and the step that was skipped
    assert answer["step"] == pytest.approx(next_step, rel=1e-6)


def test_four_ranks_checkpoint_goes_on_in_one_rank(saved):
    next_step, folder = saved
    check(resume("tied_fused", "alone", folder), next_step)


def test_four_ranks_checkpoint_goes_on_under_tensor_parallel_2(saved):
    next_step, folder = saved
    for answer in on_ranks(LAYOUTS["tp2"].ranks, resume, "tied_fused", "tp2", folder):
        check(answer, next_step)


def test_one_ranks_checkpoint_goes_on_bit_for_bit(played, folder):
    (answer,), origin = played("untied_split", "alone")
    shutil.copytree(Path(origin) / "checkpoints", Path(folder) / "checkpoints")
    assert resume("untied_split", "alone", folder)["step"] == answer["steps"][-1]


def test_a_checkpoint_that_was_killed_in_the_middle_is_ignored(saved):
    next_step, folder = saved
    whole = Path(folder) / "checkpoints" / "step-2"
    shutil.copytree(whole, whole.with_name("step-3"))
    (whole.with_name("step-3") / ".metadata").unlink()
    check(resume("tied_fused", "alone", folder), next_step)


def test_without_a_checkpoint_training_starts_afresh(folder):
    engine = engine_of(TIED_FUSED, folder=folder)
    checkpointer = Checkpointer(engine, TIED_FUSED, folder=folder)
    assert checkpointer.load() == {}
    assert engine.version == 0
    checkpointer.close()


def test_the_newest_are_kept_and_any_of_them_can_be_asked_for(folder):
    engine = engine_of(TIED_FUSED, folder=folder)
    checkpointer = Checkpointer(engine, TIED_FUSED, folder=folder)
    for step in range(1, 5):
        checkpointer.save(step, {"step": step})
    assert checkpointer.load(3) == {"step": 3}
    assert checkpointer.load() == {"step": 4}
    checkpointer.close()
    kept = sorted(path.name for path in (Path(folder) / "checkpoints").iterdir())
    assert kept == [f"step-{step}" for step in (3, 4)]
    with pytest.raises(FileNotFoundError, match="step-1"):
        checkpointer.load(1)


def test_a_checkpoint_that_cannot_be_written_is_an_error_and_leaves_the_one_before(folder):
    engine = engine_of(TIED_FUSED, folder=folder)
    checkpointer = Checkpointer(engine, TIED_FUSED, folder=folder)
    checkpointer.save(1, {"step": 1})
    (Path(folder) / "checkpoints" / "step-2").write_text("in the way")
    with pytest.raises(RunError, match="checkpoint 2 failed on rank 0: FileExistsError"):
        checkpointer.save(2, {"step": 2})
    assert checkpointer.load() == {"step": 1}
    checkpointer.close()
