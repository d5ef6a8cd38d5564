"""Environments of other packages train with the real engines."""

import pytest

from tests.environments.verifiers_server import served
from tests.kit.runs import TINY
from tests.kit.tokenizers import make_model


@pytest.mark.long
@pytest.mark.parametrize("name", ["countdown", "skyrl_sums"])
def test_an_environment_of_another_package_trains(name, finished, tmp_path_factory):
    folder = make_model(tmp_path_factory.mktemp("model"))
    config = f"tests.e2e.configs.{name}"
    run = finished("--config", config, *TINY[2:], "--model.hf_path", str(folder))
    rows = run.metrics()
    assert rows[-1]["policy_version"] == 2
    assert max(row["logprob/error_max"] for row in rows) <= 1e-5
    rollouts = run.rollouts()
    assert len(rollouts) == 2 * 16
    stops = {rollout["stop_reason"] for rollout in rollouts}
    assert "done" in stops if name == "countdown" else stops <= {"done", "turns", "length"}


@pytest.mark.long
def test_a_taskset_of_verifiers_trains(finished, tmp_path_factory):
    """Its harness gives each policy two answers, and fails for one of the tasks."""
    folder = tmp_path_factory.mktemp("verifiers")
    model = make_model(folder / "model")
    with served(folder) as server:
        run = finished(
            *("--config", "tests.e2e.configs.verifiers_sums", *TINY[2:]),
            *("--model.hf_path", str(model), "--task.path", str(server.tasks)),
            *("--task.address", server.address, "--evaluation.prompts", "2"),
            *("--rollout.prompts_per_step", "2", "--rollout.samples_per_prompt", "2"),
        )
    rows = run.metrics()
    assert len(rows) == 10
    assert rows[-1]["policy_version"] == 10
    assert max(row["logprob/error_max"] for row in rows) <= 1e-5
    rollouts = run.rollouts()
    assert len(rollouts) == 10 * 4
    assert len({rollout["reward"] for rollout in rollouts}) > 1
    for rollout in rollouts:
        metrics = rollout["metrics"]
        assert metrics["turns"] == metrics["calls"] == 2
        assert rollout["reward"] == metrics["brief"] + 2 * metrics["right"]
    unlucky = "What is 13 + 20?"
    asked = [rollout["prompt"] for rollout in rollouts]
    lost = run.json("summary.json")["lost"]
    assert lost == {"environment raised (RunError)": 1}
    assert unlucky in server.tasks.read_text()
    assert unlucky not in asked
