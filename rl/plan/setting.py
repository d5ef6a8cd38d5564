"""Facts that a plan is made from: the models, the layouts and places of their ranks, and the
machines' figures.
"""

import dataclasses

from torchtitan.config import CompileConfig

from rl.config import RLConfig
from rl.model.shape import ModelShape, shape_of
from rl.model.shards import Layout
from rl.model.tp_plan import generator_layout
from rl.roles import roles_of, session_config
from rl.session.config import Role
from rl.session.placement import Placement
from rl.training.layout import trainer_layout
from rl.training.model import is_adapter
from rl.types import Place
from rl.weights.open import choose_transport

LEARNING = ("trainer", "critic")
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


class Setting:
    """A config with all that follows from it before anything runs. Takes a second or two, and
    starts nothing.

    Raises ConfigError where the run's models cannot be had.
    """

    def __init__(self, config: RLConfig):
        self.config = config
        self.hardware = config.hardware
        self.device = config.hardware.figures
        self.cuda = config.hardware.kind == "cuda"
        self.shape: ModelShape = shape_of(config.model)
        self.roles: dict[str, Role] = roles_of(config)
        placement = Placement(session_config(config), config.hardware.gpus)
        self.hosts = config.nodes
        self.places: dict[str, Place] = placement.models
        self.generators: list[Place] = [*map(placement.generator, range(config.generator.replicas))]
        self.held: dict[str, tuple[Layout, ...]] = {
            name: _held(role) for name, role in self.roles.items()
        }
        """Layouts by role and rank, adapters included."""
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
        hosts = {
            host for place in (self.places["trainer"], *self.generators) for host in hosts_of(place)
        }
        self.transport = choose_transport(config.weights.transport, [str(host) for host in hosts])
        self.push_crosses_hosts = len(hosts) > 1
        shared = list(self.roles) if config.colocate != "none" else []
        self.shared = frozenset([*shared, "generator"] if config.colocate == "all" else shared)
        """Roles of which one at a time has memory on its device."""

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt and completion."""
        return self.config.task.max_prompt_tokens + self.config.rollout.max_tokens

    @property
    def sequences(self) -> int:
        """Number of sequences in a step."""
        return self.config.rollout.prompts_per_step * self.config.rollout.samples_per_prompt

    @property
    def transfer_bytes(self) -> int:
        """Bytes of an element that is pushed."""
        return DTYPE_BYTES[self.config.generator.dtype]


def hosts_of(place: Place) -> range:
    """Numbers of the run's hosts that a mesh is on."""
    return range(place.first_host, place.first_host + place.hosts)


def seat_of(place: Place, rank: int) -> tuple[int, int]:
    """Host, and GPU there, of a mesh's rank."""
    host, local = divmod(rank, place.per_host)
    return place.first_host + host, place.first_device + local


def _held(role: Role) -> tuple[Layout, ...]:
    """Return the layouts of a role's ranks.

    How it computes changes nothing of that, and may need another machine.
    """
    trainer = dataclasses.replace(
        role.trainer, float8=None, activation_checkpoint=None, compile=CompileConfig()
    )
    model = dataclasses.replace(role.model, attention="auto")
    return trainer_layout(trainer, model, head=role.head, adapters=True)
