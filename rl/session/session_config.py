"""Config of a session."""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from rl.errors import ConfigError, counted, require_value
from rl.generation.generator_config import BankConfig, GeneratorConfig
from rl.host.platform import device_type
from rl.model.hub import Snapshot, locate
from rl.model.parity import Parity
from rl.model.shape import ModelConfig, shape_of
from rl.session.hardware import HardwareConfig
from rl.training.hugging_face_files import check_folder
from rl.training.start_weights import Start
from rl.training.trainer_config import EXPERTS, TrainerConfig, fill_defaults, lora_layers
from rl.types import Head
from rl.types.deadlines import DeadlineConfig
from rl.types.rules import at_least
from rl.weights.transport import WeightPushConfig

Colocate = Literal["none", "models", "all"]
"""Models that share devices. One at a time has device memory; the others are in host memory.

- ``none``: each model has devices of its own.
- ``models``: trainer, reference, critic and other roles share theirs.
- ``all``: the generators share them too, and drop keys and values. Only in lockstep.
"""


def records_experts(generator: GeneratorConfig, trainer: TrainerConfig | None) -> bool:
    """Return whether ``generator`` returns the experts of tokens, beside ``trainer``."""
    if generator.record_experts is not None:
        return generator.record_experts
    return trainer is not None and trainer.router_replay == "generator"


@dataclass(kw_only=True, slots=True)
class ProfileConfig:
    """Profiles of chosen ranks in chosen steps, by torch's profiler."""

    steps: Annotated[tuple[int, ...], at_least(1)] = ()
    """Steps to profile. The run folder gets their traces, which the timeline page of ``rl.view``
    opens. A profiled step takes longer, and so does the next one, during which the traces are
    written."""

    ranks: tuple[str, ...] = ("trainer[0]", "generator-0[0]")
    """Ranks to profile, by their names on the timeline."""

    memory: bool = True
    """Whether to record allocations too, and on GPUs a memory snapshot."""


SLOWER = 2
"""Time of a product in bfloat16 over that in float32 from which a session warns."""
LEARNING = ("trainer", "critic")
"""Roles whose weights are trained."""


@dataclass(frozen=True, slots=True)
class Role:
    """A model with a mesh of its own."""

    field: str
    """Name of the config field of this role, for messages."""
    trainer: TrainerConfig
    model: ModelConfig
    head: Head = "logprobs"

    def __post_init__(self) -> None:
        fill_defaults(self.trainer.parallelism)

    @property
    def parallelism_field(self) -> str:
        """Name of the field of its layout."""
        return f"{self.field}.parallelism"

    @property
    def model_field(self) -> str:
        """Name of the field that the model comes from."""
        return f"{self.field}.model" if self.field.startswith("roles.") else "model"


@dataclass(kw_only=True, slots=True)
class SessionConfig:
    """Models, generators and the push between them."""

    model: ModelConfig = field(default_factory=ModelConfig)
    """The policy, which is trained and generated from."""

    trainer: TrainerConfig | None = field(default_factory=TrainerConfig)
    """Training of the policy. None trains nothing: the generators load the weights of ``start``."""

    start: Start = field(default_factory=Start)
    """Weights of a session without a trainer."""

    head: Head = "logprobs"
    """Output of the trained model; ``values`` for a reward model."""

    roles: dict[str, Role] = field(default_factory=dict)
    """Other models by name, such as a reference, a critic or a reward model."""

    generator: GeneratorConfig | None = field(default_factory=GeneratorConfig)
    """Generators. None starts no generators."""

    weights: WeightPushConfig = field(default_factory=WeightPushConfig)
    hardware: HardwareConfig = field(default_factory=HardwareConfig)
    deadlines: DeadlineConfig = field(default_factory=DeadlineConfig)
    colocate: Colocate = "none"

    parity: Parity = "close"
    """Agreement of the log-probs of trainer and generators: ``close`` up to rounding, or
    ``bitwise``: see docs/parity.md."""

    reward_workers: Annotated[int, at_least(0, 10**4)] = 1
    """Number of processes that score completions; what a reward starts ends with its process. 0
    scores in this process: a reward that hangs or crashes takes the session with it."""

    max_loras: Annotated[int, at_least(0, 1024)] = 0
    """Number of snapshots that a generator samples from side by side; 0 merges one at a time with
    the weights."""

    pushes: Literal["in_order", "newest"] = "in_order"
    """Versions that generators load: each one that is pushed, in order, or the newest when they
    pull."""

    compares_all: bool = True
    """Whether the trainer keeps its weights until each generator's copy was compared with them.
    False, with pushes in order, lets the trainer be several versions ahead; then only copies of its
    current version are compared."""

    longest: Annotated[int, at_least(2)] = 10**9
    """Number of tokens of the longest sequence, at most model.max_seq_len."""

    optimizer_steps: Annotated[int, at_least(1)] = 10**6
    """Number of optimizer steps in all, which learning-rate schedules depend on."""

    digests: bool = False
    """Whether each optimizer step computes digests of the gradient and of the trained parameters:
    see :meth:`Session.take_digests`."""

    max_restarts: Annotated[int, at_least(0, 10**6)] = 3
    """Number of times that a lost mesh is started again without progress in between."""

    seed: Annotated[int, at_least(0, 2**63 - 1)] = 0
    """Seed of initial weights and of everything that is sampled."""

    @property
    def models(self) -> dict[str, Role]:
        """Models by role, in the order in which they take devices."""
        policy = {} if self.trainer is None else {"trainer": self._policy}
        return policy | self.roles

    @property
    def _policy(self) -> Role:
        return Role("trainer", self.trainer or TrainerConfig(), self.model, self.head)

    @property
    def nodes(self) -> int:
        """Number of nodes that all meshes need together."""
        generators = self.generator.nodes if self.generator is not None else 0
        return (self.trainer.nodes if self.trainer is not None else 1) + generators

    def processes(self, aside: Collection[str]) -> str:
        """Return text that lists the meshes of a session, without the roles ``aside``."""
        meshes = [
            f"{name} ({counted(role.trainer.ranks, 'rank')})"
            for name, role in self.models.items()
            if name not in aside
        ]
        if self.generator is not None:
            ranks = counted(self.generator.tensor_parallel_degree, "rank")
            meshes.append(f"{self.generator.replicas} x generator ({ranks})")
        return ", ".join(meshes)

    def fetch_models(self, tell: Callable[[str], object]) -> None:
        """Replace names on the Hub by folders; download and check the weights that the models start
        from and that this host lacks. ``tell`` gets lines of progress. Raises ConfigError.
        """
        for role in (self._policy, *self.roles.values()):
            locate(role.model, role.model_field)
            path = role.model.hf_path
            replaced = role.trainer.checkpoint.initial_load_path or (
                self.trainer is None and role.field == "trainer" and self.start.folder
            )
            if not isinstance(path, Snapshot) or replaced or not path.missing():
                continue
            field = f"{role.model_field}.hf_path"
            path.fetch(tell, field=field)
            needs_head = role.field.startswith("roles.")
            try:
                check_folder(Path(path), shape_of(role.model), role.head, needs_head=needs_head)
            except ConfigError as error:
                raise error.inside(field) from None

    def check_parity(self) -> None:
        """Raise ConfigError, naming field, value and what is allowed, if ``parity`` is bitwise and
        trainer and generators would sum in another order.
        """
        if self.parity == "close":
            return
        shape = shape_of(self.model)
        on_gpus = self.hardware.kind != "cpu"
        here = " on GPUs" if on_gpus else ""
        for name, has in (
            ("gated delta nets, whose chunks cut sums", shape.layers_with_delta_rule),
            ("bounded products of queries and keys", shape.attention_cap),
            ("experts", on_gpus and shape.num_experts),
            ("attention sinks", on_gpus and shape.sinks),
        ):
            require_value(not has, "parity", "bitwise", f"'close'{here} for a model with {name}")
        fix = "set parity to 'close', or change it"
        for path, value, allowed in self._fields_of_sums(on_gpus):
            rule = " or ".join(map(repr, allowed))
            require_value(value in allowed, path, value, f"{rule} with parity 'bitwise'{here}", fix)

    def _fields_of_sums(self, on_gpus: bool) -> Iterator[tuple[str, Any, tuple[Any, ...]]]:
        """Yield each field that decides on the order of sums, its value, and the values with which
        trainer and generators have the same order.
        """
        if on_gpus:
            yield "model.attention", self.model.attention, ("auto", "flex")
        for role in self.models.values():
            trainer = role.trainer
            layout = trainer.parallelism
            rows: list[tuple[str, Any, tuple[Any, ...]]] = [
                ("parallelism.tensor_parallel_degree", layout.tensor_parallel_degree, (1,)),
                ("parallelism.context_parallel_degree", layout.context_parallel_degree, (1,)),
                ("parallelism.expert_parallel_degree", layout.expert_parallel_degree, (1,)),
                ("lora", trainer.lora, (None,)),
                ("float8", trainer.float8, (None,)),
                ("compile.enable", trainer.compile.enable, (False,)),
                ("threads", trainer.threads, (1, "auto")),
                # routing agrees, and records may be of older weights
                ("router_replay", trainer.router_replay, ("none",)),
                ("cpu_matmul", trainer.cpu_matmul, ("auto", "mkl")),
            ]
            if on_gpus:
                dtype = trainer.training.mixed_precision_param
                rows += [
                    ("training.mixed_precision_param", dtype, ("bfloat16",)),
                    ("prompt_sharing", trainer.prompt_sharing, (1,)),
                    ("tune_attention", trainer.tune_attention, (False,)),
                ]
            for name, value, allowed in rows:
                yield f"{role.field}.{name}", value, allowed
        generator = self.generator
        if generator is None:
            return
        dtype = (self.trainer or TrainerConfig()).training.mixed_precision_param
        yield "generator.tensor_parallel_degree", generator.tensor_parallel_degree, (1,)
        yield "generator.enforce_eager", generator.enforce_eager, (True,)
        yield "generator.threads", generator.threads, (1, "auto")
        yield "generator.dtype", generator.dtype, (dtype,)
        yield "generator.inflight_policy", generator.inflight_policy, ("drain", "recompute")

    def slow_products(self) -> Iterator[ConfigError]:
        """Yield an error for each field that has this host's processor compute in bfloat16 without
        instructions for it. A session starts all the same.
        """
        if self.hardware.kind != "cpu" or device_type() != "cpu":
            return
        fields = {
            f"{role.field}.training.{name}": getattr(role.trainer.training, name)
            for role in self.models.values()
            for name in ("dtype", "mixed_precision_param")
        }
        if self.generator is not None:
            fields["generator.dtype"] = self.generator.dtype
        for name, dtype in fields.items():
            if dtype != "bfloat16":
                continue
            device = self.hardware.figures
            times = device.float32_tflops / device.tflops
            if times > SLOWER:
                problem = f"{name} is 'bfloat16', and this processor's products take {times:.0f}"
                problem += " times as long in it as in float32"
                yield ConfigError(problem, field=name, fix="set it to 'float32'")

    @property
    def adapters(self) -> BankConfig | None:
        """Adapters that a generator holds beside its weights.

        Raises ConfigError if it cannot hold those of ``trainer.lora``.
        """
        if not self.max_loras:
            return None
        lora = self.trainer.lora if self.trainer is not None else None
        for rule, holds in (
            ("without trainer.lora", lora is not None),
            ("with parity 'bitwise'", self.parity == "close"),
        ):
            require_value(holds, "max_loras", self.max_loras, f"0 {rule}")
        assert lora is not None
        layers = lora_layers(lora, self.model)
        rule = f"0 with adapters of experts: trainer.lora.target_modules is {layers}"
        require_value(EXPERTS not in layers, "max_loras", self.max_loras, rule)
        names = [*layers, *(["wk", "wv"] if "wkv" in layers else [])]
        return BankConfig(self.max_loras, lora.rank, tuple(names))

    @property
    def longest_sequence(self) -> int:
        """Number of tokens of the longest sequence that the model takes."""
        return min(self.longest, shape_of(self.model).max_seq_len)
