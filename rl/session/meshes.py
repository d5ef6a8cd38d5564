"""The processes of a session, mesh by mesh; nothing is started here."""

from collections.abc import Callable
from pathlib import Path

from rl.actors.generator import GeneratorMesh
from rl.actors.hosts import Hosts
from rl.actors.reward import RewardWorkers
from rl.actors.supervisor import Supervisor
from rl.actors.trainer import TrainerMesh
from rl.actors.worker import WorkerGroup
from rl.session.config import SessionConfig
from rl.session.placement import Placement
from rl.tasks.base import Task


class Meshes:
    """Makes the handle of each mesh, in its place on ``hosts``."""

    def __init__(self, config: SessionConfig, hosts: Hosts, folder: Path):
        self._config = config
        self._folder = folder
        self._supervisor = Supervisor(hosts)
        self._placement = Placement(config, config.hardware.gpus)

    def models(self) -> dict[str, WorkerGroup]:
        """Return the worker groups by role."""
        return {name: self._model(name) for name in self._config.models}

    def generator(self, number: int) -> GeneratorMesh:
        """Return the mesh of generator ``number``."""
        config = self._config
        assert config.generator is not None, "a session without generators makes none"
        return GeneratorMesh(
            config.generator,
            config.model,
            self._supervisor,
            name=f"generator-{number}",
            seed=config.seed,
            deadlines=config.deadlines,
            place=self._placement.generator(number),
        )

    def rewards(self, task: Task.Config, say: Callable[[str], None]) -> RewardWorkers:
        """Return the workers that score completions of ``task``."""
        config = self._config
        return RewardWorkers(
            task,
            config.model,
            self._supervisor,
            count=config.reward_workers,
            say=say,
            seed=config.seed,
            deadlines=config.deadlines,
        )

    def _model(self, name: str) -> WorkerGroup:
        config = self._config
        role = config.models[name]
        kind = TrainerMesh if name == "trainer" else WorkerGroup
        return kind(
            role.trainer,
            role.model,
            self._supervisor,
            name=name,
            head=role.head,
            folder=self._folder,
            seed=config.seed,
            steps=config.optimizer_steps,
            deadlines=config.deadlines,
            place=self._placement.models[name],
        )
