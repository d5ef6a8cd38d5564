"""Configs, disturbances and results of the loop, for its tests."""

import asyncio
import functools
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from rl.observe.record import RunRecord

Prepare = Callable[..., None]
EACH_PIPELINE = pytest.mark.parametrize("pipeline", ["asynchronous", "deterministic"])


def set_fields(config: Any, fields: dict[str, Any]) -> None:
    """Set fields of ``config`` by their names on the command line."""
    for path, value in fields.items():
        *sections, name = path.split(".")
        section = functools.reduce(_field, sections, config)
        if isinstance(section, dict):
            section[name] = value
        else:
            setattr(section, name, value)


def _field(section: Any, name: str) -> Any:
    return section[name] if isinstance(section, dict) else getattr(section, name)


def evaluating(every: int = 2, **fields: Any) -> dict[str, Any]:
    """Return the fields of an evaluation of three prompts after each ``every`` steps."""
    own = {"prompts": 3, "samples": 0, "every": every} | fields
    return {f"evaluation.{name}": value for name, value in own.items()}


def updates(epochs: int, prompts_per_minibatch: int, prompts: int = 64) -> dict[str, Any]:
    """Return the fields of the optimizer steps of a step."""
    return {
        "rollout.prompts_per_step": prompts,
        "algorithm.update_epochs": epochs,
        "algorithm.prompts_per_minibatch": prompts_per_minibatch,
    }


def lost_once(version: int, call: str = "forward_backward") -> Prepare:
    """Return a function that has the trainer be lost in ``call`` on the weights of ``version``."""

    def prepare(trainer, *_):
        async def lose():
            if trainer.version == version and trainer.starts == 1:
                raise trainer.lose(call)

        trainer.during[call] = lose

    return prepare


def generator_lost_once(trainer, first, *_):
    """Have the first generator be lost with the weights of version 2."""

    async def lose(request):
        if first.version == 2 and first.starts == 1:
            first.lose("generate")

    trainer.during["forward_backward"] = lambda: asyncio.sleep(0.01)  # work is left when it is back
    first.during = lose


def left(run, version: int = 2) -> Prepare:
    """Return a function that has the loop be left in the step on the weights of ``version``."""

    def prepare(trainer, *_):
        async def leave():
            if trainer.version == version:
                run.loop.leave()

        trainer.during["forward_backward"] = leave

    return prepare


def during(**hooks: Callable[..., Awaitable[None]]) -> Prepare:
    """Return a function that has calls of the trainer, or of the first generator, await hooks."""

    def prepare(trainer, first, *_):
        first.during = hooks.get("generate")
        trainer.during |= hooks

    return prepare


def while_evaluating(begun: Callable[[int], Awaitable[None]]) -> Prepare:
    """Return a function that has the first generator await ``begun(version)`` in evaluations."""

    def prepare(trainer, first, *_):
        async def generate(request):
            if request.startswith("eval"):
                await begun(first.version)

        first.during = generate

    return prepare


def calls(log: list[str], *kinds: str) -> list[str]:
    """Return the entries of ``log`` that begin with one of ``kinds``."""
    return [entry for entry in log if entry.startswith(kinds)]


def ledger_of(record: RunRecord) -> list[dict]:
    return [json.loads(line) for line in record.ledger_path.read_text().splitlines()]


def trained(record: RunRecord) -> list[int]:
    """Return the prompts that were trained on, in the order of their numbers."""
    return sorted(prompt_id for row in ledger_of(record) for prompt_id in row["trained_now"])


def dropped(record: RunRecord) -> list[tuple[str, int]]:
    """Return reason and prompt_id of each drop."""
    drops = (row["dropped_now"].items() for row in ledger_of(record))
    return sorted((reason, prompt_id) for row in drops for reason, ids in row for prompt_id in ids)


def results(record: RunRecord) -> tuple[list, list, list, list]:
    """Return what a deterministic run determines: metrics, prompts, drops and evaluations."""
    prompts = [row["trained_now"] for row in ledger_of(record)]
    rows = without_times(record.read_metrics())
    return rows, prompts, dropped(record), record.read_evaluations()


def without_times(rows: list[dict]) -> list[dict]:
    """Return rows of metrics without times, states of prompts and states of the push."""
    measured = ("timing/", "tokens_per_s", "generator/", "ledger/", "push/", "restarts/")
    return [{k: v for k, v in row.items() if not k.startswith(measured)} for row in rows]
