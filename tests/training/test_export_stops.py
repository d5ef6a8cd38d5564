"""The export of a run ends completions at the tokens at which the run's task ends them."""

import json
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from rl.model.shape import ModelConfig
from rl.tasks.copy_digits import TOKEN, CopyDigits
from rl.training.checkpoint import Checkpointer
from tests.training.model_folders import Folder
from tests.training.scenes import SIZES, engine_of

EOS = TOKEN["<eos>"]
PAD = TOKEN["<pad>"]
BOS = TOKEN["<bos>"]


def exported(tmp_path: Path, model: ModelConfig) -> Path:
    """Export of a model from its first weights."""
    checkpointer = Checkpointer(engine_of(model, folder=str(tmp_path)), model, folder=str(tmp_path))
    checkpointer.export_hf(str(tmp_path / "export"))
    checkpointer.close()
    return tmp_path / "export"


def end_after_three(tokens: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Logits that choose a digit at first and ``<eos>`` as the third token of a completion
    of two.
    """
    chosen = EOS if tokens.shape[1] == 4 else TOKEN["7"]
    return torch.full_like(scores, -1e9).index_fill(1, torch.tensor([chosen]), 0.0)


def test_transformers_stops_at_the_stop_tokens_of_the_task(tmp_path):
    model = ModelConfig(**SIZES, max_seq_len=64)
    export = exported(tmp_path, model)
    CopyDigits.Config().build(seed=0, model=model).describe(export)
    for config in (AutoConfig.from_pretrained(export), GenerationConfig.from_pretrained(export)):
        assert (config.eos_token_id, config.pad_token_id, config.bos_token_id) == (EOS, PAD, BOS)
    loaded = AutoModelForCausalLM.from_pretrained(export)
    prompt = torch.tensor([[TOKEN["copy"], TOKEN["7"]]])
    said = loaded.generate(prompt, max_new_tokens=9, logits_processor=[end_after_three])
    assert said[0, 2:].tolist() == [TOKEN["7"], TOKEN["7"], EOS]


def test_all_stop_tokens_are_written(tmp_path):
    model = ModelConfig(**SIZES, max_seq_len=64)
    export = exported(tmp_path, model)
    task = CopyDigits.Config().build(seed=0, model=model)
    task.set_tokenizer(task.tokenizer, [EOS, PAD])
    task.describe(export)
    assert GenerationConfig.from_pretrained(export).eos_token_id == [EOS, PAD]


def test_a_task_without_stop_tokens_exports_none(tmp_path):
    model = ModelConfig(**SIZES, max_seq_len=64)
    export = exported(tmp_path, model)
    task = CopyDigits.Config().build(seed=0, model=model)
    task.stop_token_ids = ()
    task.describe(export)
    assert GenerationConfig.from_pretrained(export).eos_token_id is None


def test_an_export_adds_only_a_missing_generation_config(tmp_path):
    source = Folder().write(tmp_path / "in")
    (source / "generation_config.json").unlink()
    (source / "tokenizer_config.json").write_text("{}")
    model = ModelConfig(hf_path=str(source))
    export = exported(tmp_path, model)
    task = CopyDigits.Config().build(seed=0, model=model)
    task.describe(export)
    assert GenerationConfig.from_pretrained(export).eos_token_id == EOS
    assert (export / "config.json").read_bytes() == (source / "config.json").read_bytes()
    own = {"eos_token_id": 5}
    (export / "generation_config.json").write_text(json.dumps(own))
    task.describe(export)
    assert json.loads((export / "generation_config.json").read_text()) == own
    assert not (export / "tokenizer.json").exists()
