"""Runs that several tests look at."""

from collections.abc import Callable

import pytest

from tests.e2e.runs import Run, make_sums

CALLING = (
    *("--config", "tool_demonstrations", "--steps", "60", "--examples_per_step", "8"),
    *("--trainer.optimizer.param_groups.0.optimizer_kwargs.lr", "6e-3"),
)
OFTEN = (
    *("--task.held_out_fraction", "0.05", "--validate_every", "35"),
    *("--trainer.checkpoint.interval", "35", "--trainer.checkpoint.keep_latest_k", "0"),
)


@pytest.fixture(scope="session")
def finished(tmp_path_factory) -> Callable[..., Run]:
    """A run with the given arguments, without interference; each is made once."""
    runs: dict[tuple[str, ...], Run] = {}

    def run(*arguments: str) -> Run:
        if arguments not in runs:
            runs[arguments] = Run(*arguments, folder=tmp_path_factory.mktemp("finished") / "run")
            assert runs[arguments].wait() == 0, runs[arguments].stderr
            runs[arguments].assert_nothing_left()
        return runs[arguments]

    return run


@pytest.fixture(scope="session")
def demonstrations(tmp_path_factory) -> tuple[str, ...]:
    """Arguments of supervised fine-tuning on tool calls, with a checkpoint and a validation after
    step 35.
    """
    return (*CALLING, *OFTEN, *make_sums(tmp_path_factory.mktemp("demonstrations"), 0))


@pytest.fixture(scope="session")
def caller(finished, demonstrations) -> str:
    """Folder of a model that calls a tool in most episodes."""
    return str(finished(*demonstrations).folder / "export")


@pytest.fixture(scope="session")
def calling(finished, caller) -> Run:
    """A run of two steps of episodes with tools."""
    return finished(
        *("--config", "tool_quickstart", "--model.hf_path", caller, "--steps", "2"),
        *("--rollout.prompts_per_step", "2", "--rollout.samples_per_prompt", "4"),
        *("--evaluation.prompts", "4", "--evaluation.samples", "0"),
        *("--generator.kv_cache_gib", "0.1"),
    )
