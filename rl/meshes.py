"""The meshes of a run."""

import asyncio
from collections.abc import Callable
from pathlib import Path

from rl.actors.generator import GeneratorMesh
from rl.actors.hosts import Hosts
from rl.actors.reward import RewardWorkers
from rl.actors.supervisor import Supervisor
from rl.actors.trainer import TrainerMesh
from rl.actors.worker import WorkerGroup
from rl.config import RLConfig
from rl.placement import Placement
from rl.roles import roles_of


class Meshes:
    """Everything that a run starts; nothing is started yet."""

    def __init__(self, config: RLConfig, hosts: Hosts, folder: Path, say: Callable[[str], None]):
        self._config = config
        self._supervisor = Supervisor(hosts)
        self._placement = Placement(config, config.hardware.gpus)
        self._generators: list[GeneratorMesh] = []
        self._shares = config.colocate != "none"
        self.models: dict[str, WorkerGroup] = {}
        """By role."""
        for name, role in roles_of(config).items():
            kind, title = (TrainerMesh, "trainer") if name == "policy" else (WorkerGroup, name)
            self.models[name] = kind(
                role.trainer,
                role.model,
                self._supervisor,
                name=title,
                head=role.head,
                folder=folder,
                seed=config.seed,
                steps=config.steps * config.updates_per_step,
                deadlines=config.deadlines,
                place=self._placement.models[name],
            )
        self.rewards = RewardWorkers(
            config.task,
            config.model,
            self._supervisor,
            count=config.rollout.reward_workers,
            say=say,
            seed=config.seed,
            deadlines=config.deadlines,
        )

    @property
    def shared(self) -> list[str]:
        """Roles on the same devices."""
        generator = ["generator"] if self._config.colocate == "all" else []
        return [*self.models, *generator] if self._shares else []

    def generator(self, number: int) -> GeneratorMesh:
        """Generator ``number``."""
        config = self._config
        mesh = GeneratorMesh(
            config.generator,
            config.model,
            self._supervisor,
            name=f"generator-{number}",
            seed=config.seed,
            deadlines=config.deadlines,
            place=self._placement.generator(number),
        )
        self._generators.append(mesh)
        return mesh

    def describe(self) -> str:
        """What is being started."""
        generator = self._config.generator.tensor_parallel_degree
        replicas = self._config.generator.replicas
        models = ", ".join(f"{model.name} ({model.ranks} ranks)" for model in self.models.values())
        return f"starting {models} and generators ({replicas} x {generator})"

    async def close(self) -> None:
        """Let every engine clean up; a generator that cannot any more has nothing that the run
        still needs.
        """
        models = asyncio.gather(*(model.close() for model in self.models.values()))
        running = [mesh.close() for mesh in self._generators if mesh.is_running]
        await asyncio.gather(*running, self.rewards.stop(), return_exceptions=True)
        await models

    async def stop(self) -> None:
        """End every process of the run."""
        models = [model.stop() for model in self.models.values()]
        await asyncio.gather(
            *models, self.rewards.stop(), *(mesh.stop() for mesh in self._generators)
        )
