"""RunConfig: fields that the configs of all trainers share."""

from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal

from torchtitan.config import ParallelismConfig

from rl.config.clusters import KubernetesConfig, SlurmConfig
from rl.config.rollout import BestConfig, EvaluationConfig, RecordConfig, RolloutConfig
from rl.environments.task import Task
from rl.errors import require
from rl.generation.generator_config import GeneratorConfig
from rl.model.parity import Parity
from rl.model.shape import ModelConfig, shape_of
from rl.observe.sinks import Sink
from rl.observe.trackers import MLflow, TensorBoard, Trackio, WeightsAndBiases
from rl.observe.webhook import Webhook
from rl.session.hardware import HardwareConfig
from rl.session.session_config import Colocate, ProfileConfig, Role, SessionConfig
from rl.training.trainer_config import TrainerConfig
from rl.types.deadlines import DeadlineConfig
from rl.types.rules import COSMETIC, NUMERICS, PERFORMANCE, SECONDS, at_least, between
from rl.weights.transport import WeightPushConfig

Action = Literal["ignore", "warn", "fail"]
"""Consequence of an alarm: nothing, a warning, or the end of the run. An alarm is counted in any
case."""

LABELS = ("project", "name", "tags", "notes")
"""Fields of SinksConfig that are fields of each tracker."""


@dataclass(kw_only=True, slots=True)
class WatchdogConfig:
    """Conditions that raise an alarm during a run, and the consequence of each.

    Every alarm is counted in the metrics as ``watchdog/NAME``.
    """

    stalled: Action = "fail"
    """Consequence if no step finishes within ``stalled_s``."""

    stalled_s: Annotated[float, SECONDS] = 1800.0
    """Number of seconds without a finished step, not counting evaluations."""

    zero_std: Action = "warn"
    """Consequence if no group has an advantage other than 0."""

    zero_std_steps: Annotated[int, at_least(1)] = 10
    """Number of consecutive steps without such a group before the alarm."""

    vanished: Action = "warn"
    """Consequence if steps change no weight although advantages differ: the gradient is 0, or the
    dtype of the parameters, such as bfloat16, rounds every update away."""

    vanished_steps: Annotated[int, at_least(1)] = 3
    """Number of consecutive such steps before the alarm."""

    starving: Action = "warn"
    """Consequence if the trainer mostly waits for rollouts. Checked only if
    ``rollout.max_staleness`` is above 0."""

    starving_share: Annotated[float, between(0, 1)] = 0.9
    """Share of a step above which the trainer mostly waits."""

    starving_steps: Annotated[int, at_least(1)] = 10
    """Number of consecutive such steps before the alarm."""

    entropy: Action = "warn"
    """Consequence if the mean entropy of a token is out of range."""

    entropy_min: Annotated[float, at_least(0, 1000)] = 0.0
    """Smallest mean entropy of a token, in nats; 0 for no limit."""

    entropy_max: Annotated[float, at_least(0, 1000)] = 0.0
    """Largest mean entropy of a token, in nats; 0 for no limit."""

    mismatch: Action = "warn"
    """Consequence if trainer and generators compute different log-probs of a token with the same
    weights: they have other tokens, experts, adapters or settings."""

    mismatch_max: Annotated[float | None, at_least(0, 1e6)] = None
    """Largest value of the metric ``logprob/error_mean``, in nats per token; 0 for no limit. None
    for what rounding explains, divided by the temperature if that is below 1:

    - 0.001 in float32, 0.1 in bfloat16, 0.5 with float8
    - 0.1 in float32 if a mixture of experts has an asynchronous pipeline, or does not replay the
      recorded experts
    - no limit if ``generator.inflight_policy`` is ``continue``"""

    parity: Action | None = None
    """Consequence if trainer and generators compute different bits of a log-prob in the first
    update of a step. None is ``warn`` if ``parity`` of the run is bitwise; a close run has no such
    alarm."""

    reference: Action = "warn"
    """Consequence if ``kl/reference`` is above ``mismatch_max`` in the first step, in which the
    reference has the policy's weights."""

    drift: Action = "warn"
    """Consequence if the policy is far from the policies that drew the tokens."""

    drift_max: Annotated[float, at_least(0, 1e6)] = 0.0
    """Largest value of the metric ``kl/behaviour``, in nats per token; 0 for no limit."""

    memory: Action = "warn"
    """Consequence if the memory of a trainer's rank on its host grows from step to step."""

    memory_growth: Annotated[float, at_least(0, 1000)] = 0.5
    """Growth of the metric ``memory/resident``, as a share of its smallest value since the start of
    the process, above which memory grows; 0 for no limit. Growth below 1 GiB raises no alarm."""

    non_finite: Action = "warn"
    """Consequence if a metric is not finite. An update whose gradient norm is not finite is skipped
    in any case, and more than ``trainer.max_skipped_steps`` in a row end the run."""


@dataclass(kw_only=True, slots=True)
class SinksConfig:
    """Other places for metrics, beside the run folder."""

    tensorboard: bool = False
    """Whether to write files for TensorBoard to ``tensorboard`` in the run folder."""

    wandb: Literal["off", "online", "offline"] = "off"
    """Whether to log to Weights & Biases, over the network or to ``wandb`` in the run folder."""

    wandb_samples: Annotated[int, at_least(0, 1000)] = 8
    """Number of recorded rollouts of each step, and of each evaluation, to log to Weights & Biases
    as a table."""

    trackio: bool = False
    """Whether to log to trackio."""

    project: str = "tiller"
    """Project in Weights & Biases and trackio, and experiment in MLflow."""

    mlflow: str = ""
    """Address of an MLflow server, such as ``http://127.0.0.1:5000``, or a store, such as
    ``sqlite:///mlflow.db``. Empty for none."""

    name: str = ""
    """Name of the run in these trackers; empty for that of the run folder."""

    tags: tuple[str, ...] = ()
    """Tags of the run in Weights & Biases and MLflow, in which ``NAME=VALUE`` has a value."""

    notes: str = ""
    """Text about the run in Weights & Biases and MLflow."""

    webhook: str = ""
    """URL to which alerts are posted as JSON: the end of the run, its failure, and warnings, such
    as those of the watchdog. ``$NAME`` is a variable of the environment, for URLs that are secret.
    Empty for none."""

    prometheus: str = ""
    """Address, such as ``127.0.0.1:9400``, at which the run serves ``/metrics`` to Prometheus. An
    empty address serves nothing; port 0 is any free port. If other machines can reach the address,
    the environment must have ``TILLER_API_KEY``."""

    custom: tuple[Sink.Config, ...] = ()
    """Sinks of your own."""

    def all(self) -> list[Sink.Config]:
        """Return the configs of all sinks."""
        sinks: list[Sink.Config] = [TensorBoard.Config()] if self.tensorboard else []
        labels: dict[str, Any] = {name: getattr(self, name) for name in LABELS}
        if self.wandb != "off":
            options = WeightsAndBiases.Config(mode=self.wandb, **labels)
            sinks.append(replace(options, samples=self.wandb_samples))
        if self.mlflow:
            sinks.append(MLflow.Config(uri=self.mlflow, **labels))
        if self.trackio:
            sinks.append(Trackio.Config(**labels))
        if self.webhook:
            sinks.append(Webhook.Config(url=self.webhook))
        return [*sinks, *self.custom]


@dataclass(kw_only=True, slots=True)
class RunConfig:
    """Config of a run of any trainer."""

    trainer_class: ClassVar[str]
    """``MODULE:CLASS`` of the trainer that runs this config."""

    generator_section: ClassVar[str] = ""
    """Section that holds the fields of the generators, with a dot; empty for the config itself."""

    model: Annotated[ModelConfig, NUMERICS] = field(default_factory=ModelConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    deadlines: Annotated[DeadlineConfig, COSMETIC] = field(default_factory=DeadlineConfig)
    watchdog: Annotated[WatchdogConfig, COSMETIC] = field(default_factory=WatchdogConfig)
    best: Annotated[BestConfig, NUMERICS] = field(default_factory=BestConfig)
    sinks: Annotated[SinksConfig, COSMETIC] = field(default_factory=SinksConfig)
    record: Annotated[RecordConfig, COSMETIC] = field(default_factory=RecordConfig)
    profile: Annotated[ProfileConfig, COSMETIC] = field(default_factory=ProfileConfig)
    hardware: Annotated[HardwareConfig, PERFORMANCE] = field(default_factory=HardwareConfig)
    slurm: Annotated[SlurmConfig, PERFORMANCE] = field(default_factory=SlurmConfig)
    kubernetes: Annotated[KubernetesConfig, PERFORMANCE] = field(default_factory=KubernetesConfig)

    max_restarts: Annotated[int, at_least(0, 10**6), COSMETIC] = 3
    """Number of times that a dead mesh, trainer or generator, is restarted without progress in
    between; one more ends the run. Progress is a new checkpoint for the trainer and a completion
    for a generator."""

    steps: Annotated[int, at_least(1), NUMERICS] = 100
    """Number of steps."""

    export_every: Annotated[int, at_least(0), COSMETIC] = 0
    """Number of steps between exports to ``exports/step-N`` of the run folder, as Hugging Face
    folders. 0 exports at the end only."""

    seed: Annotated[int, at_least(0, 2**63 - 1), NUMERICS] = 0
    """Seed of the initial weights, of the order of prompts and of every completion."""

    output_dir: Annotated[str, COSMETIC] = ""
    """Run folder; empty for ``runs/NAME-TIME``."""

    resume: Annotated[bool, COSMETIC] = False
    """Whether to resume from the newest complete checkpoint in ``output_dir``."""

    quiet: Annotated[bool, COSMETIC] = False
    """Whether to print errors only."""

    @property
    def peak_tflops(self) -> float:
        """Peak speed of the trainer's mesh, in TFLOP/s; 0 if it is unknown."""
        return self.trainer.ranks * self.hardware.peak_tflops

    @property
    def nodes(self) -> int:
        """Number of nodes that all meshes need together."""
        sampling = self.sampling_run()
        return self.trainer.nodes + (sampling.generator.nodes if sampling is not None else 0)

    def require_hosts(self, present: int) -> None:
        """Raise ConfigError unless this host has the device, and ``present`` hosts are enough."""
        self.hardware.require_here()
        fields = {"trainer.nodes": (self.trainer.nodes, 1)}
        if (sampling := self.sampling_run()) is not None:
            fields[f"{self.generator_section}generator.nodes"] = (sampling.generator.nodes, 0)
        asked = " and ".join(f"{name}={nodes}" for name, (nodes, _) in fields.items())
        here = " ".join(f"--{name} {nodes}" for name, (_, nodes) in fields.items())
        require(
            self.nodes <= present,
            f"{asked} need {self.nodes} nodes; this run has {present}: start it by python -m "
            f"rl.launch slurm, or give {here}",
        )

    @property
    def longest(self) -> int:
        """Maximum length of a sequence that is trained on, in tokens."""
        raise NotImplementedError

    @property
    def sequences(self) -> int:
        """Number of sequences that a step trains on."""
        raise NotImplementedError

    @property
    def optimizer_steps(self) -> int | None:
        """Number of optimizer steps of the run; None if it follows from the data."""
        return self.steps * self.updates_per_step

    @property
    def trainer_share(self) -> float | None:
        """Estimated share of the trainer in the work on CPU cores that it shares with generators;
        None if the two take turns.
        """
        return None

    def models(self) -> dict[str, Role]:
        """Return the models by role, in the order in which they take devices."""
        return {"trainer": Role("trainer", self.trainer, self.model)}

    def reference_model(self, parallelism: ParallelismConfig) -> Role:
        """Return the initial policy, frozen, in a layout of its own."""
        checkpoint = replace(self.trainer.checkpoint, folder="reference", enable=False)
        trainer = replace(
            self.trainer, parallelism=parallelism, checkpoint=checkpoint, router_replay="none"
        )
        return Role("reference", trainer, self.model)

    def sampling_run(self) -> "SamplingRunConfig | None":
        """Return the config of a run that samples with the same generators; None if the run has no
        generators.
        """
        return None

    def session(self) -> SessionConfig:
        """Return the models and processes that the run starts."""
        models = self.models()
        head = models.pop("trainer").head
        sampling = self.sampling_run()
        sampling_fields: dict[str, Any] = {"generator": None}
        if sampling is not None:
            sampling_fields = {
                "generator": sampling.generator,
                "weights": sampling.weights,
                "colocate": sampling.colocate,
                "parity": sampling.parity,
                "reward_workers": sampling.rollout.reward_workers,
                "pushes": "in_order" if sampling.rollout.pipeline == "deterministic" else "newest",
                "compares_all": sampling.rollout.max_staleness <= 1,
                "longest": sampling.longest,
            }
        return SessionConfig(
            model=self.model,
            head=head,
            trainer=self.trainer,
            roles=models,
            hardware=self.hardware,
            deadlines=self.deadlines,
            optimizer_steps=self.steps * self.updates_per_step,
            digests=self.record.digests,
            max_restarts=self.max_restarts,
            seed=self.seed,
            **sampling_fields,
        )

    def unused(self) -> dict[str, str]:
        """Return the fields and sections that change nothing in this run, each with the reason and
        what to set instead.
        """
        return {}

    def watchdog_limits(self) -> WatchdogConfig:
        """Return ``watchdog`` with a ``mismatch_max`` for the numbers that the run computes in."""
        return self.watchdog

    @property
    def updates_per_step(self) -> int:
        """Number of optimizer steps per step."""
        return 1


@dataclass(kw_only=True, slots=True)
class SamplingRunConfig(RunConfig):
    """Fields of a run whose model samples completions for a task."""

    task: Annotated[Task.Config, NUMERICS]
    """Prompts and reward to train on: the config of a Task."""

    rollout: Annotated[RolloutConfig, NUMERICS] = field(default_factory=RolloutConfig)
    generator: GeneratorConfig = field(default_factory=GeneratorConfig)
    weights: WeightPushConfig = field(default_factory=WeightPushConfig)
    evaluation: Annotated[EvaluationConfig, COSMETIC] = field(default_factory=EvaluationConfig)
    colocate: Annotated[Colocate, PERFORMANCE] = "none"
    """Meshes that share devices. One of them at a time has its state in device memory; models wait
    in host memory.

    - ``none``: Each mesh has its own devices.
    - ``models``: Trainer, reference, critic and roles share devices.
    - ``all``: The generators share them too, and discard weights and KV cache in between. Weights
      come back with a push. Requires lockstep.
    """

    parity: Annotated[Parity, NUMERICS] = "close"
    """Agreement of the log-probs of trainer and generators for the same weights.

    - ``close``: They are equal up to rounding.
    - ``bitwise``: They are the same 32-bit numbers for every token, however requests and sequences
      are batched. Runs without tensor parallelism, adapters and torch.compile; on CPU with one
      thread for each rank, on GPUs in bfloat16 and for dense models. docs/parity.md says what it
      costs. ``watchdog.parity`` checks it.
    """

    @property
    def longest(self) -> int:
        """Maximum length of a sequence that is trained on, in tokens."""
        return self.task.longest_sequence(self.rollout.max_tokens)

    @property
    def sequences(self) -> int:
        """Number of sequences that a step trains on."""
        return self.rollout.prompts_per_step * self.rollout.samples_per_prompt

    def sampling_run(self) -> "SamplingRunConfig":
        """Return this config."""
        return self

    def watchdog_limits(self) -> WatchdogConfig:
        limits = self.watchdog
        if self.parity == "bitwise":
            limits = replace(limits, parity=limits.parity or "warn")
        if limits.mismatch_max is not None or self.generator.inflight_policy == "continue":
            return limits
        training = self.trainer.training
        dtypes = {self.generator.dtype, training.dtype, training.mixed_precision_param}
        replays = self.trainer.router_replay != "none" and self.rollout.pipeline == "deterministic"
        exact = dtypes == {"float32"} and (replays or not shape_of(self.model).num_experts)
        most = 0.5 if self.trainer.float8 is not None else 1e-3 if exact else 0.1
        rollout = self.rollout
        lowest = min(1.0, rollout.temperature, rollout.final_temperature or 1.0)
        return replace(limits, mismatch_max=most / lowest)
