"""Recorded steps trained again by the program: the same bits, or the place that differs."""

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from torch.distributed.checkpoint import FileSystemReader

from rl.observe.rollouts import read_rollouts, write_rollouts
from rl.replay import main
from tests.e2e.runs import TINY
from tests.e2e.test_algorithms import MANY_MODELS
from tests.e2e.test_episodes import EPISODES
from tests.e2e.test_programs import Program, accepted, answer_of, times
from tests.tiny_tokenizers import make_model

SHORT = (*TINY, "--steps", "4", "--evaluation.prompts", "0", "--trainer.checkpoint.interval", "2")
AHEAD = (*SHORT, "--rollout.max_staleness", "2")
LAYOUT = (
    *(*SHORT, "--trainer.parallelism.data_parallel_shard_degree", "2"),
    *("--trainer.parallelism.tensor_parallel_degree", "2"),
)


def replay(folder: Path, tmp_path: Path, *arguments: str) -> tuple[Program, dict]:
    """Return the ended program, and its JSON."""
    return answer_of("rl.replay", folder, tmp_path / "replay", *arguments)


def flip_bit(checkpoint: Path, name: str) -> None:
    """Flip a bit of the parameter ``name`` in a checkpoint."""
    stored = FileSystemReader(checkpoint).read_metadata().storage_data
    info = next(info for index, info in stored.items() if index.fqn == name)
    path = checkpoint / info.relative_path
    content = bytearray(path.read_bytes())
    content[info.offset + info.length // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("arguments", "step"),
    [
        pytest.param(MANY_MODELS, 3, id="critic, reference, adapter"),
        pytest.param(AHEAD, 4, id="two ahead", marks=pytest.mark.long),
        pytest.param(LAYOUT, 3, id="fsdp 2 x tp 2", marks=pytest.mark.long),
    ],
)
def test_recorded_steps_are_trained_again_bit_for_bit(finished, tmp_path, arguments, step):
    run = finished(*arguments)
    program, found = replay(run.folder, tmp_path, "--step", str(step))
    assert program.process.returncode == 0, program.stderr
    assert found["equal"]
    assert found["from"] < step
    assert len(found["steps"]) == step - found["from"]
    recorded = {row["step"]: row for row in run.metrics()}
    for row in found["steps"]:
        for name, (before, after) in row["metrics"].items():
            assert before == after == recorded[row["step"]][name], name
    assert found["steps"][-1]["metrics"].keys() >= {"loss/mean", "trainer/grad_norm"}


@pytest.mark.long
def test_episodes_of_several_turns_are_trained_again_bit_for_bit(finished, tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    run = finished(
        *(*EPISODES, "--model.hf_path", str(make_model(model)), "--task.folder", str(model))
    )
    program, found = replay(run.folder, tmp_path, "--step", "5")
    assert program.process.returncode == 0, program.stderr
    assert found["equal"]


@pytest.fixture
def copied(finished, tmp_path) -> Path:
    """Return a copy of a run that a test may damage."""
    return shutil.copytree(finished(*MANY_MODELS).folder, tmp_path / "copy", symlinks=True)


@pytest.mark.parametrize(
    ("arguments", "changed"),
    [
        # Prompts share tokens, so that a changed one alters the rounding of others: the first is
        # changed.
        pytest.param(MANY_MODELS, 0, id="critic, reference, adapter"),
        pytest.param(SHORT, 2, id="quickstart", marks=pytest.mark.long),
    ],
)
def test_a_rollout_that_was_changed_is_found_by_its_step_and_token(
    finished, tmp_path, arguments, changed
):
    copied = shutil.copytree(finished(*arguments).folder, tmp_path / "copy", symlinks=True)
    path = copied / "rollouts" / "step-3.parquet"
    (chunk,) = read_rollouts(path)
    rollout = chunk.rollouts[changed]
    (sequence,) = rollout.sequences
    tokens = sequence.tokens.copy()
    tokens[1] ^= 1
    rollouts = [*chunk.rollouts]
    rollouts[changed] = replace(rollout, sequences=(replace(sequence, tokens=tokens),))
    write_rollouts(path, [replace(chunk, rollouts=rollouts)])
    program, found = replay(copied, tmp_path, "--step", "4")
    assert program.process.returncode == 1
    said = r"step 3: update 1 of \d, (critic|trainer), gradient: \S+"
    assert re.match(said, found["difference"])
    place = f"of prompt {rollout.prompt.prompt_id}, sample {rollout.sample}"
    assert found["difference"].endswith(place)


def test_a_flipped_bit_in_a_file_of_rollouts_is_refused_by_name(copied, tmp_path):
    path = copied / "rollouts" / "step-3.parquet"
    content = bytearray(path.read_bytes())
    content[len(content) // 4] ^= 1
    path.write_bytes(content)
    program, _ = replay(copied, tmp_path, "--step", "4")
    assert program.process.returncode == 1
    assert "step-3.parquet cannot be read" in program.stderr


@pytest.mark.long
def test_a_flipped_bit_in_a_checkpoint_is_found_by_its_parameter(copied, tmp_path):
    checkpoint = copied / "checkpoints" / "step-2"
    name = "layers.1.attention.wo.lora_a.weight"
    flip_bit(checkpoint, name)
    program, found = replay(copied, tmp_path, "--step", "3")
    assert program.process.returncode == 1
    assert found["difference"] == f"checkpoint 2, weights: {name}"


@pytest.mark.long
def test_another_choice_is_shown_beside_the_record(finished, tmp_path):
    run = finished(*SHORT, "--trainer.lr_scheduler.warmup_steps", "0")
    program, found = replay(
        run.folder, tmp_path, "--step", "4", "--under", "fsdp2", "--loss", "cispo", "--lr", "0.01"
    )
    assert program.process.returncode == 0, program.stderr
    assert "(2 ranks)" in program.stdout
    first, second = found["steps"]
    before, after = first["metrics"]["loss/mean"]
    assert before != after
    assert first["metrics"]["trainer/lr/AdamW"][1] == 0.01
    assert first["logprob_change"] <= 1e-5  # the layout's rounding
    assert second["logprob_change"] > 1e-5  # other weights
    assert "recorded" in program.stdout


REFUSED = {
    ("--step", "9"): "--step 9: the rollouts of step 5 are not in ",
    ("--step", "0"): "--step is 0; it must be at least 1",
    ("--step", "3", "--under", "fsdp"): "--under fsdp: 'fsdp' is not a degree; write one of",
    ("--step", "3", "--loss", "grop"): "--loss grop: no such loss; did you mean grpo",
    ("--step", "3", "--stepp", "3"): "--stepp: there is no such field",
    ("--failed", "--step", "3"): "--failed and --step are different questions; give one of them",
    ("--failed",): "failure.json does not exist, so no failure is recorded; --step K",
}


def test_arguments_that_cannot_work_are_refused(finished):
    folder = finished(*MANY_MODELS).folder
    before = times(folder)
    assert accepted(main, folder, REFUSED) == {}
    assert times(folder) == before
