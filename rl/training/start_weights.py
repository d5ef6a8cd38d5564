"""Weights that a policy starts from, for generators without a trainer."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.models.common.attention import ScaledDotProductAttention

from rl.model.decoder import decoder_config, parameter_shapes
from rl.model.digest import ShardDigests, digests
from rl.model.shape import ModelConfig, ModelShape, family_of, shape_of
from rl.model.shards import Box, Region, Shard
from rl.training.hugging_face_files import StoredTensor, stored_tensors
from rl.training.hugging_face_folders import check_parameters, read_tensors
from rl.training.hugging_face_names import HuggingFaceNames, Shapes
from rl.training.sharded_model import draw, initialized


@dataclass(frozen=True, kw_only=True)
class Start:
    """Weights that generators load themselves."""

    folder: str | None = None
    """Hugging Face folder of the weights; by default ``model.hf_path``, and without one the random
    weights of the session's seed."""

    dtype: str = "float32"
    """Dtype that a trainer would hold the weights in; they are cast to it first."""


@dataclass(frozen=True, kw_only=True)
class StartWeights:
    """The weights that a trainer of ``model`` has before its first step, without adapters."""

    model: ModelConfig
    seed: int
    start: Start
    timeout_s: float = field(compare=False)
    """Seconds in which a generator loads them."""

    def __getstate__(self) -> dict[str, Any]:
        return {attribute.name: getattr(self, attribute.name) for attribute in fields(self)}

    def describe(self) -> str:
        """Return the source of the weights."""
        return f"weights of {self._folder or f'seed {self.seed}'}"

    def subscriber(self, shards: Sequence[Shard]) -> "_Subscriber":
        """Return the end of a generator's rank, with the interface of a push."""
        return _Subscriber(self, shards)

    def copy_into(self, shards: Sequence[Shard]) -> None:
        """Overwrite ``shards``, which may be several of one parameter."""
        dtype = TORCH_DTYPE_MAP[self.start.dtype]
        if self._folder is not None:
            read_tensors(self._folder, self._stored, self._names, shards, dtype)
        else:
            self._draw(shards, dtype)

    def digests(self, dtype: torch.dtype) -> ShardDigests:
        """Return the digests of the whole parameters in ``dtype``; one is in memory at a time."""
        by_shard: ShardDigests = {}
        for name, shape in self._parameters.items():
            whole = Shard(Region(name, shape, Box.whole(shape)), torch.empty(shape, dtype=dtype))
            self.copy_into([whole])
            by_shard |= digests([whole])
        return by_shard

    @torch.no_grad()
    def _draw(self, shards: Sequence[Shard], dtype: torch.dtype) -> None:
        known = {id(parameter): name for name, parameter in self._decoder.named_parameters()}
        for name, _, parameter, init in initialized(self._decoder):
            wanted = [candidate for candidate in shards if candidate.name == known[id(parameter)]]
            if wanted:
                full = torch.empty(parameter.shape, dtype=torch.float32)
                draw(full, init, f"{self.seed}:{name}")
            for shard in wanted:
                part = full[shard.box.slices_in(Box.whole(shard.shape))]
                shard.tensor.copy_(part.to(dtype))

    @cached_property
    def _folder(self) -> Path | None:
        folder = self.start.folder or self.model.hf_path
        return Path(folder) if folder is not None else None

    @cached_property
    def _shape(self) -> ModelShape:
        return shape_of(self.model)

    @cached_property
    def _parameters(self) -> Shapes:
        return parameter_shapes(self._shape, fuse_qkv=self.model.fuse_qkv)

    @cached_property
    def _stored(self) -> dict[str, StoredTensor]:
        assert self._folder is not None, "random weights are in no file"
        stored = stored_tensors(self._folder, self._shape)
        check_parameters(self._folder, stored, self._names, self._parameters)
        return stored

    @cached_property
    def _names(self) -> HuggingFaceNames:
        return HuggingFaceNames(self._decoder.config, family_of(self._shape))

    @cached_property
    def _decoder(self) -> nn.Module:
        config = decoder_config(
            self._shape,
            fuse_qkv=self.model.fuse_qkv,
            inner_attention=ScaledDotProductAttention.Config(),
        )
        with torch.device("meta"):
            return config.build()


@dataclass(eq=False)
class _Subscriber:
    weights: StartWeights
    shards: Sequence[Shard]

    async def fetch(self, version: int) -> None:
        """Do nothing: files are read while generation is paused."""

    def pull(self, version: int) -> int:
        self.weights.copy_into(self.shards)
        return version

    def close(self) -> None:
        pass
