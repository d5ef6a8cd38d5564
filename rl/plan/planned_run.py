"""Inputs of a plan: models, layouts and places of their ranks, and figures of the hardware."""

import dataclasses
from typing import Any

from torchtitan.config import CompileConfig

from rl.config import RunConfig, SamplingRunConfig
from rl.environments.agent import AgentTask
from rl.environments.protocol import EnvironmentTask
from rl.generation.generator_config import record_bytes_per_token
from rl.model.shape import ModelShape, shape_of
from rl.model.shards import Layout
from rl.model.tp_plan import generator_layout
from rl.session.placement import Placement, threads_of
from rl.session.session_config import LEARNING as LEARNING
from rl.session.session_config import Role, records_experts
from rl.training.layout import trainer_layout
from rl.training.sharded_model import is_adapter
from rl.types import Place
from rl.weights.transport import choose_transport

GENERATOR = "generator-0"
"""Mesh of the first generator. The others are like it."""
ON_CPU = 0.9
"""Share of the measured rate of products that the products of a model reach on CPU."""
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
OPEN_FILES = 256
"""Number of files that a process of a run opens for itself."""
FILES_OF_PROCESS = 32
"""Number of files that the controller opens for each process of a run."""


class PlannedRun:
    """A config with the layouts and places that follow from it. Building it takes a second or two
    and starts no process.

    Raises ConfigError if a model cannot be read.
    """

    def __init__(self, config: RunConfig):
        self.config = config
        self.hardware = config.hardware
        self.device = config.hardware.figures
        self.cuda = config.hardware.kind == "cuda"
        self.shape: ModelShape = shape_of(config.model)
        self.roles: dict[str, Role] = config.models()
        placement = Placement(config.session(), config.hardware.gpus)
        self.hosts = config.nodes
        self.places: dict[str, Place] = placement.models
        self.held = {name: _layouts(role) for name, role in self.roles.items()}
        """Layouts by role and rank, adapters included."""
        self.generators: list[Place] = []
        """Places of the generators, if the run has any."""
        self.shared = frozenset[str]()
        """Roles that take turns on shared devices: only one at a time has its memory there."""
        sampling = config.sampling_run()
        if sampling is not None:
            self._add_generators(sampling, placement)
        chosen = threads_of(config.session(), config.trainer_share)
        threads = config.trainer.threads, self.rl.generator.threads if self.generators else 1
        self.threads, self.generator_threads = (
            best if count == "auto" else count for count, best in zip(threads, chosen, strict=True)
        )
        """Numbers of CPU threads of a rank of the models, and of a rank of the generators."""
        if not (self.cuda or self.hardware.memory_gib):
            places = [*self.places.values(), *self.generators]
            most = max(
                sum(place.per_host for place in places if host in hosts_of(place))
                for host in range(self.hosts)
            )
            self.device = dataclasses.replace(self.device, memory_gib=self.hardware.host_gib / most)

    def _add_generators(self, config: SamplingRunConfig, placement: Placement) -> None:
        """Set the attributes of runs with generators: their places, and both ends of the push."""
        self.rl = config
        """Config of the generators, of the push and of the rollouts."""
        self.generators = [*map(placement.generator, range(config.generator.replicas))]
        self.pushed = tuple(
            tuple(region for region in layout if not is_adapter(region.name))
            for layout in self.held["trainer"]
        )
        self.wanted = generator_layout(
            self.shape,
            fuse_qkv=config.model.fuse_qkv,
            tp=config.generator.tensor_parallel_degree,
            expert_parallel=config.generator.expert_parallel,
        )
        ends = (self.places["trainer"], *self.generators)
        hosts = {host for place in ends for host in hosts_of(place)}
        self.section = self.config.generator_section
        """Config section that holds the fields of the generators, with a dot; empty for none."""
        self.transport = choose_transport(
            config.weights.transport,
            [str(host) for host in hosts],
            on_gpus=self.cuda,
            has_rdma=self.cuda,
        )
        self.push_crosses_hosts = len(hosts) > 1
        sharing = {"none": [], "models": [*self.roles], "all": [*self.roles, "generator"]}
        self.shared = frozenset(sharing[config.colocate])

    @property
    def rehearsed(self) -> dict[str, int]:
        """Number of ranks of each model that a rehearsal runs: the roles, and a generator."""
        ranks = {name: place.ranks for name, place in self.places.items()}
        if self.generators:
            ranks[GENERATOR] = self.generators[0].ranks
        return ranks

    @property
    def sequences_sampled(self) -> int:
        """Number of sequences that generators may have at once."""
        if self.rl is not self.config:  # that evaluates alone
            return self.rl.evaluation.prompts * max(1, self.rl.evaluation.samples)
        return self.rl.sequences

    @property
    def episodes(self) -> EnvironmentTask.Config | None:
        """Config of the task if its rollouts are episodes, else None."""
        task = self.rl.task if self.generators else None
        return task if isinstance(task, EnvironmentTask.Config) else None

    @property
    def open_files(self) -> int:
        """Estimated number of open files of the process that opens the most: the controller, or a
        process of episodes, which has both ends of the connections of its agents.
        """
        ranks = sum(place.ranks for place in (*self.places.values(), *self.generators))
        workers = self.rl.rollout.reward_workers if self.generators else 0
        controller = FILES_OF_PROCESS * (-(-ranks // self.hosts) + workers + 1)
        agents = 0
        if isinstance(task := self.episodes, AgentTask.Config):
            at_once = min(self.sequences_sampled, task.max_open_episodes or self.sequences_sampled)
            agents = 2 * -(-at_once // max(1, workers))
        return OPEN_FILES + (max(controller, agents) if workers else controller + agents)

    @property
    def record_bytes(self) -> int:
        """Bytes of the recorded experts of a token; 0 if generators record none."""
        if not (self.generators and records_experts(self.rl.generator, self.config.trainer)):
            return 0
        return record_bytes_per_token(self.shape)

    @property
    def transfer_bytes(self) -> int:
        """Number of bytes of an element that is pushed."""
        return self.rl.generator.dtype_bytes

    def rate(self, dtype: str) -> float:
        """Return the operations a second that a device, or on CPU a thread, does in ``dtype``."""
        slow = self.device.float32_tflops if dtype == "float32" else 0.0
        share = ON_CPU if not self.cuda else self.hardware.training_efficiency
        return (slow or self.device.tflops) * 1e12 * share

    def seats(self, place: Place) -> list[dict[str, Any]]:
        """Return the ranks and the GPUs of a mesh on each of its hosts."""
        seats = []
        for host in hosts_of(place):
            ranks = [rank for rank in range(place.ranks) if seat_of(place, rank)[0] == host]
            gpus = [seat_of(place, rank)[1] for rank in ranks] if self.cuda else []
            seats.append({"host": host, "ranks": ranks, "gpus": gpus})
        return seats


def hosts_of(place: Place) -> range:
    """Return the numbers of a mesh's hosts."""
    return range(place.first_host, place.first_host + place.hosts)


def seat_of(place: Place, rank: int) -> tuple[int, int]:
    """Return the host of a mesh's rank, and its GPU there."""
    host, local = divmod(rank, place.per_host)
    return place.first_host + host, place.first_device + local


def _layouts(role: Role) -> tuple[Layout, ...]:
    """Return the layouts of a role's ranks.

    Options that change only how the role computes are left out: this host may not support them.
    """
    trainer = dataclasses.replace(
        role.trainer, float8=None, activation_checkpoint=None, compile=CompileConfig()
    )
    model = dataclasses.replace(role.model, attention="auto")
    return trainer_layout(trainer, model, head=role.head, adapters=True)
