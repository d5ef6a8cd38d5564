"""Supervised fine-tuning on real engines and a tiny model."""

import json
import shutil

import pytest
import torch
from datasets import Dataset, DatasetDict
from transformers import AutoModelForCausalLM, AutoTokenizer

import rl
from rl.cli.arguments import find_config, parse_config
from rl.config import SampledEvaluationConfig
from rl.data.batches import batch_of
from rl.errors import ConfigError, Interrupted
from rl.generation.generator_config import GeneratorConfig
from rl.observe.record import rows_of
from rl.tasks.copy_digits import CopyDigits
from rl.tasks.gsm8k_jsonl import Gsm8kJsonl
from rl.trainers.dataset import split_examples
from rl.trainers.sft import SFTTrainer
from rl.trainers.trainer import TrainerState
from tests.kit.chats import chat_rows, examples_fields
from tests.kit.pages import undocumented
from tests.trainers.loops import set_fields


@pytest.fixture
def config(examples_config):
    return examples_config("sft_jsonl")


@pytest.fixture(scope="module")
def whole(chat_model, tmp_path_factory):
    """A trainer after four steps, closed, and its final state."""
    config = find_config("sft_jsonl")()
    config.output_dir = str(tmp_path_factory.mktemp("whole") / "run")
    set_fields(config, examples_fields(chat_model) | {"trainer.lr_scheduler.warmup_steps": 0})
    config.trainer.optimizer.param_groups[0].optimizer_kwargs["lr"] = 1e-3
    with SFTTrainer(config, chat_rows(40)) as trainer:
        state = trainer.train()
        assert trainer.session.generator_versions == {}
    assert not [*trainer.run.record.logs.glob("generator*")]
    return trainer, state


def test_a_run_learns_and_its_validation_loss_is_that_of_transformers(whole):
    trainer, state = whole
    exported = AutoModelForCausalLM.from_pretrained(trainer.run.record.folder / "export").float()
    batch = batch_of(trainer.dataset_eval)
    lengths = batch.lengths.tolist()
    expected = []
    with torch.no_grad():
        rows = zip(batch.tokens.split(lengths), batch.loss_mask.split(lengths), strict=True)
        for tokens, mask in rows:
            labels = tokens.masked_fill(~mask, -100)[None]
            loss = exported(input_ids=tokens[None], labels=labels).loss
            expected += [loss.double()] * int(mask.sum())
    mean = float(torch.stack(expected).mean())
    assert state.metrics["eval/loss"] == pytest.approx(mean, abs=1e-5)
    rows = trainer.run.record.read_metrics()
    assert rows[-1]["loss/mean"] < rows[0]["loss/mean"]
    assert not undocumented(rows[-1])
    assert rows[-1]["memory/peak"] > 0.1 and rows[-1]["trainer/tflop"] > 0


def recorded_digests(trainer):
    return [row for row, _ in rows_of(trainer.run.record.digests_path)]


def test_digests_of_each_step_are_recorded(whole):
    rows = recorded_digests(whole[0])
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert all([*row["trainer"][0]] == ["gradient", "weights"] for row in rows)


def test_a_run_without_rollouts_does_not_take_fields_of_their_record():
    with pytest.raises(ConfigError, match="record.rollouts: there is no such field"):
        parse_config(["--config", "sft_jsonl", "--record.rollouts", "all"], program="test")


def summary_of(trainer):
    return json.loads((trainer.run.record.folder / "summary.json").read_text())


class Leaves(SFTTrainer):
    """Leaves after step 3."""

    async def between_steps(self):
        if self.step == 3:
            self.leave()


def test_a_run_that_was_left_resumes_bit_for_bit_and_need_not_record_digests(config, whole):
    config.record.digests = False
    with Leaves(config, chat_rows(40)) as trainer, pytest.raises(Interrupted):
        trainer.train()
    config.resume = True
    with SFTTrainer(config, chat_rows(40)) as resumed:
        assert resumed.train().step == 4
    assert summary_of(resumed)["policy_digest"] == summary_of(whole[0])["policy_digest"]
    assert recorded_digests(resumed) == []


@pytest.mark.long
def test_generators_evaluate_the_weights_of_a_step_and_change_nothing(config, chat_model, whole):
    class LeavesToEvaluate(SFTTrainer):
        """Leaves while the generators evaluate."""

        async def sampled_scores(self):
            self.leave()
            return await super().sampled_scores()

    problems = str(chat_model.parent / "problems.jsonl")
    config.evaluation = SampledEvaluationConfig(
        task=Gsm8kJsonl.Config(path=problems, max_prompt_tokens=96),
        max_tokens=4,
        every=2,
        prompts=3,
        samples=2,
        generator=GeneratorConfig(enforce_eager=True, kv_cache_gib=0.25),
        reward_workers=0,
    )
    with LeavesToEvaluate(config, chat_rows(40)) as trainer, pytest.raises(Interrupted):
        trainer.train()
    assert trainer.run.record.read_evaluations() == []
    config.resume = True
    config.evaluation.colocate = "all"
    with SFTTrainer(config, chat_rows(40)) as resumed:
        resumed.train()
        (row,) = resumed.run.record.read_evaluations()
        again = resumed.evaluate(TrainerState(step=2, version=2))
    assert row["step"] == row["eval/version_min"] == row["eval/version_max"] == 2
    summary = summary_of(resumed)
    assert summary["eval/version_min"] == summary["eval/version_max"] == 4
    assert {"eval/exact_match", "eval/pass@2", "eval/loss"} <= summary.keys()
    assert row == {"step": 2} | {name: again[name] for name in row if name != "step"}
    assert "eval/loss" not in row  # validate_every is 0
    assert summary["policy_digest"] == summary_of(whole[0])["policy_digest"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model.hf_path": None}, "model.hf_path is None; it must be the folder"),
        ({"task.max_tokens": 999}, "task.max_tokens is 999; it must"),
        ({"loss.kl_coef": 0.1}, "loss.kl_coef is 0.1; it must be 0"),
        ({"task.held_out_fraction": 1.0}, "leaves no example"),
        ({"task.loss_on": "words"}, "task.loss_on is 'words'"),
        ({"evaluation.prompts": 0}, "evaluation.prompts is 0; it must be above 0"),
        (
            {"evaluation.max_tokens": 999},
            "evaluation: task.max_prompt_tokens=96 .* rollout.max_tokens=999",
        ),
        ({"evaluation.colocate": "models"}, "evaluation.colocate is 'models'; it must be 'none'"),
        (
            {"evaluation.generator": GeneratorConfig(block_size=7)},
            "evaluation: generator.block_size is 7",
        ),
    ],
)
def test_a_config_that_cannot_work_is_refused_before_anything_starts(config, fields, message):
    task = CopyDigits.Config(max_prompt_tokens=96)
    if any(name.startswith("evaluation.") for name in fields):
        config.evaluation = SampledEvaluationConfig(task=task, max_tokens=4)
    set_fields(config, fields)
    with pytest.raises(ConfigError, match=message):
        SFTTrainer(config, chat_rows(10))


def test_without_rows_and_file_the_error_names_the_field(config):
    with pytest.raises(ConfigError, match="task.path is not set; name a JSONL file or dataset"):
        SFTTrainer(config)


def test_epochs_set_the_number_of_steps_and_each_has_each_example_once(config):
    set_fields(config, {"task.held_out_fraction": 0.0, "epochs": 2})
    trainer = SFTTrainer(config, chat_rows(10))
    assert trainer.total_steps == 5
    assert trainer.dataset_eval == []


def test_a_dataset_is_rows_and_the_summary_counts_what_was_cut_or_left_out(config):
    config.task.max_tokens = 40
    rows = chat_rows(10)
    rows[3]["messages"][1]["content"] = "word " * 60
    for truncate, left, counts in (("drop", 9, (1, 0)), ("right", 10, (0, 1))):
        config.task.truncate = truncate
        trainer = SFTTrainer(config, Dataset.from_list(rows), rows)
        assert len(trainer.dataset_train) == left
        assert trainer.dataset_train[0].tokens.tolist() == trainer.dataset_eval[0].tokens.tolist()
        assert (trainer.dropped, trainer.truncated) == counts  # those of training


def test_examples_of_one_prompt_are_held_out_together(config):
    rows = [*chat_rows(30), *chat_rows(30)]
    for row in rows[30:]:
        row["messages"][1] = {"role": "assistant", "content": "another answer"}
    trainer = SFTTrainer(config, rows)
    examples = [*trainer.dataset_train, *trainer.dataset_eval]
    split = split_examples(examples, 0.3, trainer.key)
    prompts = ({each.tokens[: each.trained.argmax()].tobytes() for each in side} for side in split)
    train, held_out = prompts
    assert train and held_out and not train & held_out


def test_texts_without_a_prompt_are_held_out_one_by_one(config):
    config.task.loss_on = "all"
    trainer = SFTTrainer(config, [{"text": f"text {number}"} for number in range(30)])
    examples = [*trainer.dataset_train, *trainer.dataset_eval]
    assert len({*map(trainer.key, examples)}) == 30
    assert all(split_examples(examples, 0.3, trainer.key))


def test_a_file_of_its_own_holds_the_validation_examples(config, tmp_path, dataset_cache):
    for name, rows in (("train", chat_rows(9)), ("held_out", chat_rows(4))):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config.task.path = str(tmp_path / "train.jsonl")
    config.task.held_out_path = str(tmp_path / "held_out.jsonl")
    trainer = SFTTrainer(config)
    assert (len(trainer.dataset_train), len(trainer.dataset_eval)) == (9, 4)
    assert rl.SFTTrainer is SFTTrainer
    tables = {
        name: Dataset.from_list(chat_rows(count)) for name, count in (("train", 9), ("val", 3))
    }
    DatasetDict(tables).save_to_disk(tmp_path / "splits")
    config.task.path = str(tmp_path / "splits")
    config.task.held_out_split = "val"
    for held_out_path in ("", config.task.path):
        config.task.held_out_path = held_out_path
        trainer = SFTTrainer(config)
        assert (len(trainer.dataset_train), len(trainer.dataset_eval)) == (9, 3)
    config.task.held_out_split = "test"
    with pytest.raises(ConfigError, match="task.held_out_split is 'test'; .* 'train', 'val'"):
        SFTTrainer(config)


def test_a_tokenizer_with_tokens_beyond_the_model_is_refused(config, chat_model, tmp_path):
    larger = shutil.copytree(chat_model, tmp_path / "larger")
    tokenizer = AutoTokenizer.from_pretrained(chat_model)
    room = json.loads((larger / "config.json").read_text())["vocab_size"]
    tokenizer.add_tokens([f"<extra {number}>" for number in range(room + 1 - len(tokenizer))])
    tokenizer.save_pretrained(larger)
    config.model.hf_path = str(larger)
    with pytest.raises(ConfigError, match=rf"model.vocab_size: {room} .* set it to {room + 1}"):
        SFTTrainer(config, chat_rows(4))
