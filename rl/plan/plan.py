"""A whole plan: all that is counted, and whether the run can work."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from rl.config import RLConfig
from rl.plan.fit import complaints, memories
from rl.plan.memory import all_ranks, kv_bytes, kv_sequences
from rl.plan.push import push_of
from rl.plan.setting import Setting, hosts_of, seat_of
from rl.plan.speed import sizes_of, step_of
from rl.session.config import Role
from rl.types import Place


class Plan:
    """Plan of a run of ``config``; starts nothing.

    Raises ConfigError if its models cannot be had.
    """

    def __init__(self, config: RLConfig):
        self.setting = Setting(config)
        self.ranks = all_ranks(self.setting)
        self.memories = memories(self.setting, self.ranks)
        self.errors = complaints(self.setting, self.memories)
        self.push = push_of(self.setting)
        self.step = step_of(self.setting, self.push)

    @property
    def feasible(self) -> bool:
        """Whether the run can work."""
        return not self.errors

    def as_json(self) -> dict[str, Any]:
        """Return everything as JSON-able data; sizes in bytes, times in seconds."""
        setting = self.setting
        sizes = sizes_of(setting.shape, fuse_qkv=setting.config.model.fuse_qkv)
        return {
            "feasible": self.feasible,
            "errors": self.errors,
            "model": {"parameters": sizes.total, "active_parameters": sizes.active},
            "hardware": {
                "hosts": setting.hosts,
                "gpus_per_host": setting.hardware.gpus,
                **asdict(setting.device),
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
                "bytes": kv_bytes(setting),
                "longest_sequence_tokens": setting.longest,
                "sequences": kv_sequences(setting, setting.longest),
            },
            "push": asdict(self.push),
            "step": asdict(self.step),
        }

    def _meshes(self) -> Iterator[dict[str, Any]]:
        setting = self.setting
        meshes = [
            (name, degrees_of(setting.roles[name]), place) for name, place in setting.places.items()
        ]
        generator = setting.config.generator
        tp = generator.tensor_parallel_degree
        degrees = {"tp": tp, "ep": tp if generator.expert_parallel else 1}
        for number, place in enumerate(setting.generators):
            meshes.append((f"generator-{number}", degrees, place))
        for name, degrees, place in meshes:
            yield {"name": name, "degrees": degrees, "seats": seats_of(place, cuda=setting.cuda)}


def degrees_of(role: Role) -> dict[str, int]:
    """Return the degrees of torchtitan's mesh."""
    parallelism = role.trainer.parallelism
    return {
        "dp_replicate": parallelism.data_parallel_replicate_degree,
        "dp_shard": parallelism.data_parallel_shard_degree,
        "cp": parallelism.context_parallel_degree,
        "tp": parallelism.tensor_parallel_degree,
        "ep": parallelism.expert_parallel_degree,
    }


def seats_of(place: Place, *, cuda: bool) -> list[dict[str, Any]]:
    """Return the ranks and the GPUs of a mesh on each of its hosts."""
    seats = []
    for host in hosts_of(place):
        ranks = [rank for rank in range(place.ranks) if seat_of(place, rank)[0] == host]
        gpus = [seat_of(place, rank)[1] for rank in ranks] if cuda else []
        seats.append({"host": host, "ranks": ranks, "gpus": gpus})
    return seats
