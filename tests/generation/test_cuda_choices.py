"""Choices of vLLM on GPUs for the arguments of our engine. Computed on CPU; not seen on a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rl.generation.generator_config import GeneratorConfig, environment

GOLDEN = Path(__file__).with_name("cuda_choices.json")
COMMAND = ("-m", "tests.generation.cuda_choices")


@pytest.mark.long
def test_vllm_chooses_on_gpus_what_the_golden_file_says(tmp_path):
    ended = subprocess.run(
        [sys.executable, *COMMAND, str(tmp_path / "found.json")],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=Path(__file__).parents[2],
        env=os.environ | environment(GeneratorConfig(enforce_eager=False)),
    )
    assert ended.returncode == 0, ended.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    golden = json.loads(GOLDEN.read_text())
    assert found.keys() == golden.keys()
    changed = [
        f"{case}: {choice} was {golden[case].get(choice)!r}, is {now!r}"
        for case in golden
        for choice, now in found[case].items()
        if now != golden[case].get(choice)
    ]
    assert not changed, "\n".join(
        [
            *changed,
            "see docs/cuda.md, vLLM on CUDA. If this is meant, change it there, and run "
            f"`python {' '.join(COMMAND)} tests/generation/{GOLDEN.name}`",
        ]
    )
