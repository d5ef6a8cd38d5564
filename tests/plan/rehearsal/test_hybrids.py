"""Models with gated delta nets run on GPUs at the size of Qwen3.5-4B and Qwen3.5-35B-A3B."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3_5MoeTextConfig, Qwen3_5TextConfig

from tests.kit.tokenizers import qwen3
from tests.plan.rehearsal.rehearsals import is_known, waits_of
from tests.plan.rehearsal.test_layouts import check_collectives

ROPE = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
DENSE = Qwen3_5TextConfig(
    hidden_size=2560, intermediate_size=9216, tie_word_embeddings=True, rope_parameters=ROPE
)
MODELS = {
    "Qwen3.5-4B": (DENSE, "qwen3_8b"),
    "Qwen3.5-35B-A3B": (Qwen3_5MoeTextConfig(rope_parameters=ROPE), "qwen3_30b_a3b"),
}
"""Configs of models, whose other sizes are transformers' defaults, and recipes that train them."""


def write(config: Any, folder: Path) -> None:
    """Write a model of which the files have headers, and no numbers on the disk."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    files: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
    for name, tensor in model.state_dict().items():
        if name != "lm_head.weight" or not config.tie_word_embeddings:
            layer = name.split(".")[2] if ".layers." in name else "others"
            files[f"{layer}.safetensors"][name] = tensor
    for file, tensors in files.items():
        at = 0
        header: dict[str, Any] = {}
        for name, tensor in tensors.items():
            end = at + 2 * tensor.numel()
            sizes = [*tensor.shape]
            header[name] = {"dtype": "BF16", "shape": sizes, "data_offsets": [at, end]}
            at = end
        text = json.dumps(header).encode()
        with (folder / file).open("wb") as stream:
            stream.write(len(text).to_bytes(8, "little") + text)
            stream.truncate(8 + len(text) + at)
    places = {name: file for file, tensors in files.items() for name in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    qwen3().save_pretrained(folder)


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_full_size_is_rehearsed_without_the_delta_rule(tmp_path, rehearsals, name):
    config, recipe = MODELS[name]
    write(config, tmp_path)
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "1 + 1?", "answer": "#### 2"}\n' * 300)
    options = f"--model.hf_path {tmp_path} --task.path {rows} --generator.enforce_eager"
    found = rehearsals.of(f"--config {recipe} {options}")
    assert found["error"] is None
    kept, planned = found["kept"], found["planned"]
    names = ("parameters", "gradients", "optimizer states")
    assert {each: planned[each] for each in names} == {each: kept[each] for each in names}
    assert found["peak"] <= sum(planned.values())
    check_collectives(found)
    assert [wait for wait in waits_of(found) if not is_known(wait)] == []
    generated = rehearsals.of(f"--config {recipe} {options}", role="generator-0")
    assert generated["error"] is None
    assert generated["planned"]["parameters"] == generated["kept"]["parameters"]
    assert generated["generator"]["token"] == generated["token"]
