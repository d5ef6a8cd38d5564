"""Processes of a run that several trainers use, one after another."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

from rl.actors.hosts import Hosts
from rl.config import RLConfig
from rl.observe.events import Events, print_texts
from rl.observe.progress import Progress
from rl.observe.record import RunRecord
from rl.session.meshes import Meshes
from rl.session.session import Session
from rl.trainers.rl import RLTrainer
from rl.trainers.run_folder import RunFolder


class Processes:
    """Processes on which one trainer after another goes on with the same run of ``config.steps``
    steps.
    """

    def __init__(self, config: RLConfig, folder: Path):
        self.config = config
        self.record = RunRecord(folder)
        self.steps = 0
        hosts = Hosts(self.record.logs)
        meshes = Meshes(config.session(), hosts, folder)
        models = meshes.models()
        generator = meshes.generator(0)
        rewards = meshes.rewards(config.task, Events(print_texts))
        self.meshes = SimpleNamespace(
            models=lambda: models, generator=lambda number: generator, rewards=lambda *_: rewards
        )
        self.task = config.task.build(seed=0, model=config.model)
        self.trainer: RLTrainer | None = None

    async def run(
        self, apply: Callable[[RLConfig], None], steps: int
    ) -> tuple[list[dict], list[dict]]:
        """Take ``steps`` more steps under what ``apply`` sets in the config; return their rows of
        metrics.jsonl and ledger.jsonl.
        """
        config = self.config
        before = self.steps
        apply(config)
        config.steps = self.steps = before + steps
        run = RunFolder(config, self.record, Progress(config.steps, quiet=True))
        make_session = partial(Session.on_nodes, meshes=self.meshes)
        self.trainer = RLTrainer(config, self.task, folder=run, make_session=make_session)
        await self.trainer.train()
        ledger = [json.loads(line) for line in self.record.ledger_path.read_text().splitlines()]
        return self.record.read_metrics()[before:], ledger[before:]

    async def stop(self) -> None:
        if self.trainer is not None and self.trainer.run.is_open:
            await self.trainer.session.stop()
