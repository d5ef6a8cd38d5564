"""The export of a run ends completions at the tokens at which the run's task ends them."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from rl.model.shape import ModelConfig
from rl.tasks.copy_digits import TOKEN, CopyDigits
from tests.kit.model_folders import Folder
from tests.kit.scenes import SIZES, engine_of, exported

EOS = TOKEN["<eos>"]
PAD = TOKEN["<pad>"]
BOS = TOKEN["<bos>"]
MODEL = ModelConfig(**SIZES, max_seq_len=64)


def described(tmp_path: Path, model: ModelConfig, stops: Sequence[int]) -> tuple[Path, CopyDigits]:
    """Return an export of a model from its first weights that its task describes, and the task."""
    export = exported(engine_of(model, folder=str(tmp_path)), model, tmp_path)
    task = CopyDigits.Config().build(seed=0, model=model)
    task.stop_token_ids = tuple(stops)
    task.describe(export)
    return export, task


def end_after_three(tokens: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Logits that choose a digit at first, and ``<eos>`` as the third token."""
    chosen = EOS if tokens.shape[1] == 4 else TOKEN["7"]
    return torch.full_like(scores, -1e9).index_fill(1, torch.tensor([chosen]), 0.0)


def test_transformers_stops_at_the_stop_tokens_of_the_task(tmp_path):
    export, _ = described(tmp_path, MODEL, [EOS])
    for config in (AutoConfig.from_pretrained(export), GenerationConfig.from_pretrained(export)):
        assert (config.eos_token_id, config.pad_token_id, config.bos_token_id) == (EOS, PAD, BOS)
    loaded = AutoModelForCausalLM.from_pretrained(export)
    prompt = torch.tensor([[TOKEN["copy"], TOKEN["7"]]])
    said = loaded.generate(prompt, max_new_tokens=9, logits_processor=[end_after_three])
    assert said[0, 2:].tolist() == [TOKEN["7"], TOKEN["7"], EOS]


def test_a_task_without_stop_tokens_exports_none(tmp_path):
    export, _ = described(tmp_path, MODEL, [])
    assert GenerationConfig.from_pretrained(export).eos_token_id is None


def test_an_export_adds_only_a_missing_generation_config(tmp_path):
    source = Folder().write(tmp_path / "in")
    (source / "generation_config.json").unlink()
    (source / "tokenizer_config.json").write_text("{}")
    export, task = described(tmp_path, ModelConfig(hf_path=str(source)), [EOS])
    assert GenerationConfig.from_pretrained(export).eos_token_id == EOS
    assert (export / "config.json").read_bytes() == (source / "config.json").read_bytes()
    own = {"eos_token_id": 5}
    (export / "generation_config.json").write_text(json.dumps(own))
    task.describe(export)
    assert json.loads((export / "generation_config.json").read_text()) == own
    assert not (export / "tokenizer.json").exists()
