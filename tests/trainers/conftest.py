"""The loop over meshes that compute nothing."""

import asyncio
import json
import shutil
from functools import partial
from types import SimpleNamespace

import pytest

from rl.cli.arguments import find_config
from rl.errors import Interrupted
from rl.observe.checkpoint_folders import StepFolders
from rl.observe.progress import Progress
from rl.observe.record import RunRecord
from rl.session.session import Session
from rl.trainers.rl import RLTrainer
from rl.trainers.run_folder import RunFolder
from tests.kit.chats import examples_fields
from tests.kit.fakes import Generator, Rewards, Trainer
from tests.trainers.loops import set_fields


@pytest.fixture(scope="package", autouse=True)
def no_curves():
    """Have runs draw no curves, which take most of their time. The runs of tests/e2e draw them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rl.trainers.run_folder.write_curves_png", lambda *_: None)
        yield


@pytest.fixture(scope="session")
def base_model(chat_model, tmp_path_factory):
    """The same folder with the stop token of Qwen3's base models."""
    folder = shutil.copytree(chat_model, tmp_path_factory.mktemp("base") / "model")
    for name, change in (
        ("tokenizer_config.json", {"eos_token": "<|endoftext|>"}),
        ("config.json", {"eos_token_id": 0}),
        ("generation_config.json", {"eos_token_id": 0}),
    ):
        path = folder / name
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
    return folder


@pytest.fixture
def examples_config(chat_model, tmp_path):
    """Function that returns a config of four steps on four examples each."""

    def config_of(name="dpo_jsonl", **fields):
        config = find_config(name)()
        own = {
            "trainer.lr_scheduler.warmup_steps": 0,
            "trainer.checkpoint.interval": 2,
            "output_dir": str(tmp_path / "run"),
        }
        set_fields(config, examples_fields(chat_model) | own | fields)
        config.trainer.optimizer.param_groups[0].optimizer_kwargs["lr"] = 1e-3
        return config

    return config_of


class Loop:
    """RL loop over meshes that compute nothing. A call runs it; returns calls and metrics."""

    def __init__(self, folder):
        self._folder = folder

    def make(
        self,
        prepare=lambda trainer, *generators: None,
        *,
        kind=RLTrainer,
        steps=4,
        staleness=0,
        pipeline="deterministic",
        replicas=1,
        save_every=0,
        saved=None,
        folder="run",
        command="train",
        fields=None,
        having=None,
        models=lambda log: {},
    ) -> RLTrainer:
        """Return the trainer of the loop. ``prepare`` gets the meshes before that; ``fields`` are
        fields of the config, ``having`` are attributes of ``trainer``, ``generator`` (the first)
        and ``rewards``, and ``models`` returns auxiliary models.
        """
        config = find_config("quickstart")()
        common = {
            "steps": steps,
            "rollout.pipeline": pipeline,
            "rollout.max_staleness": staleness,
            "rollout.prompts_per_step": 2,
            "rollout.samples_per_prompt": 2,
            "evaluation.prompts": 0,
            "trainer.checkpoint.enable": save_every > 0,
            "trainer.checkpoint.interval": max(save_every, 1),
            "generator.replicas": replicas,
            "weights.transport": "shared_memory",
        }
        set_fields(config, common | (fields or {}))
        self.log = log = []
        self.unheard = []
        self.record = record = RunRecord(self._folder / folder)
        self.trainer = trainer = Trainer(log, StepFolders(record.checkpoints), saved)
        self.saved = trainer.saved
        self.rewards = Rewards()
        self.generators = generators = []

        def generator(number):
            while len(generators) <= number:
                generators.append(Generator(log, len(generators), trainer.slots))
            return generators[number]

        generator(replicas - 1)
        parts = SimpleNamespace(trainer=trainer, generator=generators[0], rewards=self.rewards)
        set_fields(parts, having or {})
        prepare(trainer, *generators)
        meshes = SimpleNamespace(
            models=lambda: {"trainer": trainer, **models(log)},
            generator=generator,
            rewards=lambda task, events: self.rewards,
        )
        self.loop = kind(
            config,
            folder=RunFolder(config, record, Progress(steps, quiet=True), command=command),
            make_session=partial(Session.on_nodes, meshes=meshes),
        )
        return self.loop

    def __call__(self, *arguments, close=False, **options):
        self.make(*arguments, **options)
        self.summary = asyncio.run(self._train(close))
        return self.log, self.record.read_metrics()

    async def _train(self, close):
        """Return the summary, None if the loop was left."""
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: self.unheard.append(context))
        try:
            await asyncio.wait_for(self.loop.train(), 300)
        except Interrupted:
            return None
        if close:
            await self.loop.close()
        return json.loads((self.record.folder / "summary.json").read_text())


@pytest.fixture
def run(tmp_path):
    """RL loop over meshes that compute nothing."""
    return Loop(tmp_path)
