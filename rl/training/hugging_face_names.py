"""Places of the parameters of torchtitan's Qwen3 in Hugging Face's tensors, rectangle by
rectangle.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.qwen3 import Qwen3Model, Qwen3StateDictAdapter

from rl.errors import RunError
from rl.model.qwen3 import parameter_shapes, qwen3_config
from rl.model.shape import ModelShape
from rl.model.shards import Box

Shapes = dict[str, tuple[int, ...]]
"""Shapes of whole tensors, by name."""


class Block(NamedTuple):
    """A rectangle of a parameter that lies, as it is, in one Hugging Face tensor."""

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
    """The table of torchtitan's adapter, and what it does to shapes.

    Most parameters are one tensor. The rows of a fused qkv weight lie group by group of its
    key-value heads: the group's query heads, its key head, its value head. Experts [E, ...] are a
    tensor each.
    """

    def __init__(self, model: Qwen3Model.Config):
        table = Qwen3StateDictAdapter(model, None).from_hf_map
        self._names = {ours: theirs for theirs, ours in table.items() if ours is not None}
        attention = model.first_attention
        head = attention.head_dim
        queries = attention.n_heads // attention.n_kv_heads * head
        self._group_rows = {"wq": queries, "wk": head, "wv": head}

    def tensors(self, parameters: Shapes) -> Shapes:
        """The Hugging Face tensors that hold ``parameters``, in the parameters' order."""
        return {
            block.tensor: block.shape for item in parameters.items() for block in self.blocks(*item)
        }

    def pieces(self, name: str, shape: tuple[int, ...], box: Box) -> Iterator[TensorPiece]:
        """The pieces that tile ``box`` of parameter ``name`` of ``shape``."""
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
            in_shard = (*(each.start for each in slices[:lacks]), *slices[lacks:])
            yield TensorPiece(block.tensor, block.shape, in_tensor, in_shard)

    def blocks(self, name: str, shape: tuple[int, ...]) -> Iterator[Block]:
        """The blocks that tile parameter ``name`` of ``shape``; raises RunError if it has no place
        there.
        """
        if "qkv_linear.wqkv." in name:
            yield from self._fused_blocks(name, shape)
        elif ".inner_experts." in name:
            begin = (0,) * (len(shape) - 1)
            for expert in range(shape[0]):
                box = Box((expert, *begin), (1, *shape[1:]))
                yield Block(self._translate(name, expert), shape[1:], box, begin)
        else:
            yield Block(self._translate(name), shape, Box.whole(shape), (0,) * len(shape))

    def _fused_blocks(self, name: str, shape: tuple[int, ...]) -> Iterator[Block]:
        rest = shape[1:]
        begin = (0,) * (len(shape) - 1)
        groups = shape[0] // sum(self._group_rows.values())
        row = 0
        for group in range(groups):
            for projection, rows in self._group_rows.items():
                tensor = self._translate(name.replace("wqkv", projection))
                box = Box((row, *begin), (rows, *rest))
                yield Block(tensor, (groups * rows, *rest), box, (group * rows, *begin))
                row += rows

    def _translate(self, name: str, expert: int | None = None) -> str:
        layer = re.search(r"\d+", name)
        pattern = self._names.get(re.sub(r"\d+", "{}", name, count=1))
        if pattern is None:
            raise RunError(f"parameter {name} has no place in a Hugging Face Qwen3")
        return pattern.format(layer and layer[0], expert)


def hugging_face_tensors(shape: ModelShape) -> Shapes:
    """The tensors of a Hugging Face Qwen3 of ``shape``; takes no memory."""
    config = qwen3_config(shape, fuse_qkv=False, inner_attention=ScaledDotProductAttention.Config())
    return HuggingFaceNames(config).tensors(parameter_shapes(shape, fuse_qkv=False))
