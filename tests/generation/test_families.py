"""Generators of all model families give transformers' log-probs of the folder's model."""

import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torchtitan.models.common.attention import ScaledDotProductAttention

from rl.generation.generator_config import GeneratorConfig
from rl.model.decoder import decoder_config, parameter_shapes
from rl.model.shape import ModelConfig, ModelShape, family_of, shape_of
from rl.model.shards import Box
from rl.training.hugging_face_files import stored_tensors
from rl.training.hugging_face_names import HuggingFaceNames
from tests.kit.family_cases import ALL, ONE_EACH, UNSHARDED
from tests.kit.generator_ranks import GeneratorRanks, generate, push, request
from tests.kit.model_folders import Folder, tensors_of, transformers_model
from tests.kit.policies import TIED_SPLIT
from tests.kit.tables import cases

PROMPTS = [[5], [*range(1, 20)], [7, 3] * 60]
DISTINCT = {"llama 3.1, older keys", "qwen2, yarn", "smollm3, a list of layers"}
DISTINCT |= {"gpt_oss, as the Hub has it", "granite", "exaone4, windows", "gemma3_text", "glm4"}
DISTINCT |= {"qwen3_5_moe_text"}
"""Folders whose options are computed in another way. Others are for the long tests."""
TENSOR_PARALLEL = [name for family, name in ONE_EACH.items() if family not in UNSHARDED]
TENSOR_PARALLEL += ["smollm3, a list of layers", "llama 3.2", "granite, tied, biases"]
TWO_KEY_HEADS = ("qwen3_5_text", "qwen3_5_moe_text")
"""Folders whose gated delta nets have two key heads, which no four ranks divide."""
MORE = "qwen3_5_text, as many key heads as value heads"


def shrink(folder: Path) -> None:
    """Shrink the projections of a model with gated delta nets. With larger ones transformers' own
    log-probs in float32 are more than 1e-5 from those in float64.
    """
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        for name, tensor in tensors.items():
            tensor.mul_(0.4 if tensor.ndim > 1 and "conv1d" not in name else 1.0)
        save_file(tensors, path, {"format": "pt"})


def folder_of(name: str, place: Path) -> Path:
    """Write the folder ``name`` in float32."""
    folder = replace(ALL[name], dtype="float32").write(place)
    if name.startswith("qwen3_5"):
        shrink(folder)
    return folder


def weights_of(folder: Path, shape: ModelShape, *, fuse_qkv: bool) -> dict[str, torch.Tensor]:
    """Return the folder's weights by torchtitan's names."""
    attention = ScaledDotProductAttention.Config()
    config = decoder_config(shape, fuse_qkv=fuse_qkv, inner_attention=attention)
    names = HuggingFaceNames(config, family_of(shape))
    tensors = tensors_of(folder)
    stored = stored_tensors(folder, shape)
    weights = {}
    for name, size in parameter_shapes(shape, fuse_qkv=fuse_qkv).items():
        weights[name] = torch.empty(size)
        for piece in names.pieces(name, size, Box.whole(size)):
            tensor = stored[piece.tensor]
            source = tensor.place_of(piece.in_tensor)
            weights[name][piece.in_shard] = tensors[tensor.name][source]
    return weights


def worst_error(
    ranks: GeneratorRanks,
    folder: Path,
    *,
    fuse_qkv: bool,
    family: str | None = None,
    expert_parallel: bool = False,
) -> float:
    """Return the largest difference between transformers' log-probs and those of samples from
    the folder's weights. Check that the recorded experts are transformers'.
    """
    model = ModelConfig(hf_path=str(folder), max_seq_len=256, fuse_qkv=fuse_qkv, family=family)
    shape = shape_of(model)
    weights = weights_of(folder, shape, fuse_qkv=fuse_qkv)
    records = shape.num_experts > 0
    ranks.rebuild(model, expert_parallel=expert_parallel, record_experts=records)
    ranks.run(push, weights, 1)
    asks = [request(str(n), prompt, seed=n, max_tokens=40) for n, prompt in enumerate(PROMPTS)]
    first, *others = ranks.run(generate, asks)
    assert all(other == first for other in others)
    reference = transformers_model(folder)
    worst = 0.0
    for prompt, completion in zip(PROMPTS, first, strict=True):
        tokens = torch.tensor([prompt + completion.tokens])
        with torch.no_grad():
            found = reference(tokens, **({"output_router_logits": True} if records else {}))
        if records:
            likes = torch.stack(found.router_logits, 1)[:-1]
            chosen = likes.topk(shape.experts_per_token).indices.sort().values
            assert np.array_equal(np.sort(completion.experts.ids[:-1]), chosen)
        logprobs = found.logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        wanted = logprobs.gather(1, tokens[:, len(prompt) :].T).flatten()
        worst = max(worst, (torch.tensor(completion.logprobs) - wanted).abs().max().item())
    return worst


@pytest.mark.parametrize("name", cases(ALL, DISTINCT))
def test_generators_agree_with_transformers(one_rank, tmp_path, name):
    assert worst_error(one_rank, folder_of(name, tmp_path / "in"), fuse_qkv=True) <= 1e-5


def test_a_family_of_the_documentation_agrees_with_transformers(one_rank, tmp_path, monkeypatch):
    """It stands in a module outside of the repository."""
    text = Path("docs/your-model.md").read_text()
    module = tmp_path / "my_families" / "seed_oss.py"
    module.parent.mkdir()
    module.write_text(re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0])
    monkeypatch.syspath_prepend(tmp_path)
    one_rank.run(extend_path, str(tmp_path))
    sizes = {"residual_dropout": 0.0, "attention_dropout": 0.0, "mlp_bias": True}
    folder = Folder(sizes, family="seed_oss").write(tmp_path / "in")
    assert worst_error(one_rank, folder, fuse_qkv=True, family="my_families.seed_oss") <= 1e-5


def extend_path(_engine: object, folder: str) -> None:
    sys.path.insert(0, folder)


@pytest.fixture(scope="module")
def sharded():
    """Return a function from a degree of tensor parallelism to ranks that the test rebuilds."""
    ranks = {}

    def of(degree: int) -> GeneratorRanks:
        if degree not in ranks:
            config = GeneratorConfig(tensor_parallel_degree=degree, kv_cache_gib=0.05)
            ranks[degree] = GeneratorRanks(config, replace(TIED_SPLIT, n_kv_heads=4))
        return ranks[degree]

    yield of
    for each in ranks.values():
        each.close()


@pytest.mark.long
@pytest.mark.parametrize(
    ("tp", "name"),
    [
        *((2, name) for name in TENSOR_PARALLEL),
        *((4, name) for name in (*TENSOR_PARALLEL, MORE) if name not in TWO_KEY_HEADS),
    ],
)
def test_tensor_parallel_generators_agree_with_transformers(sharded, tmp_path, tp, name):
    folder = folder_of(name, tmp_path / "in")
    for fuse_qkv in (True, False):
        whole = fuse_qkv and name == "gpt_oss"
        error = worst_error(sharded(tp), folder, fuse_qkv=fuse_qkv, expert_parallel=whole)
        assert error <= 1e-5
