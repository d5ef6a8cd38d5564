"""Environments of other packages train with the real engines."""

import pytest

from tests.e2e.runs import TINY
from tests.tiny_tokenizers import make_model


@pytest.mark.parametrize("name", ["countdown", "skyrl_sums"])
def test_an_environment_of_another_package_trains(name, finished, tmp_path_factory):
    folder = make_model(tmp_path_factory.mktemp("model"))
    config = f"tests.e2e.configs.{name}"
    run = finished("--config", config, *TINY[2:], "--model.hf_path", str(folder))
    rows = run.metrics()
    assert rows[-1]["policy_version"] == 2
    assert max(row["logprob/error_max"] for row in rows) <= 1e-5
    rollouts = run.lines("rollouts.jsonl")
    assert len(rollouts) == 2 * 16
    stops = {rollout["stop_reason"] for rollout in rollouts}
    assert "done" in stops if name == "countdown" else stops <= {"done", "turns", "length"}
