"""The Triton kernels of a generator fit an H100: registers, shared memory, and nothing spilled."""

import json
import os
import pickle
import subprocess
import sys
from dataclasses import replace

import pytest

from rl.generation.generator_config import GeneratorConfig
from tests.generation.conftest import SMALL
from tests.generation.triton_kernels import WORDS, launches
from tests.kit.generator_ranks import INTERPRETED, GeneratorRanks, push, request
from tests.kit.policies import EXPERTS, Policy

pytestmark = pytest.mark.long
MOST_REGISTERS = 255
"""Registers of a thread."""
REGISTERS = 65_536
"""Registers of a multiprocessor."""
SHARED = 227 << 10
"""Shared memory of a block on SM 9.0, in bytes."""
SPILLED = {"vllm.v1.sample.ops.topk_topp_triton:_topk_topp_kernel": 8}
"""Bytes that a thread keeps in local memory, by kernel. Others keep none."""


def test_every_kernel_compiles_for_an_h100_within_its_bounds(tmp_path):
    model = replace(EXPERTS, vocab_size=WORDS)
    config = GeneratorConfig(**SMALL, max_running_requests=8, record_experts=True)
    rank = GeneratorRanks(config, model, **INTERPRETED)
    try:
        rank.run(push, Policy(model, seed=0).weights, 1)
        asked = [
            request("greedy", temperature=0.0, max_tokens=3),
            request("free", seed=1, temperature=0.7, max_tokens=3, top_logprobs=2),
            request("cut", seed=2, min_p=0.2, max_tokens=3),
        ]
        (recorded,) = rank.run(launches, asked)
    finally:
        rank.close()
    variables = {"TRITON_CACHE_DIR": str(tmp_path / "cache"), "TRITON_F32_DEFAULT": "ieee"}
    file = tmp_path / "launches"
    file.write_bytes(pickle.dumps(recorded))
    ended = subprocess.run(
        [sys.executable, "-m", "tests.generation.triton_kernels", str(file)],
        capture_output=True,
        text=True,
        timeout=600,
        env=os.environ | variables,
    )
    assert ended.returncode == 0, ended.stderr
    kernels = json.loads(ended.stdout.splitlines()[-1])
    names = {each["kernel"] for each in kernels}
    assert {name for name, *_ in recorded} < names
    for each in kernels:
        assert each["registers"] <= MOST_REGISTERS and each["shared"] <= SHARED, each
        assert each["registers"] * each["threads"] <= REGISTERS, each
        assert each["spilled"] <= SPILLED.get(each["kernel"], 0), each
