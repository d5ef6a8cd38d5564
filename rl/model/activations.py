"""Activations: outputs of a model's modules at chosen positions of one sequence."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import nn

from rl.model.shape import ModelShape
from rl.model.shards import whole_of

PARTS = (
    "tok_embeddings",
    "attention_norm",
    "attention.qkv_linear",
    "attention.q_norm",
    "attention.k_norm",
    "attention.rope",
    "attention.inner_attention",
    "attention.wo",
    "delta_net",
    "attention_post_norm",
    "ffn_norm",
    "feed_forward",
    "moe.router",
    "moe",
    "ffn_post_norm",
    "norm",
)
"""Modules of which outputs are kept, in the order of a layer; trainer and generator have all."""

OUTPUTS = {
    "qkv_linear": {"queries": 0, "keys": 1, "values": 2},
    "rope": {"queries": 0, "keys": 1},
    "router": {"scores": 2, "experts": 1},
}
"""Kept outputs of modules that return several, by name."""


@dataclass(slots=True, kw_only=True)
class Activations:
    """Outputs of a model's modules for one sequence.

    ``outputs`` are float32 [len(positions), width] by name, in the order of execution. A position
    that the model did not compute has NaN, as one whose keys and values were cached.
    """

    positions: list[int]
    outputs: dict[str, torch.Tensor] = field(default_factory=dict)
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    """Types that the outputs had in the model."""
    logits: torch.Tensor | None = None
    """Logits for the next token, float32 [len(positions), vocab_size], if they were kept; minus
    infinity outside a sampling mask."""
    logprobs: torch.Tensor | None = None
    """Log-prob of each token of the sequence, float32 [L]; NaN if it was not computed."""


def joined(ranks: Sequence[Activations], shape: ModelShape) -> Activations:
    """Return the activations of tensor-parallel ranks, in order, as those of one model."""
    first = ranks[0]
    heads = {
        **dict.fromkeys(("queries", "q_norm", "inner_attention"), shape.n_heads),
        **dict.fromkeys(("keys", "values", "k_norm"), shape.n_kv_heads),
    }
    outputs = {}
    for name, output in first.outputs.items():
        width = output.shape[1]
        count = heads.get(name.rpartition(".")[2], 0) * shape.head_dim // width or 1
        # with more ranks than key heads, neighbours have the same head
        chosen = ranks[:: len(ranks) // count]
        outputs[name] = torch.cat([rank.outputs[name] for rank in chosen], dim=1)
    return replace(first, outputs=outputs)


class Recorder:
    """Keeps activations of ``model``, a Qwen3 of torchtitan, while the block runs. ::

        with Recorder(model, [0, 17]) as recorder:
            model(tokens, positions=positions)
        recorder.activations

    Each forward pass adds the positions that it computes. Compiled models call no hooks.
    """

    def __init__(self, model: nn.Module, positions: Sequence[int]):
        self.activations = Activations(positions=list(positions))
        self.seen = torch.empty(0, dtype=torch.int64)
        """Positions of the last forward pass, int64 [T]."""
        self._model = model
        self._handles: list[Any] = []

    def __enter__(self) -> Self:
        hook = self._model.register_forward_pre_hook(self._begin, with_kwargs=True)
        self._handles.append(hook)
        for name, module in _parts(self._model):
            self._handles.append(module.register_forward_hook(self._keeper(name)))
        return self

    def __exit__(self, *error: Any) -> None:
        for handle in self._handles:
            handle.remove()

    def _begin(self, _module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        positions = kwargs["positions"] if "positions" in kwargs else args[1]
        self.seen = positions[0].cpu()

    def _keeper(self, name: str) -> Callable[[nn.Module, tuple, Any], None]:
        several = OUTPUTS.get(name.rpartition(".")[2])

        def keep(_module: nn.Module, _args: tuple, out: Any) -> None:
            if several is None:
                self._keep(name, out)
                return
            for part, index in several.items():
                self._keep(f"{name}.{part}", out[index])

        return keep

    def _keep(self, name: str, out: torch.Tensor) -> None:
        flat = whole_of(out).detach().reshape(len(self.seen), -1)
        activations = self.activations
        width = flat.shape[1]
        if name not in activations.outputs:
            activations.outputs[name] = torch.full((len(activations.positions), width), torch.nan)
            if out.is_floating_point():
                activations.dtypes[name] = out.dtype
        for row, position in enumerate(activations.positions):
            index = torch.nonzero(self.seen == position).flatten()
            if len(index):
                activations.outputs[name][row] = flat[index[0]].float().cpu()


def _parts(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of PARTS in ``model`` by their names without those of wrappers."""
    for name, module in model.named_modules():
        plain = name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")
        if re.sub(r"^layers\.\d+\.", "", plain) in PARTS:
            yield plain, module
