"""Pushes of trainer ranks to readers with the layouts of generators; run on the trainer's ranks."""

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

import tests.kit.scenes as scenes
from rl.model.digest import ShardDigests, digests, merge_digests
from rl.model.shape import ModelConfig, shape_of
from rl.model.shards import Box, Layout, layout_of, local_shapes, local_shards
from rl.model.tp_plan import generator_layout
from rl.weights.shared_memory import Segment, SharedMemoryPublisher, SharedMemorySubscriber
from rl.weights.transport import Transfer

DTYPE = torch.bfloat16
TRANSFER = Transfer("shared_memory", DTYPE, (), ())
# four readers get half a kv head each, and 8, 8, 8 and 6 rows of the vocabulary
TIED_FUSED = ModelConfig(
    vocab_size=30,
    dim=32,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    head_dim=8,
    hidden_dim=52,
    max_seq_len=15,
)
MIXTURE = {"num_experts": 4, "experts_per_token": 2, "moe_hidden_dim": 20, "expert_bias": True}
EXPERTS = replace(TIED_FUSED, **MIXTURE)
MODELS = {
    "tied_fused": TIED_FUSED,
    "untied_fused": replace(TIED_FUSED, tie_embeddings=False),
    "tied_split": replace(TIED_FUSED, fuse_qkv=False),
    "biased": replace(TIED_FUSED, family="tests.kit.seed_oss"),
    "biased_split": replace(TIED_FUSED, family="tests.kit.seed_oss", fuse_qkv=False),
    "untied_split": replace(TIED_FUSED, tie_embeddings=False, fuse_qkv=False),
    "experts": EXPERTS,
    "untied_split_experts": replace(EXPERTS, tie_embeddings=False, fuse_qkv=False),
    "clamped": replace(EXPERTS, family="gpt_oss"),
}
TRAINERS = scenes.LAYOUTS | {"fsdp4": scenes.Layout(shard=4)}


def generators(model: ModelConfig) -> list[tuple[Layout, ...]]:
    """Return the layouts of all generators that the tests push ``model`` to."""
    degrees: list[dict[str, Any]] = [{"tp": 1}, {"tp": 2}, {"tp": 4}]
    if model.num_experts:
        degrees += [{"tp": 2, "expert_parallel": True}, {"tp": 4, "expert_parallel": True}]
    return [generator_layout(shape_of(model), fuse_qkv=model.fuse_qkv, **each) for each in degrees]


class Reader:
    """Generator rank with its own tensors."""

    def __init__(
        self, layouts: tuple[Layout, ...], rank: int, segments: list[Segment], number: int
    ):
        self._tensors = {
            name: torch.zeros(shape, dtype=DTYPE)
            for name, shape in local_shapes(layouts[0]).items()
        }
        self._shards = local_shards(self._tensors, layouts[rank])
        self._subscriber = SharedMemorySubscriber(segments, self._shards, TRANSFER, rank=number)

    def pull(self, version: int, weights: dict[str, torch.Tensor]) -> ShardDigests:
        """Pull, check that the parameters are exactly the shards of ``weights``, return digests."""
        self._subscriber.pull(version)
        written = dict.fromkeys(self._tensors, 0)
        for shard in self._shards:
            whole = weights[shard.name]
            assert torch.equal(
                shard.tensor, whole[shard.box.slices_in(Box.whole(tuple(whole.shape)))]
            ), shard.region
            written[shard.name] += shard.box.shape[0]
        assert not any(tensor[written[name] :].any() for name, tensor in self._tensors.items())
        return digests(self._shards)

    def close(self) -> None:
        self._subscriber.close()


def push_all(cases: list[tuple[str, str]], folder: str) -> list[Layout]:
    """Run ``push`` for each (model, trainer layout)."""
    return [push(MODELS[model], TRAINERS[layout], folder) for model, layout in cases]


def push(model: ModelConfig, layout: scenes.Layout, folder: str) -> Layout:
    """Push two versions to all generators from ranks that are theirs too; return the layout."""
    engine = scenes.engine_of(model, folder=folder, layout=layout)
    held = list(engine.shards().values())
    places = [(layouts, rank) for layouts in generators(model) for rank in range(len(layouts))]
    publisher = SharedMemoryPublisher(held, TRANSFER, rank=dist.get_rank())
    segments = gathered(publisher.address)
    readers = {
        number: Reader(*place, segments, number)
        for number, place in enumerate(places)
        if number % dist.get_world_size() == dist.get_rank()
    }
    for version in range(2):
        publisher.write(version)
        dist.barrier()
        weights = {name: tensor.to(DTYPE) for name, tensor in scenes.weights_of(engine).items()}
        trained = merge_digests(gathered(digests(held, dtype=DTYPE)))
        pulled = {number: reader.pull(version, weights) for number, reader in readers.items()}
        by_number = {number: own for rank in gathered(pulled) for number, own in rank.items()}
        for layouts in generators(model):
            own = [by_number[number] for number, place in enumerate(places) if place[0] == layouts]
            assert merge_digests(own) == trained
        with torch.no_grad():
            for shard in held:
                shard.tensor.mul_(1.5)
    publisher.close()
    for reader in readers.values():
        reader.close()
    return layout_of(held)


def gathered(own: Any) -> list[Any]:
    """Return the objects of all ranks, on every rank."""
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    return everyone
