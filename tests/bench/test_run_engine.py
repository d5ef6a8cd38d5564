"""The engine under plain torchrun: steps, their mean, and a trace of each rank."""

import json
import re

import pytest

from tests.kit.ranks import loopback_store, rank_environment
from tests.kit.scripts import module, python

SCRIPT = "scripts/run_engine.py"
TINY = ["--config", "quickstart", "--steps", "3", "--rollout.prompts_per_step", "2"]


NUMBER = r"([+-]?[\d,]+\.?\d*)"


@pytest.mark.long
def test_two_ranks_of_torchrun_train_as_one_does_and_are_traced(tmp_path, monkeypatch, capsys):
    def steps_of(out: str) -> list[tuple[float, float]]:
        """Loss and gradient norm of each step, from what the script printed."""
        *steps, mean = out.splitlines()
        assert re.fullmatch(rf"mean after the first step: {NUMBER} tokens/s", mean)
        found = []
        for number, line in enumerate(steps, start=1):
            match = re.fullmatch(
                rf"step {number}  loss {NUMBER}  grad norm {NUMBER}  {NUMBER} tokens/s", line
            )
            assert match, line
            found.append((float(match[1]), float(match[2])))
        return found

    options = [
        "--trainer.parallelism.data_parallel_shard_degree",
        "2",
        "--profile",
        tmp_path / "traces",
    ]
    torchrun = ["torch.distributed.run", "--nproc-per-node", "2"]
    losses = steps_of(python(*torchrun, SCRIPT, *TINY, *options))
    for rank in range(2):
        trace = json.loads((tmp_path / "traces" / f"rank-{rank}.json").read_text())
        names = {event.get("name") for event in trace["traceEvents"]}
        assert {"aten::mm", "c10d::_reduce_scatter_base_"} <= names

    store = loopback_store()
    for name, value in rank_environment(0, 1, store.port).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.argv", ["run_engine.py", *TINY])
    assert module(SCRIPT, monkeypatch).main() == 0
    alone = steps_of(capsys.readouterr().out)
    assert len(alone) == 3
    for step, wanted in zip(losses, alone, strict=True):
        assert step == pytest.approx(wanted, abs=2e-4)


def test_a_wrong_number_of_ranks_is_refused_by_a_message(monkeypatch, capsys):
    script = module(SCRIPT, monkeypatch)
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setattr(
        "sys.argv", ["run_engine.py", *TINY, "--trainer.parallelism.tensor_parallel_degree", "2"]
    )
    assert script.main() == 2
    said = capsys.readouterr().err
    assert "torchrun started 3 ranks" in said
    assert "--nproc-per-node 2" in said


def test_batches_are_of_the_configs_sizes(monkeypatch):
    script = module(SCRIPT, monkeypatch)
    _, config = script.parse_config(["--config", "quickstart"], program="test")
    batch = script.random_batch(config, seed=1)
    assert len(batch) == config.rollout.prompts_per_step * config.rollout.samples_per_prompt
    assert batch.lengths.min() >= 2
    assert batch.lengths.max() <= config.task.max_prompt_tokens + config.rollout.max_tokens
    assert len(set(batch.lengths.tolist())) > 10
    assert int(batch.lengths.sum()) == len(batch.tokens) == len(batch.loss_weights)
    assert 0 <= batch.tokens.min() <= batch.tokens.max() < config.model.vocab_size
    for weights in batch.loss_weights.split(batch.lengths.tolist()):
        assert weights.sum() == pytest.approx(1)  # grpo: every completion counts alike
        assert weights[0] == 0
        assert (weights > 0).tolist() == sorted((weights > 0).tolist())
