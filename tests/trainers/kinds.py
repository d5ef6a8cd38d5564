"""Trainers of every kind on a tiny model, for tests of what all of them promise."""

import asyncio
import contextlib
import json
import math
import os
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rl.cli.arguments import find_config
from rl.config import RLConfig, RunConfig
from rl.trainers.trainer import Trainer
from rl.types import Batch
from tests.kit.chats import chat_rows, examples_fields, preference_rows
from tests.kit.pages import blocks
from tests.kit.runs import OF_TIMING, living
from tests.trainers.loops import set_fields

CONFIGS = {
    "rl": "quickstart",
    "sft": "sft_jsonl",
    "preference": "dpo_jsonl",
    "reward model": "reward_model_jsonl",
    "custom": "focal.focal",
}
FIELDS = {
    "quiet": True,
    "trainer.lr_scheduler.warmup_steps": 0,
    "trainer.checkpoint.interval": 1,
    "trainer.checkpoint.keep_latest_k": 0,
}
RL_FIELDS = {
    "rollout.prompts_per_step": 4,
    "rollout.samples_per_prompt": 4,
    "rollout.reward_workers": 0,
    "evaluation.prompts": 8,
    "evaluation.samples": 0,
    "generator.kv_cache_gib": 0.05,
}


def write_custom_trainer(folder: Path) -> None:
    """Write the trainer of docs/trainers.md as module ``focal``."""
    (block,) = [block for block in blocks("docs/trainers.md") if block.module == "focal"]
    assert len(block.code.splitlines()) <= 60
    (folder / "focal.py").write_text(block.code)


def config_of(kind: str, model: Path, folder: Path, steps: int) -> RunConfig:
    """Return the config of a run in ``folder``. Datasets are tiny, and all checkpoints are kept."""
    config = find_config(CONFIGS[kind])()
    own = RL_FIELDS if kind == "rl" else examples_fields(model)
    set_fields(config, FIELDS | own | {"steps": steps, "output_dir": str(folder)})
    config.trainer.optimizer.param_groups[0].optimizer_kwargs["lr"] = 1e-3
    return config


def set_evaluations(config: RunConfig, every: int) -> None:
    """Have the run evaluate itself after each ``every`` steps."""
    name = "evaluation.every" if isinstance(config, RLConfig) else "validate_every"
    set_fields(config, {name: every})


def rows_for(kind: str) -> list[dict] | None:
    """Return the examples of a trainer; None for the RL trainer, whose task has prompts."""
    pairs = kind in ("preference", "reward model")
    return None if kind == "rl" else preference_rows(40) if pairs else chat_rows(40)


class Run:
    """A trainer in an event loop of its own, which stays open between calls."""

    def __init__(self, kind: str, config: RunConfig):
        self.kind = kind
        self.called: list[str] = []
        self.leaves_after = -1
        self.is_cracked = False
        """Whether the weights of tokens in the loss are infinite."""
        module, _, name = config.trainer_class.partition(":")
        base = getattr(__import__(module, fromlist=[name]), name)
        self.trainer: Trainer[Any] = watched(base, self)(config, rows_for(kind))
        self._runner = asyncio.Runner()

    def do(self, call: Callable[[], Awaitable[Any]]) -> Any:
        """Return the result of a verb of the trainer or of its session."""

        async def done() -> Any:
            return await call()

        return self._runner.run(done())

    def close(self) -> None:
        self.do(self.trainer.close)

    def digest(self) -> str:
        """Return the digest of the present weights."""
        return self.do(self.trainer.session.weight_digest)

    def numbers(self) -> list[dict]:
        """Return the metrics of all steps that do not depend on the clock or on alarms."""
        dropped = (*OF_TIMING, "watchdog/", "push/")
        rows = self.trainer.run.record.read_metrics()
        return [
            {name: value for name, value in row.items() if not name.startswith(dropped)}
            for row in rows
        ]

    def summary(self) -> dict:
        return json.loads((self.trainer.run.record.folder / "summary.json").read_text())


def watched(base: type[Trainer[Any]], run: Run) -> type[Trainer[Any]]:
    """Return a subclass that records its calls in ``run``, and has the faults set there."""

    class Watched(base):
        def configure_model(self):
            run.called.append("model")
            return super().configure_model()

        def configure_dataloaders(self):
            run.called.append("dataloaders")
            super().configure_dataloaders()

        def configure_functions(self):
            run.called.append("functions")
            super().configure_functions()

        def assemble(self):
            super().assemble()
            learn = self.session.forward_backward

            async def forward_backward(batch, loss, **options):
                if run.is_cracked:
                    infinite = batch.loss_mask.float().masked_fill(batch.loss_mask, math.inf)
                    batch = replace(batch, loss_weights=infinite)
                return await learn(batch, loss, **options)

            self.session.forward_backward = forward_backward

        async def between_steps(self):
            await super().between_steps()
            if self.step == run.leaves_after:
                self.leave()

    return Watched


def random_outputs(run: Run, folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probs or scores of random tokens, by the trainer and by transformers."""
    scores = run.kind == "reward model"
    auto = AutoModelForSequenceClassification if scores else AutoModelForCausalLM
    model = auto.from_pretrained(folder).float()
    torch.manual_seed(0)
    rows = torch.randint(3, model.config.vocab_size, (4, 17))
    weights = torch.ones(4, 17)
    weights[:, 0] = 0
    lengths = torch.full((4,), 17)
    batch = Batch(tokens=rows.flatten(), lengths=lengths, loss_weights=weights.flatten())
    outputs = run.do(lambda: run.trainer.session.forward(batch))
    with torch.no_grad():
        if scores:  # the value of the last column follows the tokens before it
            logits = [model(input_ids=row[None, :-1]).logits[0, 0] for row in rows]
            return outputs["values"].reshape(4, 17)[:, -1], torch.stack(logits)
        table = model(input_ids=rows).logits.log_softmax(-1)
    theirs = table[:, :-1].gather(2, rows[:, 1:, None]).squeeze(2)
    return outputs["logprobs"].reshape(4, 17)[:, 1:], theirs


def descendants() -> set[int]:
    """Return the processes that this one has started, directly or not."""
    found = {os.getpid()}
    for pid, parent, _ in living():  # in the order of their starts
        if parent in found:
            found.add(pid)
    return found - {os.getpid()}


def temporary_files(processes: set[int]) -> set[Path]:
    """Return the files of shared memory and of Tiller that ``processes`` map or have open."""
    found = set[Path]()
    for pid in processes:
        process = Path(f"/proc/{pid}")
        with contextlib.suppress(OSError):  # it ended while we looked
            lines = (process / "maps").read_text().splitlines()
            found |= {Path(line.split(maxsplit=5)[5]) for line in lines if "/" in line}
            found |= {link.readlink() for link in (process / "fd").iterdir()}
    beginnings = ("/dev/shm/", f"{tempfile.gettempdir()}/tiller")
    return {path for path in found if str(path).startswith(beginnings)}


def have_ended(processes: set[int], seconds: float) -> bool:
    """Return whether ``processes`` end within ``seconds``."""
    ends = time.monotonic() + seconds
    while processes & {pid for pid, _, _ in living()}:
        if time.monotonic() > ends:
            return False
        time.sleep(0.1)
    return True
