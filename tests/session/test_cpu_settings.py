"""Numbers of CPU threads, and kernels of products on CPU, that ``auto`` becomes."""

import json
from dataclasses import replace

import pytest
from torchtitan.config import ParallelismConfig

from configs.quickstart import quickstart
from rl.config.frozen import frozen
from rl.generation.generator_config import GeneratorConfig
from rl.model.shape import ModelConfig
from rl.session import placement
from rl.session.placement import choose_cpu_settings
from rl.session.session_config import SessionConfig
from rl.trainers.rl import RLTrainer
from rl.trainers.run_folder import pin_cpu_settings

LARGE = ModelConfig(vocab_size=32, dim=512, n_layers=4, n_heads=8, n_kv_heads=8, hidden_dim=1536)

CASES = {
    "in lockstep each side has all cores": ({}, (8, 8)),
    "a tiny model keeps one": ({"model": quickstart().model}, (1, 1)),
    "ahead they divide them by their work": (
        {"rollout.max_staleness": 1, "rollout.max_tokens": 18},
        (6, 2),
    ),
    "more passes are more work": (
        {"rollout.max_staleness": 1, "rollout.max_tokens": 18, "algorithm.update_epochs": 3},
        (7, 1),
    ),
    "ranks divide those of their side": (
        {"trainer.parallelism": ParallelismConfig(data_parallel_shard_degree=2)},
        (4, 8),
    ),
    "generators too": ({"generator.replicas": 2, "generator.tensor_parallel_degree": 2}, (8, 2)),
    "hosts of their own are not divided": (
        {"rollout.max_staleness": 1, "generator.nodes": 1},
        (8, 8),
    ),
    "a frozen model counts for no rank": ({"algorithm.loss.kl_coef": 0.1}, (8, 8)),
    "a number stays": ({"trainer.threads": 3}, (3, 8)),
}


def config(**fields):
    made = quickstart()
    made.model = replace(LARGE)
    for name, value in fields.items():
        *path, last = name.split(".")
        section = made
        for each in path:
            section = getattr(section, each)
        setattr(section, last, value)
    return made


@pytest.mark.parametrize("case", CASES)
def test_threads_follow_from_the_host_and_the_work_of_the_sides(case, monkeypatch):
    fields, expected = CASES[case]
    monkeypatch.setattr(placement, "core_count", lambda: 8)
    made = config(**fields)
    choose_cpu_settings(made.session(), made.trainer_share)
    assert (made.trainer.threads, made.generator.threads) == expected
    assert {role.trainer.threads for role in made.models().values()} == {expected[0]}


@pytest.mark.parametrize("faster", ["mkl", "onednn"])
def test_the_faster_kernel_is_chosen_unless_bits_have_to_be_equal(faster, monkeypatch):
    monkeypatch.setattr(placement, "faster_kernel", lambda: faster)
    for fields, expected in (
        ({}, faster),
        ({"parity": "bitwise"}, "mkl"),
        ({"trainer.cpu_matmul": "onednn"}, "onednn"),
    ):
        made = config(**fields)
        choose_cpu_settings(made.session())
        assert made.trainer.cpu_matmul == expected


@pytest.mark.parametrize("saved", ["mkl", "onednn"])
def test_a_resumed_run_keeps_its_kernel(saved, tmp_path, monkeypatch):
    monkeypatch.setattr(placement, "faster_kernel", lambda: "mkl")
    before = quickstart()
    before.trainer.cpu_matmul = saved
    content = {"name": "a", "config": frozen(before)}
    (tmp_path / "config.json").write_text(json.dumps(content))
    again = config(resume=True, output_dir=str(tmp_path))
    pin_cpu_settings(again)
    assert again.trainer.cpu_matmul == saved


@pytest.mark.parametrize("saved", [{"threads": 5}, {"threads": 1}, {}])
def test_a_resumed_run_keeps_its_threads(saved, tmp_path, monkeypatch):
    monkeypatch.setattr(placement, "core_count", lambda: 8)
    before = frozen(quickstart())
    for name in ("trainer", "generator"):
        del before[name]["threads"]
        before[name] |= saved
    (tmp_path / "config.json").write_text(json.dumps({"name": "a", "config": before}))
    again = config(resume=True, output_dir=str(tmp_path))
    pin_cpu_settings(again)
    expected = saved.get("threads", 1)  # runs without the field had one thread
    assert (again.trainer.threads, again.generator.threads) == (expected, expected)


def test_the_config_of_a_run_has_the_threads_that_it_computes_with(tmp_path, monkeypatch):
    monkeypatch.setattr(placement, "core_count", lambda: 3)
    trainer = RLTrainer(config(output_dir=str(tmp_path / "run"), quiet=True))
    folder = trainer.run.claim()
    written = json.loads((folder.folder / "config.json").read_text())["config"]
    folder.release()
    chosen = trainer.session_config
    assert chosen.trainer.threads == written["trainer"]["threads"] == 3
    assert chosen.generator.threads == written["generator"]["threads"] == 3


def test_a_session_without_a_trainer_gives_its_cores_to_generators(monkeypatch):
    monkeypatch.setattr(placement, "core_count", lambda: 8)
    made = SessionConfig(model=LARGE, trainer=None, generator=GeneratorConfig(threads="auto"))
    choose_cpu_settings(made)
    assert made.generator.threads == 8
