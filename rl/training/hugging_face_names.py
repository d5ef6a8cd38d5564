"""Mapping of rectangles of torchtitan's parameters to Hugging Face's tensors."""

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.qwen3 import Qwen3Model, Qwen3StateDictAdapter

from rl.errors import RunError
from rl.model.decoder import decoder_config, parameter_shapes
from rl.model.delta_net import DeltaLayer
from rl.model.families import Family
from rl.model.shape import ModelShape, family_of
from rl.model.shards import Box
from rl.training.value_head import ValueHead

SCORE = "score.weight"
"""Tensor of a value head in a folder of transformers' sequence classification, [1, dim]."""

EXPERT_BIAS = "e_score_correction_bias"
"""End of the name of the bias of a router, as DeepSeek-V3 has it. A folder may lack all of them."""

Shapes = dict[str, tuple[int, ...]]
"""Shapes of whole tensors, by name."""


class Block(NamedTuple):
    """A rectangle of a parameter that is also a rectangle of one Hugging Face tensor."""

    tensor: str
    shape: tuple[int, ...]
    """Shape of the whole tensor, which may lack leading dimensions of the parameter."""
    box: Box
    """The rectangle within the parameter."""
    offset: tuple[int, ...]
    """Start of the rectangle within the tensor."""


class TensorPiece(NamedTuple):
    """Intersection of one rank's shard of a parameter with a Hugging Face tensor."""

    tensor: str
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    in_tensor: Box
    """The rectangle within the tensor."""
    in_shard: tuple[int | slice, ...]
    """Index of the rectangle within the shard."""


class HuggingFaceNames:
    """Names of torchtitan's state dict adapter, and the layout of each parameter.

    Most parameters are one tensor. The rows of a fused qkv weight are grouped by key-value head:
    the query heads of the group, its key head, its value head. Those of a gated delta net are
    grouped likewise. Each expert of a parameter [E, ...] is a tensor, unless the family has all
    experts in one.
    """

    def __init__(self, model: Qwen3Model.Config, family: Family):
        table = Qwen3StateDictAdapter(model, None).from_hf_map
        self._names = {ours: theirs for theirs, ours in table.items() if ours is not None}
        self._names |= family.tensors
        bias = f"model.layers.{{}}.mlp.gate.{EXPERT_BIAS}"
        self._names["layers.{}.moe.router.expert_bias"] = bias
        if isinstance(model.lm_head, ValueHead.Config):
            self._names["lm_head.weight"] = SCORE
        attention = model.first_attention
        head = attention.head_dim
        queries = attention.n_heads // attention.n_kv_heads * head
        self._joined = family.joined
        self._stacked = family.stacked
        self._rows = dict.fromkeys(("k_proj", "v_proj"), attention.n_kv_heads * head)
        self._rows["q_proj"] = attention.n_heads * head
        gates = 2 if getattr(attention, "gated", False) else 1
        self._group_rows = {"wq": gates * queries, "wk": head, "wv": head}
        nets = (layer.delta_net for layer in model.layers if isinstance(layer, DeltaLayer.Config))
        self._delta_heads = next((net.heads for net in nets), None)

    def tensors(self, parameters: Mapping[str, tuple[int, ...]]) -> Shapes:
        """Return the Hugging Face tensors that hold ``parameters``, in the parameters' order."""
        return {
            block.tensor: block.shape for item in parameters.items() for block in self.blocks(*item)
        }

    def pieces(self, name: str, shape: tuple[int, ...], box: Box) -> Iterator[TensorPiece]:
        """Yield the pieces that tile ``box`` of parameter ``name`` of ``shape``."""
        for block in self.blocks(name, shape):
            common = block.box.intersect(box)
            if common is None:
                continue
            lacks = len(shape) - len(block.shape)
            starts = zip(common.offset[lacks:], block.box.offset[lacks:], block.offset, strict=True)
            in_tensor = Box(
                tuple(ours - begin + theirs for ours, begin, theirs in starts), common.shape[lacks:]
            )
            slices = common.slices_in(box)
            in_shard = (*(index.start for index in slices[:lacks]), *slices[lacks:])
            yield TensorPiece(block.tensor, block.shape, in_tensor, in_shard)

    def blocks(self, name: str, shape: tuple[int, ...]) -> Iterator[Block]:
        """Yield the blocks that tile parameter ``name`` of ``shape``.

        Raises RunError if Hugging Face's model has no such parameter.
        """
        for block in self._blocks(name, shape):
            yield self._in_joined(block)

    def stack_of(self, tensor: str) -> str:
        """Return the tensor of all experts in which a folder may have the layer ``tensor`` of one;
        of any other tensor itself.
        """
        module, _, layer = tensor.removesuffix(".weight").rpartition(".")
        experts = module.rpartition(".")[0]
        for end, layers in self._stacked.items():
            if layer in layers and f".{experts}.".endswith(f".{end.rpartition('.')[0]}."):
                return f"{experts}.{end.rpartition('.')[-1]}"
        return tensor

    def _in_joined(self, block: Block) -> Block:
        """Return ``block`` as a part of the tensor that its tensor is joined in, if any."""
        *place, part, kind = block.tensor.split(".")
        for whole, parts in self._joined.items():
            if part in parts:
                # gate and up projections have as many rows
                rows = [self._rows.get(projection, block.shape[0]) for projection in parts]
                start = sum(rows[: parts.index(part)]) + block.offset[0]
                offset, shape = (start, *block.offset[1:]), (sum(rows), *block.shape[1:])
                return Block(".".join([*place, whole, kind]), shape, block.box, offset)
        return block

    def _blocks(self, name: str, shape: tuple[int, ...]) -> Iterator[Block]:
        whole = Box.whole(shape)
        if "qkv_linear.wqkv." in name:
            groups = shape[0] // sum(self._group_rows.values())
            row = 0
            for group in range(groups):
                for projection, rows in self._group_rows.items():
                    tensor = self._translate(name.replace("wqkv", projection))
                    offset = (group * rows, *whole.offset[1:])
                    yield Block(
                        tensor, (groups * rows, *shape[1:]), whole.slab(0, row, rows), offset
                    )
                    row += rows
        elif self._delta_heads and re.search(r"\.delta_net\.(qkv|conv)\.", name):
            tensor = self._translate(name)
            groups = shape[0] // self._delta_heads.rows
            row = 0
            for group in range(groups):
                start = 0  # of all heads of a kind in the tensor
                for rows in self._delta_heads.widths:
                    offset = (start + group * rows, *whole.offset[1:])
                    yield Block(tensor, shape, whole.slab(0, row, rows), offset)
                    row += rows
                    start += groups * rows
        elif self._pattern(name).count("{}") > 1:
            for expert in range(shape[0]):
                tensor = self._translate(name, expert)
                yield Block(tensor, shape[1:], whole.slab(0, expert, 1), whole.offset[1:])
        else:
            yield Block(self._translate(name), shape, whole, whole.offset)

    def _translate(self, name: str, expert: int | None = None) -> str:
        layer = re.search(r"\d+", name)
        return self._pattern(name).format(layer and layer[0], expert)

    def _pattern(self, name: str) -> str:
        place, _, kind = re.sub(r"\d+", "{}", name, count=1).rpartition(".")
        # a bias stands beside its weight
        pattern = self._names.get(f"{place}.weight" if kind == "bias" else f"{place}.{kind}")
        if pattern is None:
            raise RunError(f"parameter {name} has no place in a Hugging Face model")
        return pattern.removesuffix("weight") + kind if kind == "bias" else pattern


def hugging_face_tensors(shape: ModelShape) -> Shapes:
    """Return the Hugging Face tensors of a model of ``shape``; allocates no memory."""
    config = decoder_config(
        shape, fuse_qkv=False, inner_attention=ScaledDotProductAttention.Config()
    )
    names = HuggingFaceNames(config, family_of(shape))
    return names.tensors(parameter_shapes(shape, fuse_qkv=False))
