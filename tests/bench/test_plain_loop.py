"""Both sides of plain_loop.py train the models that it names."""

from dataclasses import asdict

import pytest

from configs.quickstart import quickstart
from tests.kit.scripts import module


@pytest.mark.parametrize("size", ["0.1m", "3m"])
def test_a_size_is_that_of_the_quickstart_or_of_the_benchmark_against_trl(monkeypatch, size):
    sizes = module("scripts/bench/plain_sizes.py", monkeypatch)
    config = quickstart()
    wanted = asdict(sizes.SIZES[size])
    lr = wanted.pop("lr")
    if size == "3m":
        model = module("scripts/bench/sft_work.py", monkeypatch).MODEL
    else:
        model = asdict(config.model)
        assert lr == config.trainer.optimizer.param_groups[0].optimizer_kwargs["lr"]
    assert {name: model[name] for name in wanted} == wanted
