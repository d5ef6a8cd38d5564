"""The meshes of a run, and which devices are whose."""

import asyncio
import dataclasses
from collections.abc import Callable
from pathlib import Path

from rl.actors.generator import GeneratorMesh
from rl.actors.reward import RewardWorkers
from rl.actors.supervisor import Supervisor
from rl.actors.trainer import TrainerMesh
from rl.actors.worker import WorkerGroup
from rl.config import RunConfig
from rl.model.shape import ModelConfig
from rl.platform import device_count
from rl.training.config import TrainerConfig
from rl.types import Head


class Meshes:
    """Everything that a run starts; nothing is started yet.

    GPUs go to the trainer, the reference, the critic, other roles and the generators, in this order, unless the config
    has some of them share theirs; where there are too few, they are shared in any case.
    """

    def __init__(self, config: RunConfig, folder: Path, say: Callable[[str], None]):
        self._config, self._folder, self._supervisor = config, folder, Supervisor()
        self._generators: list[GeneratorMesh] = []
        self._shares = config.colocate != "none"
        self.models: dict[str, WorkerGroup] = {}
        """By role."""
        self._add(TrainerMesh, "policy", config.trainer, name="trainer")
        if config.algorithm.kl_coef:
            self._add(WorkerGroup, "reference", _reference_config(config))
        if config.algorithm.advantage.needs_values:
            self._add(WorkerGroup, "critic", _critic_config(config), head="values")
        for name, role in config.roles.items():
            self._add(WorkerGroup, name, _role_config(config, name), model=role.model, head=role.head)
        self.rewards = RewardWorkers(
            config.data,
            config.model,
            self._supervisor,
            count=config.rollout.reward_workers,
            say=say,
            folder=folder,
            seed=config.seed,
            deadlines=config.deadlines,
        )

    def _add(
        self,
        kind: type[WorkerGroup],
        role: str,
        trainer: TrainerConfig,
        *,
        name: str = "",
        model: ModelConfig | None = None,
        head: Head = "logprobs",
    ) -> None:
        config = self._config
        self.models[role] = kind(
            trainer,
            model or config.model,
            self._supervisor,
            name=name or role,
            head=head,
            folder=self._folder,
            seed=config.seed,
            steps=config.steps * config.updates_per_step,
            deadlines=config.deadlines,
            first_device=0 if self._shares else _first_device(self._devices(), trainer.ranks),
        )

    @property
    def shared(self) -> list[str]:
        """Roles on the same devices."""
        generator = ["generator"] if self._config.colocate == "all" else []
        return [*self.models, *generator] if self._shares else []

    def _devices(self) -> int:
        """That are taken by the models so far."""
        if self._config.colocate == "all":
            return 0
        ranks = [model.ranks for model in self.models.values()]
        return max(ranks, default=0) if self._shares else sum(ranks)

    def generator(self, number: int) -> GeneratorMesh:
        """Generator ``number``."""
        config, ranks = self._config, self._config.generator.tensor_parallel_degree
        mesh = GeneratorMesh(
            config.generator,
            config.model,
            self._supervisor,
            name=f"generator-{number}",
            folder=self._folder,
            seed=config.seed,
            deadlines=config.deadlines,
            first_device=_first_device(self._devices() + ranks * number, ranks),
        )
        self._generators.append(mesh)
        return mesh

    def describe(self) -> str:
        """What is being started."""
        generator, replicas = self._config.generator.tensor_parallel_degree, self._config.generator.replicas
        models = ", ".join(f"{model.name} ({model.ranks} ranks)" for model in self.models.values())
        return f"starting {models} and generators ({replicas} x {generator})"

    async def close(self) -> None:
        """Let every engine clean up; a generator that cannot any more has nothing that the run still needs."""
        await asyncio.gather(*(model.close() for model in self.models.values()))
        running = [mesh.close() for mesh in self._generators if mesh.is_running]
        await asyncio.gather(*running, return_exceptions=True)

    async def stop(self) -> None:
        """End every process of the run."""
        models = [model.stop() for model in self.models.values()]
        await asyncio.gather(*models, self.rewards.stop(), *(mesh.stop() for mesh in self._generators))


def _first_device(before: int, ranks: int) -> int:
    """The first GPU of ``ranks`` that come after ``before`` others, among those of this host."""
    return before % max(device_count() - ranks + 1, 1)


def _reference_config(config: RunConfig) -> TrainerConfig:
    """The trainer's, in the reference's layout, and with no checkpoint of its own to go on from."""
    checkpoint = dataclasses.replace(config.trainer.checkpoint, folder="reference", enable=False)
    return dataclasses.replace(config.trainer, parallelism=config.reference.parallelism, checkpoint=checkpoint)


def _role_config(config: RunConfig, name: str) -> TrainerConfig:
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
    return dataclasses.replace(config.trainer, parallelism=role.parallelism, checkpoint=checkpoint, lora=None)


def _critic_config(config: RunConfig) -> TrainerConfig:
    """The trainer's, but for what the critic has of its own."""
    trainer, critic = config.trainer, config.critic
    keep = trainer.checkpoint.keep_latest_k
    checkpoint = dataclasses.replace(
        trainer.checkpoint,
        folder="critic",
        initial_load_path=None,
        async_mode="disabled",  # it must be complete when the trainer's is, which says where the run is
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
