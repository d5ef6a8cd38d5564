"""Memory of each rank, item by item: computed from layouts, or estimated."""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from rl.compat.torch_internals import onednn_multiplies
from rl.generation.generator_config import kv_bytes, kv_bytes_per_token, weight_bytes
from rl.model.shards import Layout, local_shapes
from rl.plan.peak_memory import (
    MemoryOfPasses,
    engine_step,
    in_parameter_groups,
    rope_tables,
)
from rl.plan.planned_run import DTYPE_BYTES, LEARNING, PlannedRun, seat_of
from rl.training.offloaded_optimizers import BUFFERS, aligned, parts_of
from rl.training.sharded_model import adapted_weight, is_adapter
from rl.training.trainer_config import TrainerConfig
from rl.types import Place
from rl.weights.routes import plan_blobs
from rl.weights.shared_memory import HEADER_BYTES, slot_bytes
from rl.weights.transport import ON_DEVICE, SLOTS, Transfer

GIB = 2**30
# Bytes of a process on CPU, with its libraries.
TRAINER_PROCESS = GIB * 3 // 4
GENERATOR_PROCESS = GIB * 5 // 4
WORKER_PROCESS = GIB * 5 // 8
# Share that fragmentation of the heap adds to what passes of varied lengths free, on CPU.
FRAGMENTATION = 0.2
# With communicators and workspaces, on the GPU and on the host.
CUDA_CONTEXT = 2 * GIB
CUDA_PROCESS = 3 * GIB
# Of a generator, estimated: 51 sizes.
CUDA_GRAPHS = 2 * GIB
# Of a process that only copies from the GPU.
READER_CONTEXT = GIB // 2
# Number of optimizer states per element of a parameter, by optimizer.
STATES = {"Adam": 2, "AdamW": 2, "DistMuon": 1}


@dataclass(frozen=True, slots=True)
class Item:
    """Memory of a rank for one purpose."""

    name: str
    bytes: int
    on_host: bool = False
    """Whether a GPU rank has this memory on its host. False for CPU ranks."""
    estimate: bool = False


@dataclass(frozen=True, slots=True)
class RankMemory:
    """A rank and its items of memory."""

    mesh: str
    """Name of the mesh, such as ``trainer``, ``reference`` or ``generator-0``."""
    rank: int
    host: int
    gpu: int | None
    items: tuple[Item, ...]

    def total(self, *, on_host: bool) -> int:
        """Return the bytes of the items on the rank's host if ``on_host``, else on its device."""
        return sum(item.bytes for item in self.items if item.on_host == on_host)

    def named(self, *names: str) -> tuple[Item, ...]:
        """Return the items that have one of these names."""
        return tuple(item for item in self.items if item.name in names)

    @property
    def name(self) -> str:
        """Name of the rank, such as ``trainer rank 0``."""
        return f"{self.mesh} rank {self.rank}"

    @property
    def role(self) -> str:
        """Name of the rank's role, as in ``PlannedRun.shared``."""
        return self.mesh.partition("-")[0]


def all_ranks(run: PlannedRun) -> list[RankMemory]:
    """Return every rank of the run."""
    slots, staging = _push_sizes(run) if run.generators else ([], [])
    readers = [seat_of(place, rank) for place in run.generators for rank in range(place.ranks)]
    ranks = []
    for name, place in run.places.items():
        peak = MemoryOfPasses(run, name).peak()
        passes = [
            Item("activations", peak.activations, estimate=True),
            Item("logits", peak.logits, estimate=True),
            Item("gathered by FSDP", peak.gathered, estimate=True),
        ]
        if not run.cuda:
            fragments = int(FRAGMENTATION * sum(item.bytes for item in passes))
            passes.append(Item("fragmentation", fragments, estimate=True))
        for rank, layout in enumerate(run.held[name]):
            room = sum(item.bytes for item in passes)
            items = [*_model_items(run, name, layout, room), *passes]
            if name == "trainer" and slots:
                on_host = run.transport not in ON_DEVICE
                items.append(Item("push slots", slots[rank], on_host=on_host))
                here = seat_of(place, rank)
                others = sum(seat != here for seat in readers) if run.transport == "cuda_ipc" else 0
                items.append(Item("contexts of readers", others * READER_CONTEXT, estimate=True))
            ranks.append(_rank(run, name, rank, place, items))
    for number, place in enumerate(run.generators):
        for rank in range(place.ranks):
            items = _generator_items(run, staging[rank])
            ranks.append(_rank(run, f"generator-{number}", rank, place, items))
    return ranks


def environment_workers(run: PlannedRun) -> list[RankMemory]:
    """Return the processes on the first host that run the environments of episodes. The memory of
    the environments themselves is not counted.
    """
    if run.episodes is None:
        return []
    item = Item("process", WORKER_PROCESS, on_host=run.cuda, estimate=True)
    count = run.rl.rollout.reward_workers
    return [RankMemory("environment worker", number, 0, None, (item,)) for number in range(count)]


def _rank(run: PlannedRun, mesh: str, rank: int, place: Place, items: list[Item]) -> RankMemory:
    """Return a rank with ``items`` and those of its process. On CPU all memory is the host's."""
    host, gpu = seat_of(place, rank)
    if run.cuda:
        items.append(Item("CUDA context", CUDA_CONTEXT, estimate=True))
        items.append(Item("process", CUDA_PROCESS, on_host=True, estimate=True))
    else:
        process = GENERATOR_PROCESS if mesh.startswith("generator-") else TRAINER_PROCESS
        items.append(Item("process", process, estimate=True))
        items = [replace(item, on_host=False) for item in items]
    nonempty = tuple(item for item in items if item.bytes)
    return RankMemory(mesh, rank, host, gpu if run.cuda else None, nonempty)


def _model_items(run: PlannedRun, name: str, layout: Layout, room: int) -> list[Item]:
    """Return the items that a role's rank keeps from step to step, and what an optimizer step needs
    besides ``room``, the bytes of passes.
    """
    role = run.roles[name]
    trainer = role.trainer
    size = DTYPE_BYTES[trainer.training.dtype]
    adapters = {region.name: region.box.numel for region in layout if is_adapter(region.name)}
    weights = {region.name: region.box.numel for region in layout if region.name not in adapters}
    trained = (adapters or weights) if name in LEARNING else {}
    states = [size for weight, count in trained.items() for size in _states(trainer, weight, count)]
    away = trainer.offload_optimizer
    parts = _parts(trainer, trained) if away else []
    adapted = set(map(adapted_weight, adapters))
    merged = [weights[weight] for weight in adapted] if name == "trainer" else []
    parameters = sum(weights.values()) * size
    items = [
        Item("parameters", parameters),
        Item("adapters", sum(adapters.values()) * size),
        Item("merged weights", sum(merged) * size),
        Item("gradients", sum(trained.values()) * size),
        Item("optimizer states", _buffers(run, parts) if away else sum(states), on_host=away),
        Item("optimizer parts", max(0, BUFFERS * max(parts, default=0) - room), estimate=True),
        Item("RoPE tables", rope_tables(run, role)),
    ]
    if len(run.shared) > 1:
        gradients = in_parameter_groups(trained, role).values()
        resident = [*weights.values(), *adapters.values(), *merged, *gradients]
        moved = [] if away else states
        buffers = _buffers(run, [*(size * count for count in resident), *moved])
        items.append(Item("offload buffers", buffers, on_host=True))
    if name in LEARNING and trainer.checkpoint.async_mode != "disabled":
        items.append(Item("checkpoint staging", parameters + sum(states), True, estimate=True))
    return items


def _states(trainer: TrainerConfig, name: str, elements: int) -> list[int]:
    """Return the bytes of each tensor of optimizer state of a parameter."""
    optimizer = trainer.optimizer
    groups = (group for group in optimizer.param_groups if re.search(group.pattern, name))
    if (group := next(groups, None)) is None:
        return []
    count = STATES[group.optimizer_name] + bool(group.optimizer_kwargs.get("amsgrad"))
    short = optimizer.implementation == "fused_opt_states_bf16"
    return count * [elements * (2 if short else DTYPE_BYTES[trainer.training.dtype])]


def _parts(trainer: TrainerConfig, trained: dict[str, int]) -> list[int]:
    """Return the bytes of each part of the moments that are on the host."""
    sizes = [sum(map(aligned, _states(trainer, *parameter))) for parameter in trained.items()]
    return [sum(sizes[part]) for part in parts_of(sizes)]


def _buffers(run: PlannedRun, sizes: Iterable[int]) -> int:
    """Return the host memory of buffers of these sizes that a rank's device copies from and to."""
    return sum(map(pinned, sizes)) if run.cuda else sum(sizes)


def pinned(size: int) -> int:
    """Return the bytes that torch takes for a pinned tensor: the next power of two."""
    return 1 << (size - 1).bit_length() if size else 0


def _push_sizes(run: PlannedRun) -> tuple[list[int], list[int]]:
    """Return the bytes of each trainer rank's two slots, and of each generator rank's buffers for
    received data.
    """
    transfer = transfer_of(run)
    staging = [0] * len(run.wanted)
    if not transfer.is_network:
        slot_sizes = [slot_bytes(layout, transfer.dtype) for layout in run.pushed]
        return [SLOTS * (HEADER_BYTES + size) for size in slot_sizes], staging
    slots = []
    for blobs in plan_blobs(transfer.sources, transfer.wanted):
        wholes = [blob.numel * run.transfer_bytes for blob in blobs]
        parts = [[size, size // 2 if transfer.delta else 0] for size in wholes]
        sizes = [_buffers(run, pair) for pair in parts]
        on_device = run.transport in ON_DEVICE
        slots.append(SLOTS * sum(map(sum, parts) if on_device else sizes))
        for blob, size in zip(blobs, sizes, strict=True):
            for reader in blob.readers:
                staging[reader] += size
    return slots, staging


def transfer_of(run: PlannedRun) -> Transfer:
    """Return the transfer that both ends of the push use."""
    weights = run.rl.weights
    generator = run.rl.generator
    dtype = getattr(torch, generator.dtype)
    return Transfer(
        run.transport,
        dtype,
        run.pushed,
        run.wanted,
        generator.replicas,
        weights.delta,
        weights.fan_out,
    )


def _generator_items(run: PlannedRun, staging: int) -> list[Item]:
    """Return the items of a generator's rank, which are the same for all generators."""
    generator = run.rl.generator
    weights = weight_bytes(generator, run.wanted[0])
    items = [Item("parameters", weights), Item("push staging", staging, on_host=True)]
    dtype = getattr(torch, generator.dtype)
    if not run.cuda and run.rl.parity == "close" and onednn_multiplies(dtype):
        # oneDNN's copies of the linear layers and the output head
        shapes = local_shapes(run.wanted[0])
        head = shapes.get("lm_head.weight", shapes["tok_embeddings.weight"])
        in_layers = [shape for name, shape in shapes.items() if name.startswith("layers.")]
        linear = [shape for shape in in_layers if len(shape) == 2]
        numbers = sum(map(math.prod, [*linear, head]))
        items.append(Item("packed weights", run.transfer_bytes * numbers))
    items.append(Item("engine step", engine_step(run), estimate=True))
    items.append(Item("CUDA graphs", graph_bytes(run), estimate=True))
    cache = kv_cache(run)
    if run.record_bytes:  # a row for each slot of the KV cache
        records = cache // kv_bytes_per_token(generator, run.shape) * run.record_bytes
        items.append(Item("records of experts", records, on_host=True, estimate=run.cuda))
    return [*items, Item("KV cache", cache, estimate=run.cuda)]


def graph_bytes(run: PlannedRun) -> int:
    """Return the bytes of a generator's CUDA graphs, which stay on a device that others use in
    turns. Elsewhere they count as a part of the KV cache.
    """
    in_turns = run.cuda and "generator" in run.shared
    return CUDA_GRAPHS if in_turns and not run.rl.generator.enforce_eager else 0


def kv_cache(run: PlannedRun, used: int | None = None) -> int:
    """Return the bytes of a generator rank's KV cache: the rest of its share of a GPU, or
    ``generator.kv_cache_gib`` on CPU. ``used`` are the bytes of parameters and of an engine step,
    if they are known.
    """
    generator = run.rl.generator
    if not run.cuda:
        return int(generator.kv_cache_gib * GIB)
    share = int(generator.gpu_memory_utilization * run.device.memory_gib * GIB)
    if used is None:
        used = weight_bytes(generator, run.wanted[0]) + engine_step(run)
    return max(0, share - used - graph_bytes(run) - CUDA_CONTEXT)


def kv_sequences(run: PlannedRun, tokens: int) -> int:
    """Return the number of sequences of ``tokens`` tokens that a generator's KV cache holds, beside
    the block that vLLM reserves.
    """
    reserved, sequence = (
        kv_bytes(run.rl.generator, run.shape, length, cuda=run.cuda) for length in (1, tokens)
    )
    return max(0, kv_cache(run) - reserved) // sequence
