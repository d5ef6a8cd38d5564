"""``python -m rl.plan`` refuses configs whose run does not fit, with advice."""

import re

import pytest

from tests.kit.tables import cases
from tests.plan.programs import planned

FULL = "trainer.activation-checkpoint:full"
SHARDS = "--trainer.parallelism.data_parallel_shard_degree"
TOO_LARGE = {
    f"qwen3_8b {SHARDS} 1": r"trainer rank 0 needs \d+\.\d GiB of the 79\.0 .*optimizer states, "
    rf"61\.0 GiB on each of 1 rank of trainer; set {SHARDS[2:]} to 2",
    "qwen3_8b trainer.activation-checkpoint:none": "activations.*; give .*-checkpoint:full",
    f"qwen3_8b --trainer.micro_batch_tokens 262144 {FULL}": "activations.*; set .*_tokens to 1310",
    f"qwen3_8b --trainer.micro_batch_tokens 65536 --trainer.logits_mib 40000 {FULL}": "largest "
    "item is logits.*; set trainer.logits_mib to 20000",
    "qwen3_0_6b --generator.replicas 8 --generator.gpu_memory_utilization 0.95 "
    f"{SHARDS} 8": "meshes need 16 GPUs on a node, which has 8; set generator.nodes to 1, or",
    "qwen3_14b --generator.gpu_memory_utilization 0.3": "is 0.3, which leaves 0.00 GiB .* set "
    "generator.tensor_parallel_degree to 2",
    "qwen3_14b --generator.gpu_memory_utilization 0.393": r"is 0.393, which leaves 0\.\d+ GiB .*"
    r"max_seq_len=4096 needs 0\.63 GiB; set generator.gpu_memory_utilization to 0\.4",
    f"qwen3_8b {SHARDS} 8 --generator.nodes 1 --algorithm.loss.kl_coef 0.1 "
    "--hardware.memory_gib 60": "need 9 GPUs on a node, which has 8; set colocate to 'models', or",
    "qwen3_8b --hardware.host_memory_gib 140": "host 0: .*staging, .*async_mode to 'disabled'",
    "quickstart --hardware.memory_gib 4 --generator.kv_cache_gib 10": "generator-0 rank 0 needs .* "
    "of the 4.0 .*to at mo",
    "quickstart --hardware.memory_gib 0.5": "process, .*; set hardware.memory_gib to 0.9, if a",
}
AT_ONCE = [*TOO_LARGE][:4]
"""Rows for the default tests. Others are for the long tests."""


@pytest.mark.parametrize("arguments", cases(TOO_LARGE, AT_ONCE))
def test_a_run_that_does_not_fit_is_refused_and_its_advice_leads_to_one_that_fits(
    arguments, capsys
):
    def refusal(capsys, arguments: list[str]) -> str:
        """Return the first error of a plan that cannot work; empty for one that can."""
        code, plan = planned(capsys, "--config", *arguments)
        assert (code, plan["feasible"]) == ((2, False) if plan["errors"] else (0, True))
        return plan["errors"][0] if plan["errors"] else ""

    given = arguments.split()
    said = refusal(capsys, given)
    assert re.search(TOO_LARGE[arguments], said)
    for _ in range(8):
        advice = re.split(": |; ", said)[-1].partition(", or ")[0]
        for field, value in re.findall(r"(?:set|and) ([\w.]+) to (?:at most )?'?([\w.]+)", advice):
            last = [each for each in given if "checkpoint:" in each]
            given = [*(g for g in given if g not in last), f"--{field}", value, *last]
        if "give" in advice:
            given = [*(g for g in given if "checkpoint:" not in g), advice.removeprefix("give ")]
        said = refusal(capsys, given)
        if not said:
            return
    pytest.fail(f"{given}: {said}")
