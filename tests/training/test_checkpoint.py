"""A checkpoint of any layout resumes exactly in any other; incomplete ones are ignored (C6)."""

import dataclasses
import os
import shutil
from pathlib import Path

import pytest
import torch

from rl.errors import RunError
from rl.model.digest import ShardDigests, digests, merge_digests
from rl.observe.checkpoint_folders import ROLLOUTS
from rl.training.checkpoint import Checkpointer
from tests.kit.batches import ragged_batch
from tests.kit.layouts import LAYOUTS
from tests.kit.ranks import in_layout, on_ranks
from tests.kit.scenes import (
    LOSS,
    MODELS,
    RUN_STATE,
    TIED_FUSED,
    checkpointer_of,
    engine_of,
    learn,
    loaded,
    resume,
    saved,
)
from tests.kit.tables import long

PAIRS = [
    ("tied_fused", "fsdp2_tp2", "alone"),
    *(
        long(*pair)
        for pair in (
            ("untied_split", "hsdp4", "fsdp2_tp2"),
            ("tied_fused", "fsdp2_tp2", "tp2"),
            ("tied_fused", "tp2", "fsdp2"),
            ("tied_fused", "alone", "hsdp4"),
            ("experts", "fsdp2_tp2_ep2", "alone"),
        )
    ),
]


@pytest.mark.parametrize(("model", "saved_by", "resumed_by"), PAIRS)
def test_any_layout_resumes_a_checkpoint_of_any_other(played, folder, model, saved_by, resumed_by):
    before, origin = played(model, saved_by)
    shutil.copytree(Path(origin) / "checkpoints", Path(folder) / "checkpoints")
    answers = in_layout(resume, model, resumed_by, folder)
    assert merge_digests(a["weights"] for a in answers) == merge_digests(s["saved"] for s in before)
    for answer in answers:
        assert answer["run_state"] == RUN_STATE
        assert answer["loaded"] == (2, 1)  # the version, and the step that was skipped
        # the optimizer's moments too
        assert answer["step"] == pytest.approx(before[0]["steps"][-1], rel=1e-6)
        assert torch.equal(answer["drawn"], before[0]["drawn"])
        assert answer["ignored"] == []


def test_one_rank_resumes_bit_for_bit(played, folder):
    (answer,), origin = played("untied_split", "alone")
    shutil.copytree(Path(origin) / "checkpoints", Path(folder) / "checkpoints")
    assert resume("untied_split", "alone", folder)["step"] == answer["steps"][-1]


def test_a_resumed_engine_steps_with_the_learning_rate_and_decay_of_its_own_config(folder):
    before = engine_of(TIED_FUSED, folder=folder, lr=1e-3)
    learn(before, ragged_batch(seed=1))
    saved(before, folder, {})

    def stepped(rate, decay, **options):
        engine = engine_of(TIED_FUSED, folder=folder, lr=rate, decay=decay)
        loaded(engine, folder)
        metrics = learn(engine, ragged_batch(seed=2), **options)
        return metrics["trainer/lr/AdamW"], merge_digests([digests(engine.shards().values())])

    assert stepped(5e-3, 0.3) == stepped(1e-3, 0.1, lr=5e-3, weight_decay=0.3)
    assert stepped(5e-3, 0.3) != stepped(5e-3, 0.1)


def test_weights_are_saved_as_they_are_held(folder):
    """No copy, no q, k and v of a fused weight, a tied one once, and buffers that persist."""
    engine = engine_of(TIED_FUSED, folder=folder)
    engine.model.register_buffer("load_bias", torch.tensor([1.0, 2.0]))
    engine.model.register_buffer("load_count", torch.tensor([3.0]), persistent=False)
    checkpointer = checkpointer_of(engine, folder)
    weights = checkpointer._manager.states["model"].state_dict()
    assert weights.keys() == {"load_bias", *engine.shards()}
    held = {tensor.data_ptr() for tensor in (engine.model.load_bias, *engine.model.parameters())}
    assert {tensor.data_ptr() for tensor in weights.values()} == held

    checkpointer.save(1, {})
    engine.model.load_bias.zero_(), engine.model.load_count.zero_()
    checkpointer.load()
    assert engine.model.load_bias.tolist() == [1.0, 2.0]
    assert engine.model.load_count.tolist() == [0.0]
    checkpointer.close()


def handed_over(model: str, layout: str, folder: str, weights: str) -> ShardDigests:
    """Digests of weights of version 1, which are then written to ``weights``."""
    engine = engine_of(MODELS[model], folder=folder, layout=LAYOUTS[layout])
    learn(engine, ragged_batch(seed=1))
    checkpointer = Checkpointer(engine, MODELS[model], folder=folder)
    for _ in range(2):  # the second in place of the first
        checkpointer.save_weights(Path(weights))
    checkpointer.close()
    return digests(engine.shards().values())


def test_saved_weights_load_in_any_layout_without_other_state(folder):
    weights = Path(folder) / "weights"
    held = on_ranks(2, handed_over, "tied_fused", "fsdp2", folder, str(weights))
    assert [*Path(folder).glob("weights*")] == [weights]
    engine = engine_of(TIED_FUSED, folder=folder)
    checkpointer = checkpointer_of(engine, folder)
    assert merge_digests([digests(engine.shards().values())]) != merge_digests(held)
    checkpointer.load_weights(weights)
    assert merge_digests([digests(engine.shards().values())]) == merge_digests(held)
    assert engine.version == 0
    assert not any(optimizer.state for optimizer in engine.optimizers)
    with pytest.raises(RunError, match="loading .*/absent"):
        checkpointer.load_weights(Path(folder) / "absent")
    checkpointer.close()


@pytest.mark.parametrize("model_only", [True, False])
def test_a_run_can_start_from_another_runs_checkpoint(one, tmp_path_factory, model_only):
    engine, checkpointer, checkpoints = one
    learn(engine, ragged_batch(seed=1))
    checkpointer.save(1, {"step": 1})
    folder = str(tmp_path_factory.mktemp("another"))
    other = engine_of(TIED_FUSED, folder=folder)
    source = str(checkpoints / "step-1")
    starter = checkpointer_of(
        other, folder, initial_load_path=source, initial_load_model_only=model_only
    )
    assert starter.load() == ({} if model_only else {"step": 1})
    assert starter.loaded == (None if model_only else checkpoints / "step-1")
    starter.close()
    assert digests(other.shards().values()) == digests(engine.shards().values())
    assert other.version == (0 if model_only else 1)


# What is on disk.


def test_the_newest_are_kept_and_a_run_can_go_back_to_any_of_them(one):
    _, checkpointer, checkpoints = one
    for step in range(1, 5):
        checkpointer.save(step, {"step": step})
    assert sorted(os.listdir(checkpoints)) == ["step-3", "step-4"]
    assert checkpointer.load() == {"step": 4}
    with pytest.raises(RunError, match=r"no complete checkpoint .*step-1; there are \[3, 4\]"):
        checkpointer.load(1)
    assert checkpointer.load(3) == {"step": 3}
    checkpointer.save(4, {"step": 14})
    assert checkpointer.load() == {"step": 14}
    checkpointer.load(0)
    assert sorted(os.listdir(checkpoints)) == []


def test_load_discards_accumulated_gradients(one):
    engine, checkpointer, _ = one
    checkpointer.save(1, {})
    wanted = learn(engine, ragged_batch(seed=2))
    checkpointer.load(1)
    engine.forward_backward(ragged_batch(seed=1), LOSS.build())  # of a step that was given up
    checkpointer.load(1)
    assert learn(engine, ragged_batch(seed=2)) == wanted


def test_incomplete_checkpoints_do_not_count_and_are_deleted_after_a_newer_one(one):
    _, checkpointer, checkpoints = one
    for step in (2, 4):
        checkpointer.save(step, {"step": step})
    for step in (3, 5, 7, 9):
        (checkpoints / f"step-{step}").mkdir()
    (checkpoints / "step-6.txt").write_text("not a checkpoint")
    checkpointer.save(8, {"step": 8})
    assert sorted(os.listdir(checkpoints)) == ["step-4", "step-6.txt", "step-8", "step-9"]
    checkpointer.save(9, {"step": 9})  # the rest of a killed save is overwritten
    assert checkpointer.load() == {"step": 9}


def test_the_controllers_file_is_deleted_with_its_checkpoint(one):
    _, checkpointer, checkpoints = one
    for step in (1, 2, 3):
        folder = checkpoints / f"step-{step}"
        folder.mkdir(parents=True)
        (folder / ROLLOUTS).write_text(f"rollouts {step}")
        (folder / "__7_0.distcp").write_text("left by a save that was killed")
        assert checkpointer.load() == ({"step": step - 1} if step > 1 else {})
        assert checkpointer.ignored == [f"checkpoints/step-{step}"]
        checkpointer.save(step, {"step": step})
        assert (folder / ROLLOUTS).read_text() == f"rollouts {step}"
        assert not (folder / "__7_0.distcp").exists()
    assert sorted(os.listdir(checkpoints)) == ["step-2", "step-3"]
    assert checkpointer.load() == {"step": 3}
    assert checkpointer.loaded == checkpoints / "step-3"


def test_keeping_the_latest_0_keeps_all(folder):
    checkpointer = checkpointer_of(engine_of(TIED_FUSED, folder=folder), folder, keep_latest_k=0)
    for step in range(1, 5):
        checkpointer.save(step, {})
    checkpointer.close()
    assert len(sorted(os.listdir(Path(folder) / "checkpoints"))) == 4


def test_a_deletion_that_is_killed_leaves_nothing_that_looks_complete(one, monkeypatch):
    _, checkpointer, checkpoints = one
    for step in (1, 2):
        checkpointer.save(step, {"step": step})
    with monkeypatch.context() as killed:
        first_file = lambda path, **_: next(path.iterdir()).unlink()  # noqa: E731
        killed.setattr("rl.observe.checkpoint_folders.shutil.rmtree", first_file)
        checkpointer.save(3, {"step": 3})
    assert (checkpoints / "step-1").is_dir()
    assert checkpointer.load() == {"step": 3}
    assert checkpointer.ignored == ["checkpoints/step-1"]


def test_a_complete_checkpoint_is_not_written_over(one):
    _, checkpointer, _ = one
    checkpointer.save(1, {"step": 1})
    message = r"checkpoints/step-1 is there and complete: delete .* to write it again"
    with pytest.raises(RunError, match=message):
        checkpointer.save(1, {"step": "another"})
    assert checkpointer.load() == {"step": 1}


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize(
    ("file", "damage"),
    [("__0_0.distcp", Path.unlink), ("__0_0.distcp", truncate), (".metadata", truncate)],
)
def test_error_of_a_damaged_checkpoint_names_the_folder_to_delete(one, file, damage):
    _, checkpointer, checkpoints = one
    for step in (1, 2):
        checkpointer.save(step, {"step": step})
    damage(checkpoints / "step-2" / file)
    message = r"loading checkpoints/step-2 failed on rank 0: .*deleting .*/step-2 goes"
    with pytest.raises(RunError, match=message):
        checkpointer.load()
    (checkpoints / "step-2" / ".metadata").unlink()
    assert checkpointer.load() == {"step": 1}
    assert checkpointer.ignored == ["checkpoints/step-2"]


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("fuse_qkv", False, "was saved with model.fuse_qkv=True; load it with that, not with Fa"),
        ("vocab_size", 40, r"tok_embeddings.weight is \[30, 32\] in the .*, \[40, 32\] in this"),
        ("n_layers", 1, r"layers.1.*weight is \[.*\] in the checkpoint, absent in this run"),
        ("tie_embeddings", False, r"another model: lm_head.weight is absent in .*, \[30, 32\] in"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused_by_name(one, folder, field, value, message):
    one[1].save(1, {})
    model = dataclasses.replace(TIED_FUSED, **{field: value})
    with pytest.raises(RunError, match=f"step-1 .*{message}"):
        loaded(engine_of(model, folder=folder), folder, model)
