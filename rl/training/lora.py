"""Low-rank adapters (LoRA, arXiv:2106.09685) of linear layers and of experts: the weights merged
with them, and their export to PEFT.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torchtitan.components.checkpointer.dcp import CheckpointManager
from torchtitan.components.checkpointer.utils import canonical_fqn

from rl.compat.titan import lora_scale
from rl.compat.torch_internals import local_tensor
from rl.model.hub import Snapshot
from rl.model.shards import Box, Shard, Shards, whole_of
from rl.training.hugging_face_names import Block, HuggingFaceNames
from rl.training.sharded_model import local_box, shards_of
from rl.training.trainer_config import AdapterConfig, Source


class AdaptedWeight(NamedTuple):
    """A weight that has an adapter."""

    layer: Any
    """Module of the weight, whose modules ``lora_a`` and ``lora_b`` have the factors."""
    name: str
    """Name of the weight in its module, and of the factors in theirs."""

    @property
    def factors(self) -> tuple[Tensor, Tensor]:
        """Live parameters: A [rank, in] and B [out, rank] of a linear layer, A [experts, in, rank]
        and B [experts, out, rank] of experts.
        """
        return getattr(self.layer.lora_a, self.name), getattr(self.layer.lora_b, self.name)

    def whole_factors(self) -> tuple[Tensor, Tensor]:
        """Return A [..., in, rank] and B [..., out, rank], float32. Every rank gathers both."""
        a, b = map(_whole, self.factors)
        return (a.mT if a.ndim == 2 else a), b

    def added(self, shard: Shard) -> Tensor:
        """Return what the adapter adds to ``shard``, the shard of the weight on this rank.

        All ranks must call the method together. Ranks that have whole experts gather nothing.
        """
        scale = lora_scale(self.layer)
        if len(shard.shape) == 2:
            a, b = self.whole_factors()
            rows, columns = shard.box.slices_in(Box.whole(shard.shape))
            return scale * (b[rows] @ a[columns].mT)
        in_dim = self.layer.in_dim
        dims = (in_dim, 3 - in_dim)
        a, b = (_rows(part, shard.box, dim) for part, dim in zip(self.factors, dims, strict=True))
        return scale * (b @ a.mT if in_dim == 2 else a @ b.mT)


def _whole(factor: Tensor) -> Tensor:
    return whole_of(factor).detach().float()


def _rows(factor: Tensor, box: Box, dim: int) -> Tensor:
    """Return the part of a factor of experts that ``box`` of their weight needs. Rows of the factor
    are dimension ``dim`` of the weight.
    """
    experts, rows = (slice(box.offset[d], box.offset[d] + box.shape[d]) for d in (0, dim))
    if local_box(factor).slices_in(Box.whole(factor.shape))[:2] == (experts, rows):
        return local_tensor(factor).detach().float()
    return _whole(factor)[experts, rows]


def adapted_weights(model: nn.Module) -> dict[str, AdaptedWeight]:
    """Return the weights that have an adapter, by their names."""
    return {
        canonical_fqn(f"{prefix}.{name}"): AdaptedWeight(module, name)
        for prefix, module in model.named_modules()
        if hasattr(module, "lora_a")
        for name, _ in module.lora_a.named_parameters()
    }


class MergedWeights:
    """Shards of the policy's weights on this rank: W + alpha / rank * B @ A for a weight with
    an adapter.

    The shard of a weight without an adapter is the live parameter. The first call of ``shards``
    allocates memory for the merged weights; ``refresh`` updates them. All ranks must call both
    methods together. A rank merges only its own shard, in float32. Tiller's tests do not cover
    CUDA, which runs the same code.
    """

    def __init__(self, model: nn.Module):
        self._model = model
        self._adapted = adapted_weights(model)
        self.buffers: dict[str, Tensor] = {}
        """Merged weights, by parameter."""
        self.source: Source = None
        """Source of the adapter that is merged."""

    def shards(self) -> Shards:
        """Return the shards by torchtitan's names, in its order; the same tensors each time."""
        shards = shards_of(self._model)
        if not self.buffers:
            self.buffers = {name: torch.empty_like(shards[name].tensor) for name in self._adapted}
            self.refresh()
        return {
            name: shard._replace(tensor=self.buffers.get(name, shard.tensor))
            for name, shard in shards.items()
        }

    @torch.no_grad()
    def refresh(self) -> None:
        """Merge again, after the parameters changed."""
        shards = shards_of(self._model)
        for name, merged in self.buffers.items():
            shard = shards[name]
            merged.copy_(shard.tensor + self._adapted[name].added(shard))


class PeftAdapter(NamedTuple):
    """An adapter as PEFT stores it."""

    tensors: dict[str, Tensor]
    """Whole tensors, float32."""
    modules: dict[str, int]
    """Ranks of the linear layers that it adapts, by name."""
    parameters: dict[str, int]
    """Ranks of the parameters that it adapts, by name: each is the weights of all experts of a
    layer."""


Factors = tuple[Tensor, Tensor]
"""A and B of a weight."""


def peft_adapter(
    model: nn.Module, names: HuggingFaceNames, config: AdapterConfig | None
) -> PeftAdapter:
    """Return the adapter with ``config``, on every rank; an empty one for a model without adapters.
    All ranks must call the function together.
    """
    adapter = PeftAdapter({}, {}, {})
    stacks: dict[str, dict[str, list[Factors]]] = {}  # by module and parameter
    for name, adapted in adapted_weights(model).items():
        a, b = (tensor.cpu() for tensor in adapted.whole_factors())
        layer, _, weight = name.rpartition(".")
        if config is None or not config.adapts(f"{layer}.lora_a.{weight}"):
            continue
        a, b = a[..., : config.rank], b[..., : config.rank]
        blocks = [*names.blocks(name, tuple(b.shape))]
        whole = names.stack_of(blocks[0].tensor)
        if whole.endswith(".weight"):
            _add_linear(adapter, blocks, a, b)
        else:
            module, _, parameter = whole.rpartition(".")
            stacks.setdefault(module, {}).setdefault(parameter, []).append((a, b))
    for module, parameters in stacks.items():
        _add_parameters(adapter, module, parameters)
    return adapter


def _add_parameters(
    adapter: PeftAdapter, module: str, parameters: dict[str, list[Factors]]
) -> None:
    """Add the parameters of ``module``, from A [experts, in, rank] and B [experts, out, rank] of
    the weights in each. Each of these weights has numbers of the rank of its own.
    """
    # PEFT wraps the module once for a parameter, and around that for each later one
    wrapper = f"base_model.model.{module}"
    for parameter, weights in reversed(parameters.items()):
        a, b = zip(*weights, strict=True)
        rows = torch.cat(a, -1).mT.flatten(0, 1)
        columns = torch.stack([torch.block_diag(*blocks) for blocks in zip(*b, strict=True)], -1)
        name = ".".join([*module.split(".")[-2:], parameter])
        adapter.parameters[name] = len(rows) // columns.shape[-1]
        adapter.tensors[f"{wrapper}.lora_A.weight"] = rows.contiguous()
        adapter.tensors[f"{wrapper}.lora_B.weight"] = columns.flatten(1).contiguous()
        wrapper += ".base_layer"


def _add_linear(adapter: PeftAdapter, blocks: list[Block], a: Tensor, b: Tensor) -> None:
    """Add the linear layers that ``blocks`` of B belong to. Those of a fused weight have the same
    A; each has its own rows of B. Each expert is a layer. In a layer that several weights are
    joined in, each weight has numbers of the rank of its own.
    """
    for tensor in dict.fromkeys(block.tensor for block in blocks):
        parts = [block for block in blocks if block.tensor == tensor]
        layer = tensor.removesuffix(".weight")
        expert = parts[0].box.offset[: b.ndim - len(parts[0].shape)]
        rows = torch.zeros(parts[0].shape)
        for _, shape, box, offset in parts:
            target = Box(offset, box.shape[len(expert) :]).slices_in(Box.whole(shape))
            rows[target] = b[box.slices_in(Box.whole(tuple(b.shape)))]
        for factor, part, dim in (("A", a[expert].mT, 0), ("B", rows, 1)):
            key = f"base_model.model.{layer}.lora_{factor}.weight"
            others = [adapter.tensors[key]] if key in adapter.tensors else []
            adapter.tensors[key] = torch.cat([*others, part], dim)  # a copy: not shared memory
        adapter.modules[layer.rpartition(".")[-1]] = adapter.tensors[key].shape[1]


def base_of(checkpoint: CheckpointManager.Config, hf_path: str | None) -> str | None:
    """Return the Hugging Face folder of the weights that adapters of a run are for; None if they
    are in no folder.
    """
    path = checkpoint.initial_load_path
    if not path or checkpoint.load_only:  # of a saved run, ``path`` is its checkpoint
        return hf_path
    return path if checkpoint.initial_load_in_hf else None


def rename_base(folder: Path, base: str | None) -> None:
    """Name another model that the adapter in ``folder`` is for."""
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | _described(base), indent=2))


def _described(base: str | None) -> dict[str, Any]:
    if isinstance(base, Snapshot):
        return {"base_model_name_or_path": base.name, "revision": base.commit}
    return {"base_model_name_or_path": base and str(Path(base).absolute()), "revision": None}


def write_peft(
    folder: Path, adapter: PeftAdapter, config: AdapterConfig, *, base: str | None
) -> None:
    """Create ``folder``, an adapter that PEFT loads onto the model ``base``. None means that the
    base is in no folder.
    """
    described: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        **_described(base),
        "r": config.rank,
        "lora_alpha": config.alpha,
        "target_modules": sorted(adapter.modules),
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
    ranks = sorted((adapter.modules | adapter.parameters).items())
    joined = {name: rank for name, rank in ranks if rank != config.rank}
    if joined:
        scale = config.alpha / config.rank
        alphas = {name: rank * scale for name, rank in joined.items()}
        described |= {"rank_pattern": joined, "alpha_pattern": alphas}
    if adapter.parameters:
        described["target_parameters"] = sorted(adapter.parameters)
    folder.mkdir()
    save_file(adapter.tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps(described, indent=2))
