"""The loop over meshes that compute nothing."""

import asyncio
import json
import shutil
from functools import partial
from types import SimpleNamespace

import pytest

from rl.cli import find_config
from rl.errors import Interrupted
from rl.observe.progress import Progress
from rl.observe.record import RunRecord
from rl.session.session import Session
from rl.step_folders import StepFolders
from rl.trainers.rl import RLTrainer
from rl.trainers.run_folder import RunFolder
from tests.trainers.fakes import Generator, Rewards, Trainer
from tests.trainers.tiny_chat import tiny_chat_model


@pytest.fixture(scope="package", autouse=True)
def no_curves():
    """Have runs draw no curves, which take most of their time. The runs of tests/e2e draw them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rl.trainers.run_folder.write_curves_png", lambda *_: None)
        yield


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory):
    """Folder of a tiny Qwen3 with Qwen3's chat template."""
    return tiny_chat_model(tmp_path_factory.mktemp("chat_model"))


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
def make_preference(chat_model, tmp_path):
    """Makes a config of four steps on four examples each."""

    def make(name="dpo_jsonl", **fields):
        config = find_config(name)()
        config.model.hf_path = str(chat_model)
        config.model.max_seq_len = 128
        config.task.max_tokens = 96
        config.task.held_out_fraction = 0.2
        config.examples_per_step = 4
        config.steps = 4
        config.validate_every = 0
        config.trainer.optimizer.param_groups[0].optimizer_kwargs["lr"] = 1e-3
        config.trainer.lr_scheduler.warmup_steps = 0
        config.trainer.checkpoint.interval = 2
        config.output_dir = str(tmp_path / "run")
        config.quiet = True
        for field, value in fields.items():
            setattr(config, field, value)
        return config

    return make


@pytest.fixture
def run(tmp_path):
    """Function that runs the loop and returns the log of calls and the rows of metrics.

    Its argument is called with the meshes before the loop starts.
    """

    def run(
        prepare=lambda trainer, *generators: None,
        *,
        staleness=0,
        steps=4,
        saved=None,
        save_every=0,
        folder="run",
        replicas=1,
        edit=lambda config: None,
        models=lambda log: {},
        close=False,
        **weights,
    ):
        config = find_config("quickstart")()
        config.steps = steps
        config.rollout.max_staleness = staleness
        config.evaluation.prompts = 0
        config.rollout.prompts_per_step = 2
        config.rollout.samples_per_prompt = 2
        config.trainer.checkpoint.enable = save_every > 0
        config.trainer.checkpoint.interval = max(save_every, 1)
        config.generator.replicas = replicas
        for name, value in weights.items():
            setattr(config.weights, name, value)
        config.weights.transport = "shared_memory"
        edit(config)
        log = []
        record = RunRecord(tmp_path / folder)
        unheard: list[dict] = []

        async def main():
            asyncio.get_running_loop().set_exception_handler(
                lambda _, context: unheard.append(context)
            )
            trainer = Trainer(log, StepFolders(record.checkpoints), saved)
            rewards = Rewards()
            generators = [Generator(log, number, trainer.slots) for number in range(replicas)]
            run.trainer = trainer
            run.generators = generators
            run.rewards = rewards
            prepare(trainer, *generators)

            def make(number):
                while len(generators) <= number:
                    generators.append(Generator(log, len(generators), trainer.slots))
                return generators[number]

            meshes = SimpleNamespace(
                models=lambda: {"trainer": trainer, **models(log)},
                generator=make,
                rewards=lambda task, events: rewards,
            )
            run.loop = RLTrainer(
                config,
                folder=RunFolder(config, record, Progress(steps, quiet=True)),
                make_session=partial(Session.on_nodes, meshes=meshes),
            )
            try:
                await asyncio.wait_for(run.loop.train(), 300)
                if close:
                    await run.loop.close()
                return json.loads((record.folder / "summary.json").read_text())
            except Interrupted:
                return None
            finally:
                run.saved = trainer.saved

        run.log = log
        run.unheard = unheard
        run.record = record
        run.summary = asyncio.run(main())
        return log, record.read_metrics()

    return run
