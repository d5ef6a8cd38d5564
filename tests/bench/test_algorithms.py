"""The benchmark of algorithms: only those that solve the task count as solved."""

import pytest

from tests.kit.scripts import module

SCRIPT = "scripts/bench/algorithms.py"


def test_an_algorithm_has_solved_the_task_when_every_seed_has(monkeypatch, tmp_path):
    bench = module(SCRIPT, monkeypatch)
    ends = {("ppo", 0): 0.95, ("ppo", 1): 0.89, ("rloo", 0): 0.91, ("rloo", 1): 1.0}
    rise = [{"reward/mean": step / 100} for step in range(101)]

    def train(config: str, seed: int, *_):
        return rise, {"eval/exact_match": ends[config.partition(".")[2], seed]}

    monkeypatch.setattr(bench, "train", train)
    result = bench.compare(["ppo", "rloo"], 2, [], tmp_path)
    assert result["solved"] == ["rloo"]
    assert (
        result["algorithms"]["rloo"]["steps"] == 96
    )  # the mean of 0.86 to 0.95 is the first above 0.9
    bench.plot(result, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 0


@pytest.mark.parametrize("kind", ["ON_POLICY", "OFF_POLICY"])
def test_every_config_is_one_that_a_run_accepts(monkeypatch, kind):
    from rl.cli.arguments import parse_config

    for name in getattr(module(SCRIPT, monkeypatch), kind):
        parse_config(["--config", f"algorithm_configs.{name}"], program="rl.train")
