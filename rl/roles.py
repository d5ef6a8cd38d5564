"""Models that a run needs, each with its own config."""

import dataclasses
from pathlib import Path

from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.config import ParallelismConfig

from rl.config import PreferenceConfig, RLConfig, RunConfig, SFTConfig
from rl.session.config import Role, SessionConfig
from rl.training.config import TrainerConfig


def roles_of(config: RunConfig) -> dict[str, Role]:
    """Return the models by role, in the order in which they take devices."""
    if isinstance(config, PreferenceConfig):
        loss = config.loss.build()
        roles = {"trainer": Role("trainer", config.trainer, config.model, loss.head)}
        if loss.needs_reference:
            reference = _reference_config(config, config.reference.parallelism)
            roles["reference"] = Role("reference", reference, config.model)
        return roles
    roles = {"trainer": Role("trainer", config.trainer, config.model)}
    if not isinstance(config, RLConfig):
        return roles
    needed = config.algorithm.roles()
    if "reference" in needed:
        roles["reference"] = Role(
            "reference", _reference_config(config, config.reference.parallelism), config.model
        )
    if "critic" in needed:
        roles["critic"] = Role("critic", _critic_config(config), config.model, "values")
    for name, role in config.roles.items():
        roles[name] = Role(f"roles.{name}", _role_config(config, name), role.model, role.head)
    return roles


def session_config(config: RunConfig) -> SessionConfig:
    """Return the models and processes that a run starts."""
    roles = roles_of(config)
    session = SessionConfig(
        model=config.model,
        head=roles["trainer"].head,
        trainer=config.trainer,
        roles={name: role for name, role in roles.items() if name != "trainer"},
        generator=None,
        hardware=config.hardware,
        deadlines=config.deadlines,
        optimizer_steps=config.steps * config.updates_per_step,
        digests=config.record.digests,
        max_restarts=config.max_restarts,
        seed=config.seed,
    )
    sampling = config.sampling_run() if isinstance(config, SFTConfig) else config
    if not isinstance(sampling, RLConfig):
        return session
    rollout = sampling.rollout
    return dataclasses.replace(
        session,
        generator=sampling.generator,
        weights=sampling.weights,
        colocate=sampling.colocate,
        reward_workers=rollout.reward_workers,
        pushes="in_order" if rollout.pipeline == "deterministic" else "newest",
        compares_all=rollout.max_staleness <= 1,
        longest=sampling.task.longest_sequence(rollout.max_tokens),
    )


def _reference_config(config: RunConfig, parallelism: ParallelismConfig) -> TrainerConfig:
    """Return the trainer's config in the reference's layout, without checkpoints of its own."""
    checkpoint = dataclasses.replace(config.trainer.checkpoint, folder="reference", enable=False)
    return dataclasses.replace(config.trainer, parallelism=parallelism, checkpoint=checkpoint)


def _role_config(config: RLConfig, name: str) -> TrainerConfig:
    """Return the trainer's config in the role's layout, with the role's weights."""
    role = config.roles[name]
    checkpoint = _starting_from(role.checkpoint, config.trainer.checkpoint)
    checkpoint = dataclasses.replace(checkpoint, folder=name, enable=False)
    return dataclasses.replace(
        config.trainer, parallelism=role.parallelism, checkpoint=checkpoint, lora=None
    )


def _starting_from(
    folder: str | None, config: CheckpointManager.Config
) -> CheckpointManager.Config:
    """Return ``config`` with initial weights from ``folder``, a checkpoint or a Hugging Face
    folder. None selects the weights of the model.
    """
    path = Path(folder).resolve() if folder else None
    return dataclasses.replace(
        config,
        initial_load_path=str(path) if path is not None else None,
        initial_load_model_only=path is not None,
        initial_load_in_hf=path is not None and (path / "config.json").is_file(),
        initial_load_in_hf_quantized=False,
    )


def _critic_config(config: RLConfig) -> TrainerConfig:
    """Return the trainer's config with the critic's own fields in place of the trainer's."""
    trainer = config.trainer
    critic = config.critic
    keep = trainer.checkpoint.keep_latest_k
    checkpoint = dataclasses.replace(
        _starting_from(critic.checkpoint, trainer.checkpoint),
        folder="critic",
        # the critic's checkpoint must be complete before the trainer's: the run resumes at that
        async_mode="disabled",
        keep_latest_k=keep + 1 if keep else 0,  # plus that saved before the trainer's
    )
    return dataclasses.replace(
        trainer,
        parallelism=critic.parallelism,
        optimizer=critic.optimizer,
        lr_scheduler=critic.lr_scheduler,
        lora=None,  # with a frozen trunk, only the head would learn
        checkpoint=checkpoint,
    )
