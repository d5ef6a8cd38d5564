"""Configs and results of the loop, for its tests."""

import json

from rl.observe.record import RunRecord


def calls(log: list[str], *kinds: str) -> list[str]:
    return [entry for entry in log if entry.startswith(kinds)]


def free(config):
    config.rollout.pipeline = "asynchronous"


def ledger_of(record: RunRecord) -> list[dict]:
    return [json.loads(line) for line in record.ledger_path.read_text().splitlines()]


def whereabouts(record: RunRecord) -> tuple[list[list[int]], list[tuple[str, int]]]:
    """Return the prompt_ids that each step trained on, and reason and prompt_id of each drop."""
    rows = ledger_of(record)
    dropped = [
        (reason, o)
        for row in rows
        for reason, prompt_ids in row["dropped_now"].items()
        for o in prompt_ids
    ]
    return [row["trained_now"] for row in rows], sorted(dropped)


def without_times(rows: list[dict]) -> list[dict]:
    """Return rows of metrics without times, states of prompts and states of the push."""
    measured = ("timing/", "tokens_per_s", "generator/", "ledger/", "push/", "restarts/")
    return [{k: v for k, v in row.items() if not k.startswith(measured)} for row in rows]


def updates(epochs: int, prompts_per_minibatch: int, prompts: int = 64):
    """Return an edit of a config that sets the optimizer steps of a step."""

    def edit(config):
        config.rollout.prompts_per_step = prompts
        config.algorithm.update_epochs = epochs
        config.algorithm.prompts_per_minibatch = prompts_per_minibatch

    return edit
