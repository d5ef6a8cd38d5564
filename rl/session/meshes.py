"""Meshes: the handles of a session's processes. Nothing is started here."""

from dataclasses import replace
from pathlib import Path

from rl.actors.generator import GeneratorMesh
from rl.actors.hosts import Hosts
from rl.actors.policy_trainer import TrainerMesh
from rl.actors.reward_workers import RewardWorkers
from rl.actors.worker import EngineArguments
from rl.actors.worker_group import WorkerGroup
from rl.environments.task import Task
from rl.observe.events import Events
from rl.session.placement import Placement
from rl.session.session_config import SessionConfig, records_experts


class Meshes:
    """Makes the handle of each mesh, in its place on ``hosts``."""

    def __init__(self, config: SessionConfig, hosts: Hosts, folder: Path):
        self._config = config
        self._folder = folder
        self._hosts = hosts
        self._placement = Placement(config, config.hardware.gpus)

    def models(self) -> dict[str, WorkerGroup]:
        """Return the worker groups by role."""
        groups = {}
        for name, role in self._config.models.items():
            kind = TrainerMesh if name == "trainer" else WorkerGroup
            engine = EngineArguments(
                config=role.trainer,
                model=role.model,
                head=role.head,
                seed=self._config.seed,
                steps=self._config.optimizer_steps,
                folder=str(self._folder),
                parity=self._config.parity,
            )
            groups[name] = kind(
                name=name,
                place=self._placement.models[name],
                hosts=self._hosts,
                deadlines=self._config.deadlines,
                engine=engine,
            )
        return groups

    def generator(self, number: int) -> GeneratorMesh:
        """Return the mesh of generator ``number``."""
        generator = self._config.generator
        assert generator is not None, "a session without generators makes none"
        records = records_experts(generator, self._config.trainer)
        return GeneratorMesh(
            name=f"generator-{number}",
            number=number,
            place=self._placement.generator(number),
            hosts=self._hosts,
            deadlines=self._config.deadlines,
            config=replace(generator, record_experts=records),
            in_turns=self._config.colocate == "all",
            model=self._config.model,
            seed=self._config.seed,
            parity=self._config.parity,
            adapters=self._config.adapters,
        )

    def rewards(self, task: Task.Config, events: Events) -> RewardWorkers:
        """Return the workers that score completions of ``task``, or hold its environments."""
        return RewardWorkers(
            config=task,
            model=self._config.model,
            hosts=self._hosts,
            count=self._config.reward_workers,
            seed=self._config.seed,
            deadlines=self._config.deadlines,
            events=events,
        )
