"""Plan of a run: memory, push and time of a step; whether the ranks fit into devices and hosts, and
advice if they do not.
"""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from torchtitan.distributed.activation_checkpoint import FullAC

from rl.config import RunConfig
from rl.errors import ConfigError, counted
from rl.plan.memory import (
    GIB,
    Item,
    RankMemory,
    all_ranks,
    environment_workers,
    kv_cache,
    kv_sequences,
)
from rl.plan.planned_run import PlannedRun
from rl.plan.push_cost import push_of, transports, turns_of
from rl.plan.speed import sizes_of, step_of
from rl.session.session_config import Role
from rl.validation.layouts import lack_of_cache


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of one device or host, and the ranks that use it at peak usage."""

    name: str
    kind: Literal["device", "host"]
    ranks: tuple[RankMemory, ...]
    limit: int
    on_host: bool
    """Whether the ranks' items on the host are counted, instead of those on the device."""

    @property
    def used(self) -> int:
        """Number of bytes in use."""
        return sum(rank.total(on_host=self.on_host) for rank in self.ranks)


def memories(run: PlannedRun, ranks: list[RankMemory]) -> list[Memory]:
    """Return the memory of every device and host of the run. On CPU each rank is a device, if
    ``hardware.memory_gib`` limits its memory.
    """
    limit = int(run.device.memory_gib * GIB)
    host_limit = int(run.hardware.host_gib * GIB)
    devices: dict[str, list[RankMemory]] = {}
    for rank in ranks if run.cuda or run.hardware.memory_gib else ():
        name = f"GPU {rank.gpu} of host {rank.host}" if run.cuda else rank.name
        devices.setdefault(name, []).append(rank)
    result = [
        Memory(name, "device", _at_once(on_device, run.shared), limit, on_host=False)
        for name, on_device in devices.items()
    ]
    for host in range(run.hosts):
        everything = [*ranks, *environment_workers(run)]
        own_ranks = tuple(rank for rank in everything if rank.host == host)
        result.append(Memory(f"host {host}", "host", own_ranks, host_limit, on_host=run.cuda))
    return result


def _at_once(ranks: list[RankMemory], shared: frozenset[str]) -> tuple[RankMemory, ...]:
    """Return a device's ranks with the items that they hold at once. Among ranks that take turns on
    the device, the largest holds all of its items. The others hold only items that cannot move.
    """
    sharing = [rank for rank in ranks if rank.role in shared]
    resident = max(sharing, key=lambda rank: rank.total(on_host=False), default=None)
    return tuple(
        replace(rank, items=rank.named("CUDA context", "CUDA graphs", "RoPE tables"))
        if rank in sharing and rank is not resident
        else rank
        for rank in ranks
    )


def lacks_of(run: PlannedRun, devices_and_hosts: list[Memory]) -> list[ConfigError]:
    """Return an error for each memory that is too small. Equal ranks are named once."""
    lacks: dict[tuple[Any, ...], ConfigError] = {}
    for memory in devices_and_hosts:
        if memory.used > memory.limit:
            kinds = (memory.kind, *dict.fromkeys(rank.role for rank in memory.ranks))
            lacks.setdefault(kinds, _lack(run, memory))
    if run.generators:
        size = run.device.memory_gib * GIB
        generator = run.rl.generator
        error = lack_of_cache(generator, run.shape, kv_cache(run), size, section=run.section)
        return [*lacks.values(), *filter(None, [error])]
    return [*lacks.values()]


def _lack(run: PlannedRun, memory: Memory) -> ConfigError:
    cpu_host = memory.kind == "host" and not run.cuda
    item, rank = max(
        (
            (item, rank)
            for rank in memory.ranks
            for item in rank.items
            if item.on_host == memory.on_host and not (cpu_host and item.name == "process")
        ),
        key=lambda pair: pair[0].bytes,
    )
    count = len(memory.ranks)
    names = ", ".join(holder.name for holder in memory.ranks[:4])
    more = f" and {count - 4} more" if count > 4 else ""
    where = "" if names == memory.name else f"{memory.name}: "
    equal = sum(holder.mesh == rank.mesh for holder in memory.ranks)
    what = (
        f"{where}{names}{more} need{'s' if count == 1 else ''} {memory.used / GIB:.1f} GiB of the "
        f"{memory.limit / GIB:.1f} that it has; the largest item is {item.name}, "
        f"{item.bytes / GIB:.1f} GiB on each of {counted(equal, 'rank')} of {rank.mesh}"
    )
    place = memory.name if where else memory.ranks[0].mesh
    return ConfigError(what, field=place, fix=_remedy(run, memory, item, rank))


def _remedy(run: PlannedRun, memory: Memory, item: Item, rank: RankMemory) -> str:
    """Return the change that shrinks the largest item."""
    if item.name == "process":
        needed = math.ceil(memory.used / GIB * 10) / 10
        return f"set hardware.memory_gib to {needed}, if a rank has that much"
    if item.name == "offload buffers":
        colocate = f"{run.section}colocate"
        return f"set {colocate} to 'none', or hardware.host_memory_gib to what a node has"
    if item.name == "checkpoint staging":
        return "set trainer.checkpoint.async_mode to 'disabled'"
    if rank.role == "generator":
        return _generator_remedy(run, memory, item)
    return _model_remedy(run, item, rank)


def _generator_remedy(run: PlannedRun, memory: Memory, item: Item) -> str:
    generator = run.rl.generator
    field = f"{run.section}generator"
    over = memory.used - memory.limit
    if item.name == "KV cache" and run.cuda:
        share = generator.gpu_memory_utilization - over / memory.limit
        return f"set {field}.gpu_memory_utilization to at most {int(share * 100) / 100}"
    if item.name == "KV cache":
        cache = generator.kv_cache_gib - over / GIB
        return f"set {field}.kv_cache_gib to at most {max(1, int(cache * 100)) / 100}"
    if item.name == "engine step":
        running = max(1, generator.max_running_requests // 2)
        return f"set {field}.max_running_requests to {running}"
    return f"set {field}.tensor_parallel_degree to {2 * generator.tensor_parallel_degree}"


def _model_remedy(run: PlannedRun, item: Item, rank: RankMemory) -> str:
    trainer = run.roles[rank.role].trainer
    if item.name == "activations":
        if not isinstance(trainer.activation_checkpoint, FullAC.Config):
            return "give trainer.activation-checkpoint:full"
        tokens = trainer.micro_batch_tokens
        if tokens and tokens > run.config.longest:
            return f"set trainer.micro_batch_tokens to {max(run.config.longest, tokens // 2)}"
        if not tokens and trainer.micro_batch_size > 1:
            return f"set trainer.micro_batch_size to {trainer.micro_batch_size // 2}"
        return _twice(run, rank.role, "context_parallel_degree")
    if item.name == "logits":
        return f"set trainer.logits_mib to {max(1, trainer.logits_mib // 2)}"
    if item.name == "gathered by FSDP":
        return _twice(run, rank.role, "tensor_parallel_degree")
    if item.name == "RoPE tables":
        return f"set model.max_seq_len to {run.config.longest}"
    return _twice(run, rank.role, "data_parallel_shard_degree")


def _twice(run: PlannedRun, name: str, degree: str) -> str:
    """Return the advice to double a degree, on twice the nodes if the nodes are full."""
    role = run.roles[name]
    nodes = run.config.trainer.nodes
    full = run.cuda and 2 * run.places[name].per_host > run.hardware.gpus
    more = f" and trainer.nodes to {2 * nodes}" if full else ""
    value = 2 * getattr(role.trainer.parallelism, degree)
    return f"set {role.parallelism_field}.{degree} to {value}{more}"


class Plan:
    """Plan of a run of ``config``. Building a plan starts no process.

    Raises ConfigError if a model cannot be read.
    """

    def __init__(self, config: RunConfig):
        self.run = PlannedRun(config)
        self.ranks = all_ranks(self.run)
        self.memories = memories(self.run, self.ranks)
        self.lacks = lacks_of(self.run, self.memories)
        self.errors = [*map(str, self.lacks)]
        named = transports(self.run) if self.run.generators else []
        self.pushes = [push_of(self.run, name) for name in named]
        """Pushes by each transport, that of the run first."""
        self.push = self.pushes[0] if self.pushes else None
        self.turns = [*turns_of(self.run, self.ranks)]
        self.step = step_of(self.run, self.push)

    @property
    def feasible(self) -> bool:
        """Whether the run can work."""
        return not self.errors

    def as_json(self) -> dict[str, Any]:
        """Return the plan as JSON-able data, with sizes in bytes and times in seconds.

        ``kv_cache`` and ``push`` are None if the run has no generators. ``pushes`` has the push by
        each transport, and ``turns`` what models move that share devices. ``episodes`` is None if
        the task has no environment. ``record_bytes`` is the size of a token's recorded experts.
        """
        run = self.run
        sizes = sizes_of(run.shape, fuse_qkv=run.config.model.fuse_qkv)
        return {
            "feasible": self.feasible,
            "errors": self.errors,
            "model": {"parameters": sizes.total, "active_parameters": sizes.active},
            "hardware": {
                "hosts": run.hosts,
                "gpus_per_host": run.hardware.gpus,
                "host_memory_gib": run.hardware.host_gib,
                **asdict(run.device),
            },
            "meshes": list(self._meshes()),
            "memory": {
                "ranks": [asdict(rank) for rank in self.ranks],
                "devices_and_hosts": [
                    {
                        "name": memory.name,
                        "used": memory.used,
                        "limit": memory.limit,
                        "ranks": [f"{rank.mesh} {rank.rank}" for rank in memory.ranks],
                    }
                    for memory in self.memories
                ],
            },
            "kv_cache": {
                "bytes": kv_cache(run),
                "longest_sequence_tokens": run.rl.longest,
                "sequences": kv_sequences(run, run.rl.longest),
            }
            if run.generators
            else None,
            "record_bytes": run.record_bytes,
            "episodes": self._episodes(),
            "push": asdict(self.push) if self.push else None,
            "pushes": [asdict(push) for push in self.pushes],
            "turns": [asdict(turn) for turn in self.turns],
            "step": asdict(self.step),
        }

    def _episodes(self) -> dict[str, int] | None:
        run = self.run
        task = run.episodes
        if task is None:
            return None
        return {
            "max_turns": task.max_turns,
            "max_tokens": task.max_episode_tokens,
            "max_tokens_of_a_turn": run.rl.rollout.max_tokens,
            "at_once": run.sequences_sampled,
            "workers": len(environment_workers(run)),
        }

    def _meshes(self) -> Iterator[dict[str, Any]]:
        run = self.run
        for name, place in run.places.items():
            degrees = degrees_of(run.roles[name])
            yield {"name": name, "degrees": degrees, "seats": run.seats(place)}
        if not run.generators:
            return
        generator = run.rl.generator
        tp = generator.tensor_parallel_degree
        degrees = {"tp": tp, "ep": tp if generator.expert_parallel else 1}
        for number, place in enumerate(run.generators):
            name = f"generator-{number}"
            yield {"name": name, "degrees": degrees, "seats": run.seats(place)}


def degrees_of(role: Role) -> dict[str, int]:
    """Return the parallel degrees of torchtitan's mesh."""
    parallelism = role.trainer.parallelism
    return {
        "dp_replicate": parallelism.data_parallel_replicate_degree,
        "dp_shard": parallelism.data_parallel_shard_degree,
        "cp": parallelism.context_parallel_degree,
        "tp": parallelism.tensor_parallel_degree,
        "ep": parallelism.expert_parallel_degree,
    }
