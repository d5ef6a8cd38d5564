"""Small updates: an export says what its dtype keeps of them."""

import json

import pytest
import torch
from torchtitan.components.lora import LoRAConverter

from rl.model.shape import ModelConfig
from rl.model.updates import Update, sample
from rl.training.checkpoint import Checkpointer
from tests.training.batches import ragged_batch
from tests.training.model_folders import (
    Folder,
    open_folder,
    tensors_of,
    transformers_logits,
)
from tests.training.scenes import engine_of, learn, logits_of

LORA = LoRAConverter.Config(rank=2, target_modules=["wq", "wv", "w1", "w2"])


@pytest.mark.parametrize(("lr", "lost"), [(1e-6, True), (1e-2, False)])
@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_an_export_says_what_its_dtype_keeps_of_the_update(tmp_path, lr, lost, lora):
    source = Folder(dtype="bfloat16").write(tmp_path / "in")
    model = ModelConfig(hf_path=str(source), fuse_qkv=False)
    engine = engine_of(model, folder=str(tmp_path), loads=True, lora=lora, decay=0.0)
    checkpointer = Checkpointer(engine, model, folder=str(tmp_path))
    checkpointer.load()
    for seed in range(2):
        learn(engine, ragged_batch(seed=seed), lr=lr)
    rounded = checkpointer.export_hf(str(tmp_path / "rounded"))
    whole = checkpointer.export_hf(str(tmp_path / "whole"), "float32")
    checkpointer.close()
    before = tensors_of(source)
    count = sum(each.numel() for each in before.values())
    found = {}
    for name, update in (("rounded", rounded), ("whole", whole)):
        after = tensors_of(tmp_path / name)
        assert {each.dtype for each in after.values()} == {
            torch.float32 if name == "whole" else torch.bfloat16
        }
        changed = sum(int((after[key] != each).sum()) for key, each in before.items())
        assert (update.weights, update.changed) == (count, changed)
        found[name] = torch.cat(
            [(after[key].float() - each).flatten() for key, each in before.items()]
        )
    kept = float(found["rounded"] @ found["whole"] / found["whole"].square().sum())
    assert rounded.share == pytest.approx(kept, rel=1e-4, abs=1e-6)
    assert whole.share == pytest.approx(1.0)
    assert (rounded.loses_most, whole.loses_most) == (lost, False)
    assert ("--dtype float32 keeps all" in rounded.describe()) == lost
    tokens = torch.randint(40, (1, 12), generator=torch.Generator().manual_seed(1))
    wanted = logits_of(engine, tokens)
    assert (transformers_logits(tmp_path / "whole", tokens) - wanted).abs().max() <= 1e-5
    assert json.loads((tmp_path / "whole" / "config.json").read_text())["dtype"] == "float32"
    assert json.loads((tmp_path / "rounded" / "config.json").read_text())["dtype"] == "bfloat16"


def test_an_export_without_its_source_says_nothing(tmp_path):
    source = Folder(dtype="bfloat16").write(tmp_path / "in")
    engine, checkpointer = open_folder(source, tmp_path)
    learn(engine, ragged_batch(), lr=1e-6)
    (source / "model.safetensors").unlink()
    assert checkpointer.export_hf(str(tmp_path / "out")).describe() == ""
    checkpointer.close()


def test_a_sample_has_elements_of_all_columns():
    wide = torch.arange(64 * 4096).view(4096, 64)
    assert len((sample([wide]).long() % 64).unique()) == 64
    assert torch.equal(sample([wide[0], wide[1]]), wide[:2].flatten().float())


def test_updates_of_shards_add_up():
    drawn = torch.Generator().manual_seed(0)
    before = torch.randn(1000, generator=drawn)
    after = before + 1e-2 * torch.randn(1000, generator=drawn)
    whole = Update.of(before, after, torch.bfloat16)
    parts = [Update.of(before[s], after[s], torch.bfloat16) for s in (slice(300), slice(300, None))]
    total = Update.total(parts)
    assert (total.weights, total.changed) == (whole.weights, whole.changed)
    assert total.share == pytest.approx(whole.share)
    assert Update.of(before, before, torch.bfloat16).share == 1.0
