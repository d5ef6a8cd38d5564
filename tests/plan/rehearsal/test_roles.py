"""Every model of every kind of run is rehearsed with the batches and the loss that it trains on."""

import pytest

from rl.training.offloaded_optimizers import BUFFERS
from tests.kit.tables import long
from tests.plan.rehearsal.layouts import DENSE, EXPERTS
from tests.plan.rehearsal.rehearsals import is_known, planned_bytes, waits_of
from tests.plan.rehearsal.test_layouts import check_collectives

SMALL = DENSE.replace("n_layers 2", "n_layers 1")
CONFIGS = "tests.plan.rehearsal.configs"
PPO = f"--config {CONFIGS}.ppo --model.n_layers 1"
TRAINING = ["forward_backward 1", "optim_step 1", "forward_backward 2", "optim_step 2"]


@pytest.mark.long
@pytest.mark.parametrize("role", ["trainer", "critic", "reference"])
def test_the_models_of_an_rl_run(role, rehearsals):
    found = rehearsals.of(PPO, role=role)
    assert found["error"] is None
    done = [each["phase"] for each in found["phases"]]
    if role == "reference":
        assert done == ["init", "forward 1", "forward 2"]
    else:
        assert {*TRAINING} <= {*done}
        assert ("forward 1" in done) == (role == "critic")
    assert found["peak"] <= planned_bytes(found["planned"]) <= 1.15 * found["peak"]
    check_collectives(found)


@pytest.mark.long
@pytest.mark.parametrize("degrees", ["expert_parallel_degree 8", "expert_parallel_degree 1"])
def test_a_reference_of_experts_has_the_planned_memory(degrees, rehearsals):
    shards = "--reference.parallelism.data_parallel_shard_degree 16"
    uses = f"--algorithm.loss.kl_coef 0.1 --colocate models {shards}"
    layout = f"--reference.parallelism.{degrees} --trainer.compile.no-enable"
    found = rehearsals.of(f"{EXPERTS} {uses} {layout}", role="reference")
    assert found["error"] is None
    assert found["peak"] <= planned_bytes(found["planned"]) <= 1.15 * found["peak"]


@pytest.mark.parametrize(
    ("config", "role", "forward"),
    [
        long("sft_jsonl", "trainer", False),
        long("dpo_jsonl", "trainer", False),
        long("dpo_jsonl", "reference", True),
        (f"{CONFIGS}.kto", "trainer", True),
        long("reward_model_jsonl", "trainer", False),
    ],
)
def test_the_models_of_a_run_on_examples(config, role, forward, options, rehearsals):
    found = rehearsals.of(f"--config {config} {options}", role=role)
    assert found["error"] is None
    done = {each["phase"] for each in found["phases"]}
    assert ("forward 1" in done) == forward
    assert ({*TRAINING} <= done) == (role != "reference")


@pytest.mark.long
def test_models_that_share_devices_leave_them_for_the_planned_room_on_the_host(rehearsals):
    turns = "--colocate all --rollout.max_staleness 0"
    found = rehearsals.of(f"{SMALL} {turns} --generator.replicas 2")
    assert found["error"] is None
    phases = {each["phase"]: each for each in found["phases"]}
    assert phases["offload"]["after"] < 0.05 * phases["onload"]["after"]
    assert phases["offload"]["pinned"] == found["planned_on_host"]["offload buffers"]
    assert phases["onload"]["pinned"] == 0


@pytest.mark.long
def test_moments_on_the_host_leave_the_device_room_for_two_parts(rehearsals):
    found = rehearsals.of(f"{SMALL} --trainer.offload_optimizer")
    assert found["error"] is None
    planned = found["planned"]
    assert "optimizer states" not in planned
    assert found["kept"]["optimizer states"] == 0
    phases = {each["phase"]: each for each in found["phases"]}
    on_host = found["planned_on_host"]["optimizer states"]
    assert phases["optim_step 1"]["pinned"] == on_host >= 2 * planned["parameters"]
    assert phases["optim_step 2"]["pinned"] == 0
    part = 2 * 151_936 * 4096 * 4 // 8  # moments of the embedding on one of eight ranks
    last = phases["optim_step 2"]
    assert last["after"] <= 1.02 * planned["parameters"]
    needed = last["peak"] - last["after"] - planned["gradients"]
    assert needed == pytest.approx(BUFFERS * part, rel=0.01)
    assert found["peak"] <= planned_bytes(planned) <= 1.15 * found["peak"]
    assert [wait for wait in waits_of(found) if not is_known(wait)] == []
