"""Plan of a run: memory, push and time of a step, and whether the run can work."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from rl.config import RunConfig
from rl.plan.fit import lacks_of, memories
from rl.plan.memory import all_ranks, environment_workers, kv_cache, kv_sequences
from rl.plan.planned_run import PlannedRun
from rl.plan.push_cost import push_of, transports, turns_of
from rl.plan.speed import sizes_of, step_of
from rl.session.session_config import Role


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
