"""Fields in which two configs differ, and the effects of these changes."""

import json
from fnmatch import fnmatchcase

import pytest
from torchtitan.distributed.activation_checkpoint import FullAC, MemoryBudgetAC, SelectiveAC

from rl.algorithms.losses import CISPOLoss
from rl.cli.arguments import find_config, shipped_configs
from rl.config import RLConfig
from rl.config.frozen import frozen
from rl.plan.__main__ import main
from rl.plan.report import changes
from rl.types.rules import Fixed, rule_of
from rl.validation.values import values
from tests.kit.full_config import full_config, with_converters

PERFORMANCE = """
    model.attention model.max_seq_len rollout.stream_chunks rollout.reward_workers
    trainer.parallelism.* reference.parallelism.* critic.parallelism.* roles.teacher.parallelism.*
    trainer.compile.* trainer.activation_checkpoint* trainer.checkpoint.async_mode
    trainer.training.gc_freq trainer.debug.detect_anomaly trainer.debug.deterministic*
    trainer.nodes trainer.micro_batch_* trainer.packing trainer.logits_mib
    trainer.prompt_sharing trainer.zero_gradient trainer.tune_attention trainer.offload_optimizer
    generator.replicas generator.nodes generator.tensor_parallel_degree generator.expert_parallel
    generator.max_* generator.kv_cache_gib generator.gpu_memory_utilization generator.enforce_eager
    generator.block_size generator.prefix_caching generator.record_experts
    weights.transport weights.delta weights.fan_out hardware* slurm* kubernetes* colocate
    record.digests roles.teacher.model.attention roles.teacher.model.max_seq_len
"""
COSMETIC = """
    rollout.max_lost record record.rollouts record.sample record.max_gib
    trainer.max_skipped_steps trainer.comm.*
    trainer.checkpoint trainer.checkpoint.enable* trainer.checkpoint.folder
    trainer.checkpoint.interval trainer.checkpoint.keep_latest_k
    weights.digests weights.min_gb_s weights.canary_tolerance
    best.metric best.keep
    evaluation* watchdog* sinks* profile* deadlines deadlines.start deadlines.call
    deadlines.heartbeat deadlines.push max_restarts export_every output_dir resume quiet
"""
MIXED = [
    "",
    "trainer",
    *(f"trainer.{name}" for name in ("parallelism", "training", "compile", "comm", "debug")),
    *("reference", "reference.parallelism", "critic", "critic.parallelism", "generator", "weights"),
    "roles.teacher.parallelism",
]
"""Sections that declare no effect: each of their fields does."""


@pytest.fixture(params=[None, FullAC.Config, SelectiveAC.Config, MemoryBudgetAC.Config])
def complete(request, tmp_path) -> RLConfig:
    """Return a config in which every optional part is set."""
    config = with_converters(full_config(tmp_path))
    config.trainer.activation_checkpoint = request.param and request.param()
    config.roles["teacher"] = config.roles.pop("judge")
    return config


def test_every_field_has_the_pinned_effect(complete):
    def expected(name: str) -> str:
        """Return the effect of a field: the pinned ones, and "numerics" for all others."""
        for effect, patterns in (("performance", PERFORMANCE), ("cosmetic", COSMETIC)):
            if any(fnmatchcase(name, pattern) for pattern in patterns.split()):
                return effect
        return "numerics"

    fixed = tuple(value.name for value in values(complete) if rule_of(value.hint, Fixed))
    found = {
        value.name: value.effect
        for value in values(complete)
        if value.name not in MIXED and not value.name.startswith(fixed)
    }
    assert found == {name: expected(name) for name in found}


def test_every_field_of_the_shipped_configs_has_an_effect():
    for make in shipped_configs().values():
        bare = {value.name for value in values(make()) if value.effect is None}
        assert bare <= {*MIXED}, f"declare an effect at the fields {bare - {*MIXED}}"


def test_a_replaced_part_is_marked_by_the_effects_of_its_fields():
    before, after = find_config("quickstart")(), find_config("quickstart")()
    after.algorithm.loss = CISPOLoss.Config()
    after.trainer.activation_checkpoint = FullAC.Config()
    found = {change.change.partition(":")[0]: change.mark for change in changes(before, after)}
    assert found.pop("trainer.activation_checkpoint") == "performance"
    assert {"algorithm.loss.type", "algorithm.loss.dual_clip"} <= found.keys()
    assert {*found.values()} == {"numerics"}


def test_changes_of_numerics_come_first():
    before, after = find_config("quickstart")(), find_config("quickstart")()
    after.quiet = True
    after.trainer.packing = False
    after.seed = 1
    assert [(change.mark, change.change) for change in changes(before, after)] == [
        ("numerics", "seed: 0 → 1"),
        ("performance", "trainer.packing: True → False"),
        ("cosmetic", "quiet: False → True"),
    ]


def test_more_nodes_change_no_numerics(capsys):
    assert main(["--config", "qwen3_8b", "--diff", "qwen3_8b_2_nodes", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["changes"] and {change["mark"] for change in said["changes"]} == {"performance"}


def test_changes_are_printed_under_their_effect(capsys):
    assert main(["--config", "quickstart", "--seed", "3", "--diff", "quickstart"]) == 0
    assert capsys.readouterr().out == "quickstart → quickstart\n\nnumerics\n  seed: 3 → 0\n"
    assert main(["--config", "quickstart", "--diff", "quickstart"]) == 0
    assert capsys.readouterr().out == "quickstart and quickstart are the same\n"
    assert main(["--config", "quickstart", "--diff", "quickstar"]) == 2
    assert "did you mean quickstart or tool_quickstart?" in capsys.readouterr().err


def test_the_other_config_may_be_that_of_a_run(tmp_path, capsys):
    other = find_config("quickstart")()
    other.seed = 3
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"name": "quickstart", "config": frozen(other)}))
    assert main(["--config", "quickstart", "--diff", str(path)]) == 0
    assert capsys.readouterr().out.endswith("\n\nnumerics\n  seed: 0 → 3\n")


def test_help_has_one_usage(capsys):
    for arguments in (["--help"], ["--json", "--help"], ["-h"]):
        with pytest.raises(SystemExit):
            main(arguments)
        text = capsys.readouterr().out
        assert text.count("usage:") == 1
        for word in ("--diff OTHER", "--json", "GiB", "starts nothing", "exit codes:"):
            assert word in text
