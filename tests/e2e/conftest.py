"""Runs that several tests look at."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.pipelines import (
    CONFIGS,
    EXACT,
    HYBRID,
    LOCKSTEP,
    MANY_MODELS,
    REPLAYED,
    TOOLS,
    TWO_AHEAD,
)
from tests.kit.chats import chat_rows, preference_rows, tiny_chat_model
from tests.kit.runs import LR, Run, make_sums, words


@pytest.fixture(scope="session")
def finished(tmp_path_factory) -> Callable[..., Run]:
    """Function that returns an undisturbed run with the given arguments, made once."""
    runs: dict[tuple[str, ...], Run] = {}

    def run(*arguments: str) -> Run:
        if arguments not in runs:
            runs[arguments] = Run(*arguments, folder=tmp_path_factory.mktemp("finished") / "run")
            assert runs[arguments].wait() == 0, runs[arguments].stderr
            runs[arguments].assert_nothing_left()
            last = runs[arguments].metrics()[-1]
            assert (last["watchdog/mismatch"], last["watchdog/reference"]) == (0, 0)
        return runs[arguments]

    return run


@pytest.fixture(scope="session")
def inputs(tmp_path_factory) -> Path:
    """Folder of a tiny model and of examples for each trainer."""
    folder = tmp_path_factory.mktemp("inputs")
    tiny_chat_model(folder)
    for name, rows in (("chats", chat_rows(60)), ("pairs", preference_rows(60))):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="session")
def demonstrations(tmp_path_factory) -> tuple[str, ...]:
    """Arguments of fine-tuning on tool calls, with a checkpoint and a validation after step 35."""
    return (
        *words("--config tool_demonstrations --steps 60 --examples_per_step 8"),
        *(LR, "6e-3", "--task.held_out_fraction", "0.05", "--validate_every", "35"),
        *words("--trainer.checkpoint.interval 35 --trainer.checkpoint.keep_latest_k 0"),
        *make_sums(tmp_path_factory.mktemp("demonstrations"), 0),
    )


@pytest.fixture
def arguments(request) -> Callable[..., tuple[str, ...]]:
    """Function that returns the command line of a run of a kind."""

    def on_examples(kind: str, steps: int, config: str = "") -> tuple[str, ...]:
        folder = request.getfixturevalue("inputs")
        data = folder / ("chats" if kind in ("sft", "sampled") else "pairs")
        own = {
            "cached": ("--reference.scores", "cached", "--epochs", "4"),
            "sampled": ("--evaluation.task.path", str(folder / "problems.jsonl")),
        }
        return (
            *("--config", config or CONFIGS[kind], "--steps", str(steps)),
            *("--model.hf_path", str(folder / "tiny"), "--model.max_seq_len", "128"),
            *("--task.path", str(data), "--task.max_tokens", "96", "--examples_per_step", "4"),
            *words("--task.held_out_fraction 0.2 --validate_every 7 --validate_at_start"),
            *words("--trainer.checkpoint.interval 5 --trainer.checkpoint.keep_latest_k 0"),
            *(LR, "1e-3", *own.get(kind, ())),
        )

    def arguments(kind: str, *, steps: int = 60, config: str = "") -> tuple[str, ...]:
        if kind in CONFIGS:
            return on_examples(kind, steps, config)
        if kind == "demonstrations":
            return request.getfixturevalue("demonstrations")
        if "tools" in kind:
            folder = str(request.getfixturevalue("tmp_path"))
            caller = request.getfixturevalue("caller")
            ahead = words("--rollout.max_staleness 2 --generator.replicas 2")
            given = ("--model.hf_path", caller, "--task.folder", folder)
            return (*TOOLS, *given, *(ahead if "ahead" in kind else ()))
        kinds = {"models": MANY_MODELS, "lockstep": LOCKSTEP, "two ahead": TWO_AHEAD}
        return (kinds | {"experts": REPLAYED, "hybrid": HYBRID, "bitwise": EXACT})[kind]

    return arguments


@pytest.fixture
def recorded(finished, arguments) -> Callable[..., Run]:
    """Function that returns a finished run of a kind."""
    return lambda kind="models": finished(*arguments(kind))


@pytest.fixture(scope="session")
def caller(finished, demonstrations) -> str:
    """Folder of a model that calls a tool in most episodes."""
    return str(finished(*demonstrations).folder / "export")


@pytest.fixture(scope="session")
def calling(finished, caller) -> Run:
    """A run of two steps of episodes with tools."""
    return finished(
        *("--config", "tool_quickstart", "--model.hf_path", caller, "--steps", "2"),
        *words("--rollout.prompts_per_step 2 --rollout.samples_per_prompt 4"),
        *words("--evaluation.prompts 4 --evaluation.samples 0 --generator.kv_cache_gib 0.1"),
    )
