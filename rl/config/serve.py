"""ServeConfig: all that a server of the Tinker API depends on."""

from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar

from rl.config.run import RunConfig
from rl.generation.generator_config import GeneratorConfig
from rl.session.session_config import Colocate, SessionConfig
from rl.types.rules import COSMETIC, NUMERICS, PERFORMANCE, at_least
from rl.weights.transport import WeightPushConfig

FROM_CLIENTS = "the server's clients set it for each step"
NO_RUN = "a server has no steps of its own; its clients decide what is trained and saved"
ONE_HOST = "a server runs on one host"


@dataclass(kw_only=True, slots=True)
class ServeConfig(RunConfig):
    """Config of a server that trains adapters of one base model, and samples from them, for clients
    of the Tinker API. ``trainer.lora`` has the largest rank that a client may ask for.
    """

    trainer_class: ClassVar[str] = ""

    generator: GeneratorConfig = field(default_factory=GeneratorConfig)
    weights: WeightPushConfig = field(default_factory=WeightPushConfig)
    colocate: Annotated[Colocate, PERFORMANCE] = "none"
    """Whether trainer and generators have devices of their own (``none``) or the same ones in turn
    (``all``)."""

    names: Annotated[tuple[str, ...], COSMETIC] = ()
    """Names of the base model for clients; without one, ``model.hf_path``, or ``policy``."""

    max_loras: Annotated[int, at_least(0, 1024), PERFORMANCE] = 0
    """Number of adapters that a generator samples from side by side, beside the base model; samples
    from more of them take turns. 0 merges one adapter at a time with the generator's weights: then
    those of all models take turns."""

    state_every: Annotated[int, at_least(1), PERFORMANCE] = 20
    """Number of optimizer steps of a model between the states that the server writes for itself. A
    restart takes the steps after the newest state again."""

    stand_ins: Annotated[bool, NUMERICS] = False
    """Whether to serve the loss ``stable_reinforce``, whose formula is not public, by one that
    stands in for it: a policy gradient whose ratios are cut at 1."""

    @property
    def longest(self) -> int:
        """Maximum length of a sequence that is trained on, in tokens."""
        return self.model.max_seq_len

    @property
    def optimizer_steps(self) -> int | None:
        """None: it depends on the clients."""
        return None

    def offered(self) -> tuple[str, ...]:
        """Return the names of the base model for clients."""
        return self.names or (str(self.model.hf_path or "policy"),)

    def session(self) -> SessionConfig:
        """Return the models and processes that the server starts."""
        session = RunConfig.session(self)
        assert session.trainer is not None, "a server trains"
        return replace(
            session,
            trainer=replace(session.trainer, max_skipped_steps=2**31),  # the server counts them
            generator=self.generator,
            weights=self.weights,
            colocate=self.colocate,
            optimizer_steps=10**6,
            reward_workers=0,
            max_loras=self.max_loras,
        )

    def unused(self) -> dict[str, str]:
        """Return the fields and sections that change nothing in a server, each with the reason."""
        names = ("steps", "export_every", "quiet", "watchdog", "sinks", "record", "profile")
        of_steps = ("trainer.optimizer", "trainer.lr_scheduler", "trainer.training.max_norm")
        of_saves = ("enable", "interval", "keep_latest_k", "enable_first_step_checkpoint")
        return (
            dict.fromkeys(names, NO_RUN)
            | dict.fromkeys(("slurm", "kubernetes"), ONE_HOST)
            | dict.fromkeys(of_steps, FROM_CLIENTS)
            | {f"trainer.checkpoint.{name}": "clients decide what is saved" for name in of_saves}
            | {
                "deadlines.reward": "a server scores nothing",
                "trainer.router_replay": "the batches of clients have no recorded experts",
            }
        )
