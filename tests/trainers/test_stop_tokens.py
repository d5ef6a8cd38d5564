"""Exports of runs on given examples stop at what the examples stop with."""

import asyncio
import json
import shutil

import pytest
from transformers import AutoTokenizer, GenerationConfig

from rl.model.reward_model import describe_reward_model, describe_stops
from rl.model.shape import ModelConfig
from rl.model.tokenizer import read_stop_token_ids
from rl.tasks.calculator import Calculator
from rl.tasks.gsm8k_jsonl import Gsm8kJsonl
from rl.tasks.mixture import Mixture
from rl.trainers.preference import PreferenceTrainer
from rl.trainers.sft import SFTTrainer
from tests.kit.chats import chat_rows, preference_rows

TEXT, END = 0, 2  # <|endoftext|> and <|im_end|>
CHATS = chat_rows(9)
TEXTS = [{"prompt": f"{number} ", "completion": "yes"} for number in range(9)]


class Nothing:
    """A session without processes."""

    watch = take_digests = None

    async def close(self):
        pass

    stop = close


async def nothing(*_, **__):
    return Nothing()


@pytest.fixture
def trainer_of(examples_config):
    """Function that returns a trainer whose session has no processes."""

    def trainer_of(name, kind, folder, rows):
        fields = {"model.hf_path": str(folder), "task.held_out_fraction": 0.0}
        return kind(examples_config(name, **fields), rows, make_session=nothing)

    return trainer_of


def warnings_of(trainer):
    """Warnings of the run when it begins."""
    asyncio.run(trainer.run.open())
    asyncio.run(trainer.close())
    path = trainer.run.record.events_path
    rows = map(json.loads, path.read_text().splitlines() if path.exists() else [])
    return [row["text"] for row in rows if row["kind"] == "warning"]


@pytest.mark.parametrize(
    ("rows", "stops", "eos"),
    [
        pytest.param(CHATS, [END, TEXT], "<|im_end|>", id="conversations"),
        pytest.param(TEXTS, TEXT, "<|endoftext|>", id="texts"),
        pytest.param([*CHATS, *TEXTS[:3]], [END, TEXT], "<|im_end|>", id="some texts"),
        pytest.param([*TEXTS, *CHATS[:3]], [TEXT, END], "<|endoftext|>", id="some conversations"),
    ],
)
def test_an_export_of_a_base_model_stops_at_what_was_trained(
    trainer_of, base_model, tmp_path, rows, stops, eos
):
    trainer = trainer_of("sft_jsonl", SFTTrainer, base_model, rows)
    warned = warnings_of(trainer)
    assert bool(warned) == isinstance(stops, list)
    assert all("the examples stop with" in text for text in warned)
    export = shutil.copytree(base_model, tmp_path / "export")
    describe_stops(export, trainer.stop_token_ids)
    assert GenerationConfig.from_pretrained(export).eos_token_id == stops
    tokenizer = AutoTokenizer.from_pretrained(export)
    assert tokenizer.eos_token == eos
    wanted = stops if isinstance(stops, list) else [stops]
    assert {*read_stop_token_ids(tokenizer)} == {*wanted}


@pytest.mark.parametrize("generation", [None, {}, {"eos_token_id": TEXT}])
def test_stop_tokens_of_config_json_count_unless_generation_config_names_some(
    base_model, tmp_path, generation
):
    folder = shutil.copytree(base_model, tmp_path / "model")
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": [1, END]}))
    (folder / "generation_config.json").unlink()
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert {*read_stop_token_ids(tokenizer)} == ({TEXT} if generation else {TEXT, 1, END})


def test_an_export_of_a_chat_model_keeps_its_files(trainer_of, chat_model, tmp_path):
    trainer = trainer_of("sft_jsonl", SFTTrainer, chat_model, CHATS)
    export = shutil.copytree(chat_model, tmp_path / "export")
    describe_stops(export, trainer.stop_token_ids)
    assert warnings_of(trainer) == []
    for path in chat_model.glob("*.json"):
        assert (export / path.name).read_bytes() == path.read_bytes()


@pytest.mark.parametrize("is_mixed", [False, True])
def test_questions_to_a_base_model_stop_where_its_chat_template_stops(
    base_model, tmp_path, is_mixed
):
    path = tmp_path / "problems.jsonl"
    rows = [{"question": f"What is {n}?", "answer": f"#### {n}"} for n in range(40)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = Gsm8kJsonl.Config(path=str(path))
    config = Mixture.Config(tasks={"one": config}) if is_mixed else config
    task = config.build(seed=0, model=ModelConfig(hf_path=str(base_model)))
    assert task.stop_token_ids == (END, TEXT)
    export = shutil.copytree(base_model, tmp_path / "export")
    task.describe(export)
    assert GenerationConfig.from_pretrained(export).eos_token_id == [END, TEXT]
    assert AutoTokenizer.from_pretrained(export).eos_token == "<|im_end|>"


def test_an_export_of_an_agent_stops_where_its_dialect_stops(base_model, tmp_path):
    task = Calculator.Config().build(seed=0, model=ModelConfig(hf_path=str(base_model)))
    export = shutil.copytree(base_model, tmp_path / "export")
    task.describe(export)
    assert GenerationConfig.from_pretrained(export).eos_token_id == [END, TEXT]


def test_a_reward_model_of_conversations_has_a_pad_token_that_stops_none(
    trainer_of, base_model, tmp_path
):
    folder = shutil.copytree(base_model, tmp_path / "model")
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"pad_token": "<|im_end|>"}))
    rows = preference_rows(9)
    trainer = trainer_of("reward_model_jsonl", PreferenceTrainer, folder, rows)
    export = shutil.copytree(folder, tmp_path / "export")
    describe_reward_model(export, "Qwen3ForSequenceClassification")  # as the ranks do
    describe_stops(export, trainer.stop_token_ids)
    pad = json.loads((export / "config.json").read_text())["pad_token_id"]
    assert pad == AutoTokenizer.from_pretrained(export).pad_token_id
    assert pad is not None and pad not in (TEXT, END)
