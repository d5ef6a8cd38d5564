"""Memory of each rank, item by item: from the layouts where these say it, estimated where none
does.
"""

import math
import re
from dataclasses import dataclass

import torch

from rl.generation.config import kv_blocks, kv_bytes_per_block
from rl.model.shards import Layout, local_shapes
from rl.plan import estimates
from rl.plan.setting import DTYPE_BYTES, LEARNING, Setting, seat_of
from rl.training.config import TrainerConfig
from rl.training.model import is_adapter
from rl.weights.blobs import plan_blobs
from rl.weights.shared_memory import HEADER_BYTES, SLOTS, Segment
from rl.weights.transport import Transfer

GIB = 2**30
PROCESS = {"trainer": GIB * 3 // 4, "generator": GIB * 5 // 4}  # on CPU, with its libraries
# with communicators and workspaces; and on the host
CUDA_CONTEXT = 2 * GIB
CUDA_PROCESS = 3 * GIB
STATES = {"Adam": 2, "AdamW": 2, "DistMuon": 1}


@dataclass(frozen=True, slots=True)
class Item:
    """Some memory of a rank."""

    name: str
    bytes: int
    on_host: bool = False
    """Beside a GPU; all of a CPU rank's is."""
    estimate: bool = False


@dataclass(frozen=True, slots=True)
class RankMemory:
    """A rank and what it holds."""

    mesh: str
    """``trainer``, ``reference`` and so on, or ``generator-0`` and so on."""
    rank: int
    host: int
    gpu: int | None
    items: tuple[Item, ...]

    def total(self, *, on_host: bool) -> int:
        """Bytes on its host, or on its device."""
        return sum(item.bytes for item in self.items if item.on_host == on_host)

    def named(self, *names: str) -> tuple[Item, ...]:
        """The items of these names, as far as there are any."""
        return tuple(item for item in self.items if item.name in names)

    @property
    def role(self) -> str:
        """Role that the rank belongs to, by its name in ``Setting.shared``."""
        return self.mesh.partition("-")[0]


def all_ranks(setting: Setting) -> list[RankMemory]:
    """Every rank of the run."""
    slots, staging = _push_sizes(setting)
    ranks = []
    for name, place in setting.places.items():
        passes = _passes(setting, name)
        for rank, layout in enumerate(setting.held[name]):
            items = [*_model_items(setting, name, layout), *passes]
            if name == "trainer":
                items.append(
                    Item("push slots", slots[rank], on_host=setting.transport != "cuda_ipc")
                )
            ranks.append(_seated(setting, name, rank, seat_of(place, rank), items))
    for number, place in enumerate(setting.generators):
        for rank in range(place.ranks):
            items = _generator_items(setting, staging[rank])
            ranks.append(_seated(setting, f"generator-{number}", rank, seat_of(place, rank), items))
    return ranks


def _seated(
    setting: Setting, mesh: str, rank: int, seat: tuple[int, int], items: list[Item]
) -> RankMemory:
    host, gpu = seat
    if setting.cuda:
        items += [
            Item("CUDA context", CUDA_CONTEXT, estimate=True),
            Item("process", CUDA_PROCESS, on_host=True, estimate=True),
        ]
        return RankMemory(mesh, rank, host, gpu, tuple(item for item in items if item.bytes))
    process = PROCESS["generator" if mesh.startswith("generator-") else "trainer"]
    items.append(Item("process", process, estimate=True))
    own = (Item(item.name, item.bytes, estimate=item.estimate) for item in items if item.bytes)
    return RankMemory(mesh, rank, host, None, tuple(own))


def _model_items(setting: Setting, name: str, layout: Layout) -> list[Item]:
    """Return what a role's rank keeps from step to step."""
    role = setting.roles[name]
    trainer = role.trainer
    size = DTYPE_BYTES[role.trainer.training.dtype]
    adapters = {region.name: region.box.numel for region in layout if is_adapter(region.name)}
    weights = {region.name: region.box.numel for region in layout if region.name not in adapters}
    trained = (adapters or weights) if name in LEARNING else {}
    parameters = sum(weights.values()) * size
    gradients = sum(trained.values()) * size
    states = sum(count * _state_bytes(trainer, weight) for weight, count in trained.items())
    merged = sum(weights[weight] for weight in _adapted(adapters)) * size
    kept = [
        Item("parameters", parameters),
        Item("adapters", sum(adapters.values()) * size),
        Item(
            "merged weights",
            merged if name == "trainer" else 0,
        ),
        Item("gradients", gradients),
        Item("optimizer states", states),
    ]
    items = [*kept, Item("RoPE tables", estimates.rope_tables(setting, role))]
    if len(setting.shared) > 1:
        items.append(Item("room to move to", sum(item.bytes for item in kept), on_host=True))
    if name in LEARNING and trainer.checkpoint.async_mode != "disabled":
        items.append(Item("checkpoint staging", parameters + states, on_host=True, estimate=True))
    return items


def _adapted(adapters: dict[str, int]) -> set[str]:
    return {re.sub(r"\.lora_[ab]\.weight$", ".weight", name) for name in adapters}


def _state_bytes(trainer: TrainerConfig, name: str) -> int:
    """Return the bytes of optimizer state per element of a parameter."""
    optimizer = trainer.optimizer
    group = next(
        (group for group in optimizer.param_groups if re.search(group.pattern, name)), None
    )
    if group is None:
        return 0
    count = STATES[group.optimizer_name] + bool(group.optimizer_kwargs.get("amsgrad"))
    short = optimizer.implementation == "fused_opt_states_bf16"
    return count * (2 if short else DTYPE_BYTES[trainer.training.dtype])


def _passes(setting: Setting, name: str) -> list[Item]:
    """Return what a role's ranks need while they compute."""
    sizes = {
        "activations": estimates.activations(setting, name),
        "logits": estimates.logits(setting, setting.roles[name]),
        "gathered by FSDP": estimates.gathered(setting, name),
    }
    return [Item(item, size, estimate=True) for item, size in sizes.items()]


def _push_sizes(setting: Setting) -> tuple[list[int], list[int]]:
    """Bytes of each trainer rank's two slots, and of what each generator rank reads into before it
    pulls.
    """
    transfer = transfer_of(setting)
    if setting.transport in ("shared_memory", "cuda_ipc"):
        segments = (Segment("", 0, (), 0, transfer.dtype, layout) for layout in setting.pushed)
        return [SLOTS * (HEADER_BYTES + segment.slot_bytes) for segment in segments], [0] * len(
            setting.wanted
        )
    slots = []
    staging = [0] * len(setting.wanted)
    for blobs in plan_blobs(transfer.sources, transfer.wanted):
        sizes = [blob.numel * setting.transfer_bytes for blob in blobs]
        sizes = [size + (size // 2 if transfer.delta else 0) for size in sizes]
        slots.append(SLOTS * sum(sizes))
        for blob, size in zip(blobs, sizes, strict=True):
            for reader in blob.readers:
                staging[reader] += size
    return slots, staging


def transfer_of(setting: Setting) -> Transfer:
    """The push, as its ends will have it."""
    weights = setting.config.weights
    generator = setting.config.generator
    dtype = getattr(torch, generator.dtype)
    return Transfer(
        setting.transport, dtype, setting.pushed, setting.wanted, generator.replicas, weights.delta
    )


def _generator_items(setting: Setting, staging: int) -> list[Item]:
    """Return what a rank of a generator holds; all generators are alike."""
    generator = setting.config.generator
    weights = generator_weights(setting)
    items = [Item("parameters", weights), Item("push staging", staging, on_host=True)]
    if not setting.cuda and generator.dtype == "float32":
        items.append(Item("packed weights", packed_weights(setting)))
    if "generator" in setting.shared:
        items.append(Item("room to move to", weights, on_host=True))
    items.append(Item("engine step", estimates.engine_step(setting), estimate=True))
    return [*items, Item("KV cache", kv_bytes(setting), estimate=setting.cuda)]


def generator_weights(setting: Setting) -> int:
    """Bytes of a rank's parameters: all ranks' tensors are as large as the first's."""
    shapes = local_shapes(setting.wanted[0])
    return sum(map(math.prod, shapes.values())) * setting.transfer_bytes


def packed_weights(setting: Setting) -> int:
    """Bytes of the copies that oneDNN multiplies with: of every linear layer, and the output head
    where it is tied.
    """
    shapes = local_shapes(setting.wanted[0])
    head = shapes.get("lm_head.weight", shapes["tok_embeddings.weight"])
    in_layers = [shape for name, shape in shapes.items() if name.startswith("layers.")]
    linear = [shape for shape in in_layers if len(shape) == 2]
    return sum(map(math.prod, [*linear, head])) * 4


def kv_bytes(setting: Setting) -> int:
    """Return the bytes of a generator rank's KV cache: what its share of a GPU leaves, or as much
    as it is given on CPU.
    """
    generator = setting.config.generator
    if not setting.cuda:
        return int(generator.kv_cache_gib * GIB)
    share = generator.gpu_memory_utilization * setting.device.memory_gib * GIB
    return max(
        0, int(share) - generator_weights(setting) - estimates.engine_step(setting) - CUDA_CONTEXT
    )


def kv_sequences(setting: Setting, tokens: int) -> int:
    """How many sequences of so many tokens a generator's KV cache holds at once."""
    generator = setting.config.generator
    blocks = kv_bytes(setting) // kv_bytes_per_block(generator, setting.shape, cuda=setting.cuda)
    # vLLM keeps one for itself
    return max(0, blocks - 1) // kv_blocks(generator, tokens, cuda=setting.cuda)
