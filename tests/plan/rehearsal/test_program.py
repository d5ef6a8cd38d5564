"""``python -m rl.plan --rehearse`` prints what a model does on a GPU, and what it cannot do."""

import json
import re
import subprocess
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rl.cli.arguments import parse_config
from rl.plan.__main__ import main
from rl.plan.planned_run import PlannedRun
from rl.plan.rehearsal import start
from rl.plan.rehearsal.rehearsed_batches import shapes_of
from rl.training.packing import MicroBatchLimits
from tests import warm

SMALL = ["--config", "qwen3_0_6b", "--model.n_layers", "1", "--rehearse"]


def test_the_program_prints_memory_collectives_and_waits_as_json(capsys):
    assert main([*SMALL, "--rank", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["feasible"], found["errors"], found["config"]) == (True, [], "qwen3_0_6b")
    (role,) = found["roles"]
    assert (role["role"], role["rank"], role["ranks"], role["error"]) == ("trainer", 1, 2, None)
    phases = {each["phase"]: each for each in role["phases"]}
    assert [*phases] == [
        "init",
        "forward_backward 1",
        "optim_step 1",
        "forward_backward 2",
        "optim_step 2",
    ]
    assert role["peak"] == max(each["peak"] for each in role["phases"])
    assert phases["optim_step 2"]["after"] >= 3 * role["kept"]["parameters"]
    assert 0 < role["peak"] <= role["planned"]
    assert role["shapes"] == [[1, 2048], [1, 4096], [1, 6144], [1, 8192]]
    assert any(each["line"].startswith("rl/training/logprobs.py:") for each in role["largest"])
    assert {"parameters", "gradients", "optimizer states"} < {
        each["what"] for each in role["largest"]
    }
    assert {"allgather_base", "reduce_scatter_base"} == {
        each["kind"] for each in role["collectives"] if each["bytes"] >= role["kept"]["gradients"]
    }
    assert any("outputs_of" in each["line"] for each in role["syncs"])
    assert role["assumed"]
    memory = role["allocator"]
    assert role["peak"] <= memory["allocated"] <= memory["reserved"] <= memory["fixed"]
    assert (memory["steps"], role["not_rehearsed"]) == (40, 2 << 30)


def rehearse_warm(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """Run the program of ``command`` warm."""
    module = command.index("-m") + 1
    return warm.run(*command[module:], env=options["env"], timeout=600)


@pytest.mark.long
def test_the_program_prints_a_report(monkeypatch, capsys):
    monkeypatch.setattr(start, "subprocess", SimpleNamespace(run=rehearse_warm))
    assert main([*SMALL, "--hardware.memory_gib", "7"]) == 2
    text = capsys.readouterr().out
    for part in (
        "two steps of the longest sequences on a made-up h100",
        "trainer rank 0 of 2: ",
        " GiB at most of 7 GiB; the plan says ",
        "forward_backward 2",
        "rl/training/logprobs.py:",
        "attention is compiled for: 1 x 2048, 1 x 4096, 1 x 6144, 1 x 8192\n",
        "reduce-scatter, ",
        "copy to the host, rl/training/micro_batches.py:",
        "allocator after 40 more steps of varied batches\n",
        " would be reserved without expandable segments\n",
        "collectives do nothing",
        "generator-0 rank 0 of 1: ",
        "  vLLM chooses FLASH_ATTN attention and 35 FULL_AND_PIECEWISE CUDA graphs\n  KV cache of ",
        "graph of 256 requests",
        "this cannot work\n  error: trainer rank 0 needs 7.",
        " GiB of 7 GiB; torch's allocator has ",
    ):
        assert part in text
    assert max(map(len, text.splitlines())) <= 140


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([*SMALL, "--rank", "2"], "--rank is 2; it must be below 2"),
        ([*SMALL, "--hardware.device", "auto"], "hardware.device is 'auto'; --rehearse needs the"),
        ([*SMALL, "trainer.activation-checkpoint:memory-budget"], "is memory-budget; --rehearse"),
        (["--config", "qwen3_0_6b", "--rank", "0"], "error: --rank needs --rehearse\n"),
    ],
)
def test_a_config_that_cannot_be_rehearsed_is_refused(arguments, sentence, capsys):
    assert main(arguments) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.long
def test_more_shapes_than_graphs_are_an_error():
    """The lengths of the sequences are those that the config allows, in several steps."""
    run = PlannedRun(parse_config(SMALL[:-1], program="rl.plan")[1])
    trainer = run.roles["trainer"].trainer
    errors = {}
    for name, change in (
        ("packed", {}),
        ("no packing", {"packing": False}),
        ("no limit of tokens", {"micro_batch_tokens": None}),
    ):
        limits = MicroBatchLimits.of(replace(trainer, **change), "flex")
        shapes = shapes_of(run, trainer, limits)
        role = {"role": "trainer", "rank": 0, "error": None, "peak": 0, "shapes": shapes}
        role |= {"allocator": {}, "not_rehearsed": 0}
        errors[name] = start.errors_of({"roles": [role]}, run)
    assert errors.pop("packed") == []
    for found in errors.values():
        assert re.fullmatch(
            r"trainer rank 0 compiles attention for \d+ shapes of micro-batches in 8 steps, and at "
            "most 8 are allowed: set trainer.micro_batch_tokens, and trainer.packing to True",
            *found,
        )


def test_another_version_of_torch_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(torch, "__version__", "2.14.1+cpu")
    assert main(SMALL) == 2
    assert capsys.readouterr().err == (
        "error: torch 2.14.1 is installed; --rehearse changes torch from inside and was written "
        "for torch 2.13.0: install that version\n"
    )
