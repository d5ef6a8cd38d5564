"""The models of a run: those that its algorithm needs, and no other, each with its own config."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from rl.config import RLConfig
from rl.model.shape import ModelConfig
from rl.training.config import TrainerConfig
from rl.types import Head


@dataclass(frozen=True, slots=True)
class Role:
    """A model with a mesh of its own."""

    field: str
    """Where in the RLConfig it stands."""
    trainer: TrainerConfig
    model: ModelConfig
    head: Head = "logprobs"

    @property
    def parallelism_field(self) -> str:
        """Of its layout."""
        return f"{self.field}.parallelism"

    @property
    def model_field(self) -> str:
        """Name of the field that the model comes from."""
        return f"{self.field}.model" if self.field.startswith("roles.") else "model"


def roles_of(config: RLConfig) -> dict[str, Role]:
    """By name, in the order in which they take devices; the first is the policy."""
    roles = {"policy": Role("trainer", config.trainer, config.model)}
    if config.algorithm.kl_coef:
        roles["reference"] = Role("reference", _reference_config(config), config.model)
    if config.algorithm.advantage.needs_values:
        roles["critic"] = Role("critic", _critic_config(config), config.model, "values")
    for name, role in config.roles.items():
        roles[name] = Role(f"roles.{name}", _role_config(config, name), role.model, role.head)
    return roles


def _reference_config(config: RLConfig) -> TrainerConfig:
    """The trainer's, in the reference's layout, and with no checkpoint of its own to go on from."""
    checkpoint = dataclasses.replace(config.trainer.checkpoint, folder="reference", enable=False)
    return dataclasses.replace(
        config.trainer, parallelism=config.reference.parallelism, checkpoint=checkpoint
    )


def _role_config(config: RLConfig, name: str) -> TrainerConfig:
    """The trainer's, in the role's layout, with the role's weights."""
    role = config.roles[name]
    checkpoint = dataclasses.replace(
        config.trainer.checkpoint,
        folder=name,
        enable=False,
        initial_load_path=str(Path(role.checkpoint).resolve()) if role.checkpoint else None,
        initial_load_model_only=True,
        initial_load_in_hf=False,
    )
    return dataclasses.replace(
        config.trainer, parallelism=role.parallelism, checkpoint=checkpoint, lora=None
    )


def _critic_config(config: RLConfig) -> TrainerConfig:
    """The trainer's, but for what the critic has of its own."""
    trainer = config.trainer
    critic = config.critic
    keep = trainer.checkpoint.keep_latest_k
    checkpoint = dataclasses.replace(
        trainer.checkpoint,
        folder="critic",
        initial_load_path=None,
        # it must be complete when the trainer's is, which says where the run is
        async_mode="disabled",
        keep_latest_k=keep + 1 if keep else 0,  # also what was saved before the trainer came to it
    )
    return dataclasses.replace(
        trainer,
        parallelism=critic.parallelism,
        optimizer=critic.optimizer,
        lr_scheduler=critic.lr_scheduler,
        lora=None,  # a frozen trunk would teach its head alone
        checkpoint=checkpoint,
    )
