"""Configs that are refused, and settings that are hardly intended."""

import json
from types import SimpleNamespace

import pytest

from rl.cli.arguments import find_config
from rl.config import RoleConfig
from rl.config.frozen import frozen
from rl.doctor.__main__ import main
from rl.doctor.config import check_settings
from rl.host.cpu_speed import CpuSpeed
from rl.model.shape import ModelConfig
from rl.observe.events import Events
from rl.plan.plan import Plan
from rl.plan.report import describe
from rl.session import hardware
from rl.session.session import Session

DP = "--trainer.parallelism.data_parallel_shard_degree"
FINDINGS = {
    "--stpes 4": ("error", "--stpes", "there is no such field", "did you mean --steps"),
    "--steps many": ("error", "--steps", "many", "it must be a whole number"),
    "--rollout.max_tokens 600": (
        *("error", "task.max_prompt_tokens=16 + rollout.max_tokens=600", "is 616"),
        "at most model.max_seq_len=32",
    ),
    "--hardware.memory_gib 1": (
        *("error", "generator-0", r"needs .* of the 1\.0 that it has"),
        "set hardware.memory_gib to",
    ),
    "--trainer.optimizer.param_groups.0.optimizer_kwargs.lr 0": (
        *("warning", "trainer.optimizer", "learning rate is 0", "set lr"),
    ),
    "--steps 10": (
        "warning",
        "trainer.lr_scheduler.warmup_steps",
        "is 10, and the run takes 10",
        "lower it",
    ),
    "--generator.dtype bfloat16 --weights.canary_tolerance 0.001": (
        *("warning", "weights.canary_tolerance", "0.001 .* bfloat16", "0.5"),
    ),
    "--trainer.training.mixed_precision_param bfloat16": (
        *("warning", "weights.canary_tolerance", "0.001 .* bfloat16", "0.5"),
    ),
    "--rollout.max_staleness 2 --algorithm.old_logprobs recomputed": (
        *("warning", "algorithm.old_logprobs", "max_staleness=2", "TruncatedIS"),
    ),
    f"--rollout.prompts_per_step 1 --rollout.samples_per_prompt 2 {DP} 4": (
        *("warning", "trainer.parallelism", "4 data-parallel ranks share 2", "raise"),
    ),
    "--rollout.prompts_per_step 2 --generator.replicas 3": (
        *("warning", "generator.replicas", "is 3, and at most 2 groups", "lower it to 2"),
    ),
    f"--slurm.cpus_per_node 1 {DP} 2": (
        *("warning", "slurm.cpus_per_node", "is 1; .* 2 ranks", "set it to 4"),
    ),
    "--generator.nodes 1": ("warning", "trainer.nodes", "needs 2 nodes; .* has 1", "rl.launch"),
}


@pytest.mark.parametrize("arguments", FINDINGS)
def test_a_broken_config_has_its_finding(arguments, doctor, matches):
    expected = FINDINGS[arguments]
    code, found = doctor("--config", "quickstart", *arguments.split())
    assert code == (2 if expected[0] == "error" else 0)
    found = [each for each in found if each["where"] not in ("cores", "/dev/shm", "/etc/hosts")]
    matches(found, *expected)


def test_bfloat16_without_instructions_for_it_is_a_warning(monkeypatch, matches):
    config = find_config("quickstart")()
    config.generator.dtype = "bfloat16"
    meshes = SimpleNamespace(models=dict, generator=lambda number: None)
    for bfloat16, is_slow in ((0.08, False), (0.002, True)):
        speed = CpuSpeed(0.1, bfloat16, 10.0, 0.1)
        monkeypatch.setattr(hardware, "cpu_speed", lambda speed=speed: speed)
        found = [each for each in check_settings(config) if each.where == "generator.dtype"]
        assert bool(found) == is_slow
        assert ("warning: generator.dtype is" in describe("quickstart", Plan(config))) == is_slow
        said: list[dict] = []
        Session(config.session(), meshes=meshes, events=Events(said.append))
        assert ["generator.dtype is" in each["text"] for each in said] == [True] * is_slow
    matches(found, "warning", "generator.dtype", "take 50 times as long", "float32")


def test_each_fault_of_a_config_is_found(doctor):
    faults = ("--rollout.stream_chunks", "2", "--task.digits", "50", "--generator.block_size", "33")
    code, found = doctor("--config", "quickstart", *faults)
    assert code == 2
    places = [each["where"] for each in found]
    assert places == ["generator.block_size", "rollout.stream_chunks", "task.digits"]


def test_a_folder_that_nodes_do_not_share_is_found(doctor):
    folder = "/tmp/no_such_folder_of_a_run"
    _, found = doctor("--config", "quickstart", "--generator.nodes", "1", "--output-dir", folder)
    (shared,) = [each for each in found if each["where"] == "output_dir"]
    assert shared["severity"] == "warning" and "nodes do not share" in shared["what"]


def test_a_role_that_nothing_reads_is_found(matches):
    config = find_config("quickstart")()
    config.roles["teacher"] = RoleConfig(model=ModelConfig(), checkpoint="there")
    matches([*check_settings(config)], "warning", "roles.teacher", "nothing reads", "column")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--config", "quikstart"), ("--config quikstart", "no such config", "quickstart")),
        (("--config", "no_package.mine"), ("--config no_package.mine", "cannot import", "PYTHON")),
        (("--steps", "4"), ("command line", "--config NAME is missing", "folder of a run")),
    ],
)
def test_a_config_that_does_not_exist_is_found(arguments, expected, doctor, matches):
    code, found = doctor(*arguments)
    assert code == 2
    matches(found, "error", *expected)


def test_a_config_of_a_run_with_a_wrong_value_is_found(tmp_path, doctor, matches):
    path = tmp_path / "config.json"
    config = frozen(find_config("quickstart")()) | {"colocate": "some"}
    path.write_text(json.dumps({"name": "x", "config": config}))
    code, found = doctor("--config", path)
    assert code == 2
    matches(found, "error", "colocate", "is 'some'", "'none' or 'models' or 'all'")


def test_help_of_all_fields_is_printed_alone(capsys):
    with pytest.raises(SystemExit):
        main(["--config", "quickstart", "--help-all"])
    assert capsys.readouterr().out.startswith("usage: python -m rl.doctor --config quickstart")
