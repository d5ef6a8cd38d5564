"""PEFT loads exported adapters, and computes what the policy and the merged export compute."""

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from torchtitan.components.lora import LoRAConverter

from rl.model.shape import ModelConfig
from rl.training.checkpoint import Checkpointer
from rl.training.lora import rename_base
from rl.types import Batch
from tests.kit.batches import VOCAB_SIZE, ragged_batch
from tests.kit.family_cases import ONE_EACH
from tests.kit.model_cases import EQUAL, TIED, gemma3, gpt_oss, phi3, qwen3_5, qwen3_5_moe
from tests.kit.model_folders import (
    Folder,
    tensors_of,
    transformers_logits,
    transformers_model,
)
from tests.kit.scenes import SIZES, engine_of, exported, learn, loaded, logits_of
from tests.training.test_adapters import SMALL, layers_of, step, train
from tests.training.test_lora import LORA, wake

ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
FEED_FORWARD = {"gate_proj", "up_proj", "down_proj"}
FUSED = {"mlp.experts.gate_up_proj", "mlp.experts.down_proj"}
FORMS: dict[str, tuple[Folder, set[str], set[str], float]] = {
    "fused": (Folder(TIED), ATTENTION | FEED_FORWARD, set(), 7),
    "split": (Folder(), ATTENTION | FEED_FORWARD, set(), 7),
    "experts": (Folder(experts=True), ATTENTION, {"gate_up_proj", "down_proj"}, 4 + 3 * 4),
    "clamped": (gpt_oss(), ATTENTION, FUSED, 4 + 2),
    "joined": (
        phi3(hidden_size=64, num_attention_heads=2),
        {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"},
        set(),
        4,
    ),
    "hybrid": (
        qwen3_5(num_hidden_layers=2, layer_types=["linear_attention", "full_attention"]),
        ATTENTION | FEED_FORWARD | {"in_proj_qkv", "in_proj_z", "out_proj"},
        set(),
        (3 + 3 + 4 + 3) / 2,
    ),
    "gelu": (
        gemma3(num_hidden_layers=2, layer_types=["full_attention"] * 2),
        ATTENTION | FEED_FORWARD,
        set(),
        7,
    ),
    "stacked": (
        qwen3_5_moe(num_hidden_layers=2, layer_types=["full_attention"] * 2),
        ATTENTION,
        FUSED,
        4 + 2,
    ),
    "wide norms": (Folder(family="olmo2"), ATTENTION | FEED_FORWARD, set(), 7),
}
"""Folders, the modules and parameters that PEFT adapts, and the mean of stored A's of a layer."""


def adapted_in_peft(
    folder: Folder, place: Path, *, fuse_qkv: bool = True, most: float = 3e-5
) -> PeftModel:
    """Train an adapter on ``folder`` and export it to ``out`` in ``place``; return PEFT's model.

    Raises AssertionError if logits of PEFT or of the merged export differ from the policy's by more
    than ``most``: kernels of some processors round logits of up to 5 by more than 1e-5.
    """
    source = folder.write(place / "base")
    model = ModelConfig(hf_path=str(source), fuse_qkv=fuse_qkv)
    engine = engine_of(model, folder=str(place), lora=LORA, lr=1e-2)
    assert loaded(engine, str(place), model) == {}
    wake(engine)
    learn(engine, ragged_batch())
    out = exported(engine, model, place)

    tokens = torch.randint(SIZES["vocab_size"], (2, 32), generator=torch.Generator().manual_seed(1))
    ours = logits_of(engine, tokens)

    base = transformers_model(source)
    with torch.no_grad():
        untouched = base(tokens).logits
        of_export = transformers_logits(out, tokens)
        peft = PeftModel.from_pretrained(base, out / "adapter").eval()
        of_peft = peft(tokens).logits
    assert (ours - untouched).abs().max() > 0.1
    assert (of_export - ours).abs().max() <= most
    assert (of_peft - ours).abs().max() <= most
    return peft


@pytest.mark.long
@pytest.mark.parametrize("name", ONE_EACH.values())
def test_peft_puts_an_adapter_on_a_base_of_each_family(tmp_path, name):
    """Logits are up to 5, and of some families float32 rounds them by more than 1e-5."""
    adapted_in_peft(EQUAL[name], tmp_path, most=1e-4)


@pytest.mark.parametrize("form", FORMS)
def test_peft_puts_the_adapter_on_the_base_and_gets_the_same_logits(tmp_path, monkeypatch, form):
    folder, modules, parameters, count = FORMS[form]
    monkeypatch.chdir(tmp_path)
    peft = adapted_in_peft(folder, Path(), fuse_qkv=form != "split")
    config = peft.peft_config["default"]
    found = (config.base_model_name_or_path, config.r, config.lora_alpha)
    assert found == (str(tmp_path / "base"), LORA.rank, LORA.alpha)
    assert set(config.target_modules) == modules
    assert set(config.target_parameters or []) == parameters
    assert len(tensors_of(Path("out/adapter"))) == 2 * 2 * count


@pytest.mark.parametrize("form", ["split", "experts", "clamped", "stacked"])
def test_an_adapter_is_exported_for_peft_with_its_own_rank(tmp_path, form):
    """Head included. PEFT and the merged export compute the log-probs of the adapter."""
    folder, modules, parameters, _ = FORMS[form]
    source = folder.write(tmp_path / "base")
    model = ModelConfig(hf_path=str(source), fuse_qkv=False)
    lora = LoRAConverter.Config(rank=4, target_modules=layers_of(form))
    engine = engine_of(model, folder=str(tmp_path), lora=lora, lr=1e-1)
    checkpointer = Checkpointer(engine, model, folder=str(tmp_path))
    checkpointer.load()
    engine.adapters.create("b", SMALL)
    train(engine, "b", 1), step(engine, "b")
    engine.adapters.merge("b")
    checkpointer.export_hf(f"{tmp_path}/out")
    checkpointer.close()
    tokens = torch.randint(VOCAB_SIZE, (1, 15), generator=torch.Generator().manual_seed(1))
    batch = Batch(tokens=tokens[0], lengths=torch.tensor([15]), loss_weights=torch.ones(15))
    ours = engine.forward(batch)["logprobs"][1:]
    base = transformers_model(source)
    with torch.no_grad():
        plain = base(tokens).logits
        peft = PeftModel.from_pretrained(base, tmp_path / "out" / "adapter").eval()
        logits = [plain, peft(tokens).logits, transformers_logits(tmp_path / "out", tokens)]
    theirs = [
        each[0, :-1].log_softmax(-1).gather(-1, tokens[0, 1:, None]).squeeze(-1) for each in logits
    ]
    assert (ours - theirs[0]).abs().max() > 0.01
    assert max(float((ours - each).abs().max()) for each in theirs[1:]) <= 1e-5
    config = peft.peft_config["default"]
    assert (config.r, config.lora_alpha) == (2, 3.0)
    assert {*config.target_modules} == {"lm_head", *modules - ATTENTION}
    assert {*(config.target_parameters or [])} == parameters


def test_an_adapter_names_the_weights_that_the_run_started_from(tmp_path):
    def named():
        described = json.loads((out / "adapter" / "adapter_config.json").read_text())
        return described["base_model_name_or_path"]

    model = ModelConfig(hf_path=str(FORMS["split"][0].write(tmp_path / "base")))
    engine = engine_of(model, folder=str(tmp_path), lora=LORA)
    checkpoint = engine.config.checkpoint
    for path, in_hf, load_only, base in [
        (str(tmp_path / "start"), True, False, str(tmp_path / "start")),
        (str(tmp_path / "step-3"), False, False, None),
        (str(tmp_path / "step-3"), False, True, model.hf_path),
    ]:
        checkpoint.initial_load_path = path
        checkpoint.initial_load_in_hf = checkpoint.initial_load_model_only = in_hf
        checkpoint.load_only = load_only
        out = exported(engine, model, tmp_path)
        assert named() == base
    rename_base(out / "adapter", str(tmp_path / "start"))
    assert named() == str(tmp_path / "start")
