"""Model folders that transformers saves, and changes of them."""

import json
import shutil
import tempfile
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from rl.model.shape import ModelConfig
from rl.training.checkpoint import Checkpointer
from tests.kit.scenes import engine_of, unequal

SIZES = {
    "vocab_size": 40,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
    "pad_token_id": None,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
}
ONE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
GONE = object()
"""Value that means that the key is left out."""
_saved: dict[str, tempfile.TemporaryDirectory[str]] = {}
"""Folders that were saved in this process, to copy them."""


@dataclass(frozen=True)
class Folder:
    """Differences of a folder of the corpus from a folder that transformers saves."""

    sizes: dict[str, Any] = field(default_factory=dict)
    """Fields of the transformers model that is saved."""
    experts: bool = False
    family: str = "qwen3"
    dtype: str = "float32"
    config: dict[str, Any] = field(default_factory=dict)
    """Keys of config.json that are replaced afterwards."""
    max_shard_size: str = "1GB"
    damage: Callable[[Path], None] = lambda folder: None
    """Function that changes the folder at the end."""

    def write(self, folder: Path) -> Path:
        """Save the model with random weights that matter, and change it; return ``folder``."""
        key = repr((self.sizes, self.experts, self.family, self.dtype, self.max_shard_size))
        if key not in _saved:
            _saved[key] = tempfile.TemporaryDirectory()
            self._save(Path(_saved[key].name))
        shutil.copytree(_saved[key].name, folder, dirs_exist_ok=True)
        edit_config(folder, **self.config)
        self.damage(folder)
        return folder

    def _save(self, folder: Path) -> None:
        """Save the model as transformers does."""
        torch.manual_seed(0)
        family = "qwen3_moe" if self.experts else self.family
        sizes = SIZES | (EXPERTS if self.experts else {}) | self.sizes
        fields = {name: deepcopy(value) for name, value in sizes.items() if value is not GONE}
        config = AutoConfig.for_model(family, **fields, initializer_range=0.1, dtype=self.dtype)
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name:
                    parameter.uniform_(0.5, 1.5)
                    if "gemma" in family or ("qwen3_5" in family and "linear" not in name):
                        parameter.sub_(1.0)  # these norms add 1
                elif "conv1d" in name:
                    parameter.normal_(std=0.5)
                elif "A_log" in name:  # float32 rounds large sums of decays
                    parameter.uniform_(-4.0, 0.0)
                elif "bias" in name:
                    parameter.normal_(std=0.3)
                elif "sinks" in name:
                    parameter.uniform_(-1.0, 4.0)
        model.save_pretrained(folder, max_shard_size=self.max_shard_size)


def open_folder(source: Path, out: Path, **fields: Any) -> tuple[Any, Checkpointer]:
    """Return an engine with the weights of ``source``, and its checkpointer."""
    model = ModelConfig(hf_path=str(source), **fields)
    engine = engine_of(model, folder=str(out), loads=True)
    assert all(parameter.isnan().all() for parameter in engine.model.parameters())
    checkpointer = Checkpointer(engine, model, folder=str(out))
    assert checkpointer.load() == {}
    return engine, checkpointer


def transformers_model(folder: Path) -> torch.nn.Module:
    """Return a float32 model. Fails if the folder lacks a weight or has a surplus one."""
    is_bounded = json.loads((folder / "config.json").read_text()).get("attn_logit_softcapping")
    model, info = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        output_loading_info=True,
        attn_implementation="eager" if is_bounded else None,  # others bound no products
    )
    assert {kind: list(names) for kind, names in info.items() if names} == {}
    return model.eval()


@torch.no_grad()
def transformers_logits(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    return transformers_model(folder)(tokens).logits


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for path in folder.glob("*.safetensors")
        for name, tensor in load_file(path).items()
    }


def same_tensors(one: Path, other: Path) -> None:
    before = tensors_of(one)
    after = tensors_of(other)
    assert unequal(before, after) == []
    assert [each.dtype for each in before.values()] == [after[name].dtype for name in before]


def edit_config(folder: Path, **changes: Any) -> None:
    """Replace keys of config.json."""
    path = folder / "config.json"
    content = json.loads(path.read_text()) | changes
    path.write_text(
        json.dumps({name: value for name, value in content.items() if value is not GONE})
    )


def edit_tensors(folder: Path, **changes: torch.Tensor | None) -> None:
    """Add, replace or (None) remove tensors of a folder of one file; ``__`` in a name is a dot."""
    named = {name.replace("__", "."): tensor for name, tensor in changes.items()}
    tensors = load_file(folder / ONE_FILE) | named
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, folder / ONE_FILE, {"format": "pt"})


def tensors(**changes: torch.Tensor | None) -> Callable[[Path], None]:
    return lambda folder: edit_tensors(folder, **changes)


def weight_map(change: Callable[[dict[str, str]], Any]) -> Callable[[Path], None]:
    """Have ``change`` edit the weight map of the index."""

    def edit(folder: Path) -> None:
        index = json.loads((folder / INDEX).read_text())
        change(index["weight_map"])
        (folder / INDEX).write_text(json.dumps(index))

    return edit


def text(name: str, content: str) -> Callable[[Path], Any]:
    """Write ``content`` in place of a file."""
    return lambda folder: (folder / name).write_text(content)


def shards(damage: Callable[[Path], Any] = lambda folder: None) -> Folder:
    """A folder of several files."""
    return Folder(max_shard_size="20KB", damage=damage)


def cast(dtype: torch.dtype, *names: str) -> Callable[[Path], None]:
    """Store tensors (all, without names) in another dtype."""

    def casts(folder: Path) -> None:
        stored = load_file(folder / ONE_FILE)
        edit_tensors(folder, **{name: stored[name].to(dtype) for name in names or stored})

    return casts


def truncate(folder: Path) -> None:
    last = max(folder.glob("*.safetensors"))
    with last.open("r+b") as file:
        file.truncate(last.stat().st_size - 100)


def lose_shard(folder: Path) -> None:
    max(folder.glob("*.safetensors")).unlink()


def repeat_tensor(folder: Path) -> None:
    """Store the final norm a second time, with other values, in the first shard."""
    first = min(folder.glob("*.safetensors"))
    save_file(load_file(first) | {"model.norm.weight": torch.ones(64)}, first, {"format": "pt"})


def index_one_shard(folder: Path) -> None:
    """Keep all tensors in one file that only an index names."""
    name = "model-00001-of-00001.safetensors"
    (folder / ONE_FILE).rename(folder / name)
    index = dict.fromkeys(load_file(folder / name), name)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}))


def store_head_of_tied(folder: Path, scale: float = 1.0) -> None:
    embedding = load_file(folder / ONE_FILE)["model.embed_tokens.weight"]
    edit_tensors(
        folder, lm_head__weight=embedding * scale, model__rotary_emb__inv_freq=torch.ones(16)
    )


def rename(change: Callable[[str], str]) -> Callable[[Path], None]:
    """Store the tensors under other names."""

    def renames(folder: Path) -> None:
        stored = load_file(folder / ONE_FILE)
        save_file(
            {change(name): tensor for name, tensor in stored.items()},
            folder / ONE_FILE,
            {"format": "pt"},
        )

    return renames


def change_a_row_of_the_head(folder: Path) -> None:
    """Store the head of a tied model with one row that differs from the embedding."""
    head = load_file(folder / ONE_FILE)["model.embed_tokens.weight"].clone()
    head[33] += 1.0
    edit_tensors(folder, lm_head__weight=head)


def both_forms(folder: Path) -> None:
    """Put a single file of other weights beside the shards."""
    save_file({"model.norm.weight": torch.ones(64)}, folder / ONE_FILE, {"format": "pt"})


def stack_experts(folder: Path) -> Path:
    """Store all experts of a layer of Qwen3.5 in two tensors, as the Hub has them."""
    stored = load_file(folder / ONE_FILE)
    kept = {name: each for name, each in stored.items() if ".mlp.experts." not in name}
    for place in {name.partition(".mlp.")[0] for name in stored if ".mlp.experts." in name}:
        experts = range(sum(f"{place}.mlp.experts." in name for name in stored) // 3)
        gates, ups, downs = (
            [stored[f"{place}.mlp.experts.{expert}.{part}_proj.weight"] for expert in experts]
            for part in ("gate", "up", "down")
        )
        both = [torch.cat(each) for each in zip(gates, ups, strict=True)]
        kept[f"{place}.mlp.experts.gate_up_proj"] = torch.stack(both)
        kept[f"{place}.mlp.experts.down_proj"] = torch.stack(downs)
    save_file(kept, folder / ONE_FILE, {"format": "pt"})
    return folder


def within_vision(folder: Path) -> None:
    """Store the model as the language model of one with vision and multi-token prediction."""
    language = {"model.layers": "model.language_model.layers"}
    language |= {f"model.{name}": f"model.language_model.{name}" for name in ("embed", "norm")}

    def change(name: str) -> str:
        own = next(old for old in (*language, "lm_head") if name.startswith(old))
        return name.replace(own, language.get(own, own), 1)

    rename(change)(folder)
    edit_tensors(
        folder, model__visual__pos_embed__weight=torch.ones(4, 4), mtp__norm__weight=torch.ones(64)
    )
    path = folder / "config.json"
    text = json.loads(path.read_text())
    kind = text["model_type"].removesuffix("_text")
    name = text.pop("architectures")[0].replace("ForCausalLM", "ForConditionalGeneration")
    config = {"architectures": [name], "model_type": kind, "text_config": text}
    path.write_text(json.dumps(config | {"tie_word_embeddings": text["tie_word_embeddings"]}))
