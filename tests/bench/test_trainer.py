"""The trainer's benchmark: all sides do the same work, and the memory of log-probs is measured."""

import json

import pytest

from tests.bench.programs import python

pytestmark = pytest.mark.long


def test_all_sides_learn_alike_and_the_last_line_is_json(tmp_path):
    picture = tmp_path / "memory.png"
    out = python(
        "scripts/bench/trainer.py", "--tiny", "--repeats", "2", "--plot", picture, "--json"
    )
    result = json.loads(out.splitlines()[-1])
    assert result.keys() == {
        "ours_over_bare",
        "ours_over_transformers",
        "ours_over_unshared_prompts",
        "loss_spread",
        "naive_over_ours_logprob_memory",
        "naive_over_ours_logprob_memory_small_chunks",
        "mkl_over_onednn",
    }
    assert min(result.values()) > 0
    assert result["loss_spread"] < 1e-6
    assert 2 < result["naive_over_ours_logprob_memory"] < 8
    assert picture.read_bytes().startswith(b"\x89PNG")
