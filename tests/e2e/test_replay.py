"""Recorded steps trained again by the program: the same bits, or the place that differs."""

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from torch.distributed.checkpoint import FileSystemReader

from rl.observe.rollout_files import read_rollouts, write_rollouts
from rl.replay.__main__ import main
from tests.e2e.pipelines import EXPERTS, LONG, each_kind
from tests.e2e.test_episodes import EPISODES
from tests.e2e.test_programs import Program, accepted, answer_of, times
from tests.kit.runs import TINY, Run, words
from tests.kit.tables import long
from tests.kit.tokenizers import make_model

SHORT = (*TINY, *words("--steps 4 --evaluation.prompts 0 --trainer.checkpoint.interval 2"))
PARALLELISM = "--trainer.parallelism"
MIXTURE = (
    *EXPERTS,
    *words("--rollout.max_staleness 2 --trainer.router_replay generator"),
    *(f"{PARALLELISM}.data_parallel_shard_degree=2", f"{PARALLELISM}.expert_parallel_degree=2"),
)
LAYOUT = (f"{PARALLELISM}.data_parallel_shard_degree=2", f"{PARALLELISM}.tensor_parallel_degree=2")


def replay(folder: Path, tmp_path: Path, *arguments: str) -> tuple[Program, dict]:
    """Return the ended program, and its JSON."""
    return answer_of("rl.replay", folder, tmp_path / "replay", *arguments)


def assert_equal(run: Run, tmp_path: Path, saved: int, step: int) -> None:
    """Check that the steps from checkpoint ``saved`` to ``step`` are trained again bit for bit."""
    program, found = replay(run.folder, tmp_path, "--step", str(step))
    assert program.process.returncode == 0, program.stderr
    assert (found["from"], found["equal"], len(found["steps"])) == (saved, True, step - saved)
    recorded = {row["step"]: row for row in run.metrics()}
    for row in found["steps"]:
        for name, (before, after) in row["metrics"].items():
            assert before == after == recorded[row["step"]][name], name
    names = {"loss/mean", "trainer/grad_norm", "trainer/lr/AdamW"}
    assert found["steps"][-1]["metrics"].keys() >= names


@each_kind("models", "demonstrations")
def test_recorded_steps_are_trained_again_bit_for_bit(recorded, tmp_path, kind):
    saved = {"models": 2, "demonstrations": 35}.get(kind, 15)
    assert_equal(recorded(kind), tmp_path, saved, saved + (1 if kind == "models" else 3))


@LONG
@pytest.mark.parametrize(
    ("options", "step"),
    [
        (("--rollout.max_staleness", "2", "--rollout.final_temperature", "0.5"), 4),
        (LAYOUT, 3),
        (MIXTURE, 4),
        (("--trainer.zero_gradient", "skip"), 4),
    ],
    ids=["two ahead", "fsdp 2 x tp 2", "experts", "sequences without a gradient are skipped"],
)
def test_steps_of_a_pipeline_or_layout_are_trained_again_bit_for_bit(
    finished, tmp_path, options, step
):
    assert_equal(finished(*SHORT, *options), tmp_path, 2, step)


@LONG
def test_episodes_of_several_turns_are_trained_again_bit_for_bit(finished, tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    given = ("--model.hf_path", str(make_model(model)), "--task.folder", str(model))
    assert_equal(finished(*EPISODES, *given), tmp_path, 4, 5)


@pytest.fixture
def copied(recorded, tmp_path):
    """Function that returns a copy of a run that a test may damage."""

    def copy(kind: str = "models") -> Path:
        return shutil.copytree(recorded(kind).folder, tmp_path / "copy", symlinks=True)

    return copy


def test_a_rollout_that_was_changed_is_found_by_its_step_and_token(copied, tmp_path):
    """The first prompt is changed: another one shares tokens, whose rounding changes."""
    folder = copied()
    path = folder / "rollouts" / "step-3.parquet"
    (chunk,) = read_rollouts(path)
    first, *others = chunk.rollouts
    (sequence,) = first.sequences
    tokens = sequence.tokens.copy()
    tokens[1] ^= 1
    changed = replace(first, sequences=(replace(sequence, tokens=tokens),))
    write_rollouts(path, [replace(chunk, rollouts=[changed, *others])])
    program, found = replay(folder, tmp_path, "--step", "4")
    assert program.process.returncode == 1
    said = r"step 3: update 1 of \d, (critic|trainer), gradient: \S+"
    assert re.match(said, found["difference"])
    place = f"of prompt {first.prompt.prompt_id}, sample {first.sample}"
    assert found["difference"].endswith(place)


def test_a_flipped_bit_in_a_file_of_rollouts_is_refused_by_name(copied, tmp_path):
    folder = copied()
    path = folder / "rollouts" / "step-3.parquet"
    content = bytearray(path.read_bytes())
    content[len(content) // 4] ^= 1
    path.write_bytes(content)
    program, _ = replay(folder, tmp_path, "--step", "4")
    assert program.process.returncode == 1
    assert "step-3.parquet cannot be read" in program.stderr


@pytest.mark.parametrize(
    ("kind", "step", "part"),
    [long("models", 2, "lora_a."), ("demonstrations", 35, "")],
)
def test_a_flipped_bit_in_a_checkpoint_is_found_by_its_parameter(
    copied, tmp_path, kind, step, part
):
    name = f"layers.1.attention.wo.{part}weight"
    folder = copied(kind)
    checkpoint = folder / "checkpoints" / f"step-{step}"
    stored = FileSystemReader(checkpoint).read_metadata().storage_data
    info = next(info for index, info in stored.items() if index.fqn == name)
    path = checkpoint / info.relative_path
    content = bytearray(path.read_bytes())
    content[info.offset + info.length // 2] ^= 1
    path.write_bytes(content)
    program, found = replay(folder, tmp_path, "--step", str(step + 1))
    assert program.process.returncode == 1
    assert found["difference"] == f"checkpoint {step}, weights: {name}"


@LONG
def test_another_choice_is_shown_beside_the_record(finished, tmp_path):
    run = finished(*SHORT, "--trainer.lr_scheduler.warmup_steps", "0")
    options = words("--step 4 --under fsdp2 --loss cispo --lr 0.01")
    program, found = replay(run.folder, tmp_path, *options)
    assert program.process.returncode == 0, program.stderr
    assert "(2 ranks)" in program.stdout
    first, second = found["steps"]
    before, after = first["metrics"]["loss/mean"]
    assert before != after
    assert first["metrics"]["trainer/lr/AdamW"][1] == 0.01
    assert first["logprob_change"] <= 1e-5  # the layout's rounding
    assert second["logprob_change"] > 1e-5  # other weights
    assert "recorded" in program.stdout


@pytest.mark.long
def test_examples_are_trained_on_with_another_choice(recorded, tmp_path):
    options = words("--step 37 --under fsdp2 --lr 0.01")
    program, found = replay(recorded("demonstrations").folder, tmp_path, *options)
    assert program.process.returncode == 0, program.stderr
    assert "(2 ranks)" in program.stdout
    first, second = (row["metrics"]["loss/mean"] for row in found["steps"])
    assert first[0] == pytest.approx(first[1], abs=1e-5)
    assert second[0] != pytest.approx(second[1], abs=1e-5)
    assert "log-prob of a token" not in program.stdout


@LONG
def test_scores_of_other_examples_are_refused(recorded, tmp_path):
    program, _ = replay(recorded("cached").folder, tmp_path, "--step", "18", "--seed", "1")
    assert program.process.returncode == 2
    assert "add --reference.scores computed" in program.stderr


REFUSED = {
    "--step 9": "--step 9: the rollouts of step 5 are not in ",
    "--step 0": "--step is 0; it must be at least 1",
    "--step 3 --under fsdp": "--under fsdp: 'fsdp' is not a degree; write one of",
    "--step 3 --loss grop": "--loss grop: no such loss; did you mean grpo",
    "--step 3 --stepp 3": "--stepp: there is no such field",
    "--failed --step 3": "--failed and --step are different questions; give one of them",
    "--failed": "failure.json does not exist, so no failure is recorded; --step K",
}


def test_arguments_that_cannot_work_are_refused(recorded):
    folder = recorded().folder
    before = times(folder)
    assert accepted(main, folder, REFUSED) == {}
    assert times(folder) == before
