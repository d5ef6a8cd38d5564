"""Small updates: an export says what its dtype keeps of them."""

import json

import pytest
import torch
from torchtitan.components.lora import LoRAConverter

from rl.model.dither import dithered
from rl.model.shape import ModelConfig
from rl.model.shards import Box
from rl.model.updates import Update, sample
from rl.training.checkpoint import Checkpointer
from tests.kit.batches import ragged_batch
from tests.kit.model_folders import (
    Folder,
    open_folder,
    tensors_of,
    transformers_logits,
)
from tests.kit.scenes import engine_of, learn, logits_of

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


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_dithered_weights_follow_updates_that_bfloat16_rounds_away(tmp_path, lora):
    source = Folder(dtype="bfloat16").write(tmp_path / "in")
    model = ModelConfig(hf_path=str(source), fuse_qkv=False)
    shares = {}
    for dither in (False, True):
        engine = engine_of(
            model, folder=str(tmp_path), loads=True, lora=lora, decay=0.0, dither=dither
        )
        checkpointer = Checkpointer(engine, model, folder=str(tmp_path))
        checkpointer.load()
        started = checkpointer.export_hf(str(tmp_path / "started"))
        assert started.changed == 0
        learn(engine, ragged_batch(seed=0), lr=1e-5)
        shares[dither] = checkpointer.export_hf(str(tmp_path / "learned")).share
        checkpointer.close()
    assert shares[False] < 0.2
    assert shares[True] == pytest.approx(1.0, abs=0.15)


def test_dither_depends_on_no_layout():
    whole = torch.randn(6, 40, generator=torch.Generator().manual_seed(0)).bfloat16()
    whole[0, :3] = torch.tensor([0.0, 1.0, -(2.0**-126)])
    noisy = dithered(whole, Box.whole(whole.shape), "layers.0")
    assert torch.equal(noisy.bfloat16(), whole)
    assert noisy[0, 0] == 0
    steps = (noisy - whole.float()).abs()[whole != 0]
    assert (steps > 0).float().mean() > 0.99
    box = Box((2, 8), (3, 16))
    part = dithered(whole[box.slices_in(Box.whole(whole.shape))], box, "layers.0")
    assert torch.equal(part, noisy[2:5, 8:24])
    assert not torch.equal(dithered(whole, Box.whole(whole.shape), "layers.1"), noisy)
    assert torch.equal(dithered(noisy, Box.whole(whole.shape), "layers.0"), noisy)
