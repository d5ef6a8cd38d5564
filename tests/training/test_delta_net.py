"""Qwen3.5 equals transformers' source in float64, and in float32 it is as near to that."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from torchtitan.models.common import CosSinRoPE, token_dispatcher
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe

from rl.model.decoder import decoder_config
from rl.model.shape import ModelConfig, family_of, shape_of
from rl.model.shards import Box
from rl.training.attention import DenseAttention
from rl.training.documents import Documents
from rl.training.hugging_face_files import stored_tensors
from rl.training.hugging_face_folders import read_tensors
from rl.training.hugging_face_names import HuggingFaceNames
from rl.training.sharded_model import shard_of, shards_of
from tests.kit.model_cases import EQUAL
from tests.kit.model_folders import transformers_model

LENGTHS = [20, 150, 1, 3, 64, 65, 97, 2, 128]
SOURCES = {"qwen3_5_text": modeling_qwen3_5, "qwen3_5_moe_text": modeling_qwen3_5_moe}
IN_FLOAT64 = {
    "torch.float32": "torch.float64",
    ".float()": ".double()",
    "dtype=torch.float)": "dtype=torch.double)",
    "dtype=torch.float,": "dtype=torch.double,",
}


def referee(folder: Path, tmp_path: Path, family: str) -> torch.nn.Module:
    """Return transformers' model whose source has float64 in place of float32."""
    single = transformers_model(folder)
    source = SOURCES[family]
    text = Path(source.__file__).read_text()
    for old, new in IN_FLOAT64.items():
        text = text.replace(old, new)
    path = tmp_path / "modeling_float64.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(f"{source.__package__}.{path.stem}", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config = single.config
    config._experts_implementation = "eager"
    model = getattr(module, type(single).__name__)(config).double().eval()
    model.load_state_dict(single.double().state_dict())
    return model


def ours(folder: Path, dtype: torch.dtype) -> tuple[torch.nn.Module, HuggingFaceNames]:
    """Return Tiller's model with the weights of ``folder``."""
    shape = shape_of(ModelConfig(hf_path=str(folder)))
    config = decoder_config(shape, fuse_qkv=True, inner_attention=DenseAttention.Config())
    model = config.build()
    for layer in model.layers.values():
        if layer.attention is not None:
            layer.attention.rope.init_states(buffer_device="cpu")
            rope = layer.attention.rope
            inverse = 1 / rope.config.theta ** (
                torch.arange(0, rope.config.dim, 2).to(dtype) / rope.config.dim
            )
            angles = torch.outer(torch.arange(max(LENGTHS)).to(dtype), inverse).repeat(1, 2)
            rope.cache = torch.cat([angles.cos(), angles.sin()], dim=-1)
    model = model.to(dtype)
    names = HuggingFaceNames(config, family_of(shape))
    read_tensors(folder, stored_tensors(folder, shape), names, shards_of(model).values())
    return model, names


def documents() -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    return [torch.randint(40, (length,), generator=draw) for length in LENGTHS]


def logprobs_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return logits[:-1].log_softmax(-1).gather(1, tokens[1:, None]).flatten()


def our_logprobs(model: torch.nn.Module) -> torch.Tensor:
    """Return the log-probs of one packed row."""
    tokens = torch.cat(documents())[None]
    positions = torch.cat([*map(torch.arange, LENGTHS)])[None]
    logits = model(tokens, positions=positions, attention_masks=Documents(positions))[0]
    parts = zip(logits.split(LENGTHS), documents(), strict=True)
    return torch.cat([logprobs_of(*part) for part in parts])


def gradients(model: torch.nn.Module, logprobs: torch.Tensor) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(2)
    (logprobs * torch.randn(len(logprobs), generator=draw)).sum().backward()
    return {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


def in_their_tensors(model: torch.nn.Module, names: HuggingFaceNames) -> dict[str, torch.Tensor]:
    """Return our gradients by the names of Hugging Face's tensors."""
    result: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            continue
        box = shard_of(name, parameter).box
        for piece in names.pieces(name, tuple(parameter.shape), box):
            whole = result.setdefault(piece.tensor, parameter.new_zeros(piece.shape))
            place = piece.in_tensor.slices_in(Box.whole(piece.shape))
            whole[place] = parameter.grad[piece.in_shard]
    return result


def by_expert(gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return transformers' gradients with a tensor for each expert, as its folders have."""
    result = {}
    for name, gradient in gradients.items():
        if ".mlp.experts." not in name:
            result[name] = gradient
            continue
        place, _, part = name.rpartition(".")
        parts = ("gate_proj", "up_proj") if part == "gate_up_proj" else (part,)
        for expert, rows in enumerate(gradient):
            for own, each in zip(parts, rows.chunk(len(parts)), strict=True):
                result[f"{place}.{expert}.{own}.weight"] = each
    return result


def errors(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> dict[str, float]:
    assert found.keys() == wanted.keys()
    return {n: float((found[n] - each).norm() / each.norm()) for n, each in wanted.items()}


@pytest.mark.parametrize("name", ["qwen3_5_text", "qwen3_5_moe_text"])
def test_log_probs_and_gradients_of_packed_documents_are_those_of_transformers(
    tmp_path, monkeypatch, name
):
    def their_logprobs(model: torch.nn.Module) -> torch.Tensor:
        """Return the log-probs of one document at a time: transformers packs none on CPU."""
        logits = (model(each[None], use_cache=False).logits[0] for each in documents())
        return torch.cat([*map(logprobs_of, logits, documents())])

    def rotate(_self, q, k, cache):
        """torchtitan's rotation without a cast."""
        cos, sin = cache.chunk(2, dim=-1)
        half = CosSinRoPE._rotate_half
        return q * cos + half(q) * sin, k * cos + half(k) * sin

    class Widened:
        """torch with float64 in place of float32."""

        float32 = torch.float64

        def __getattr__(self, name):
            return getattr(torch, name)

    folder = EQUAL[name].write(tmp_path / "in")
    exact = referee(folder, tmp_path, EQUAL[name].family)
    wanted = their_logprobs(exact)
    wanted_gradients = by_expert(gradients(exact, wanted))
    theirs = their_logprobs(single := transformers_model(folder))
    their_errors = errors(by_expert(gradients(single, theirs)), wanted_gradients)

    model, names = ours(folder, torch.float32)
    found = our_logprobs(model)
    gradients(model, found)
    our_errors = errors(in_their_tensors(model, names), wanted_gradients)
    assert (found - wanted).norm() <= 1.5 * (theirs - wanted).norm()
    assert sum(our_errors.values()) <= 1.5 * sum(their_errors.values())

    monkeypatch.setattr(CosSinRoPE, "apply_rotary_emb", rotate)
    monkeypatch.setattr(token_dispatcher, "torch", Widened())
    model, names = ours(folder, torch.float64)
    found = our_logprobs(model)
    gradients(model, found)
    assert (found - wanted).abs().max() <= 1e-12
    assert max(errors(in_their_tensors(model, names), wanted_gradients).values()) <= 1e-11
