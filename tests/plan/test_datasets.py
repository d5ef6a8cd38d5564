"""``python -m rl.plan`` plans runs that train on given examples: models, no generators, no push."""

import re
from dataclasses import replace

import pytest

from rl.algorithms.sequence_losses import KTOLoss
from rl.cli.arguments import find_config, parse_config
from rl.config import SampledEvaluationConfig
from rl.generation.generator_config import GeneratorConfig
from rl.plan.__main__ import main
from rl.plan.plan import Plan
from rl.plan.report import describe
from rl.tasks.copy_digits import CopyDigits
from tests.plan.programs import planned


@pytest.fixture
def options(chat_model):
    """Arguments that name a tiny model, and examples of 200 tokens."""
    model = ["--model.hf_path", str(chat_model), "--model.max_seq_len", "256"]
    return [*model, "--task.max_tokens", "200"]


def plan_of(name, options):
    return Plan(parse_config(["--config", name, *options], program="plan")[1])


@pytest.mark.parametrize(
    ("name", "meshes"),
    [
        ("sft_jsonl", ["trainer"]),
        ("dpo_jsonl", ["trainer", "reference"]),
        ("reward_model_jsonl", ["trainer"]),
    ],
)
def test_a_plan_has_the_models_of_the_trainer_and_no_generators(name, meshes, options, capsys):
    code, plan = planned(capsys, "--config", name, *options)
    assert (code, plan["feasible"], plan["errors"]) == (0, True, [])
    assert [mesh["name"] for mesh in plan["meshes"]] == meshes
    assert (plan["kv_cache"], plan["push"]) == (None, None)
    assert plan["step"]["seconds"] == plan["step"]["training"] > 0


def test_models_need_the_memory_of_their_parameters(options):
    policy, reference = plan_of("dpo_jsonl", options).ranks
    (reward_model,) = plan_of("reward_model_jsonl", options).ranks
    sizes = {item.name: item.bytes for item in policy.items}
    frozen = {item.name: item.bytes for item in reference.items}
    assert sizes["gradients"] == sizes["parameters"] == frozen["parameters"]
    assert sizes["optimizer states"] == 2 * sizes["parameters"]
    assert not {"gradients", "optimizer states", "push slots"} & {*frozen}
    assert "push slots" not in sizes
    assert "logits" not in {item.name for item in reward_model.items}


def test_a_step_computes_what_the_loss_asks_for(options):
    options = [*options, "--examples_per_step", "8"]
    names = ("sft_jsonl", "reward_model_jsonl", "dpo_jsonl")
    configs = [parse_config(["--config", name, *options], program="plan")[1] for name in names]
    sft, reward_model, dpo = (Plan(config).step for config in configs)
    kto = Plan(replace(configs[-1], loss=KTOLoss.Config())).step
    assert (sft.tokens, reward_model.tokens, dpo.tokens) == (800, 1600, 1600)
    # a forward pass of policy and reference beside each other, and a gradient of three times that;
    # the optimizer takes the rest
    assert dpo.training == pytest.approx(2 * sft.training * 4 / 3, rel=0.02)
    assert kto.training == pytest.approx(2 * sft.training * (1 / 3 + 1 / 2), rel=0.02)
    assert reward_model.training < dpo.training


def test_a_step_needs_no_reference_whose_scores_are_cached(options):
    wide = ["--trainer.parallelism.data_parallel_shard_degree", "4"]  # so the reference is slower
    computed, cached = (
        plan_of("dpo_jsonl", [*options, *wide, "--reference.scores", scores]).step.training
        for scores in ("computed", "cached")
    )
    assert cached == pytest.approx(computed * 3 / (4 + 3), rel=0.02)


def test_the_report_names_no_part_that_the_run_has_not(options, capsys):
    assert main(["--config", "dpo_jsonl", *options]) == 0
    report = capsys.readouterr().out
    assert "\n  reference      1 rank " in report
    assert "\nthis can work" in report
    assert not [word for word in ("KV cache", "push", "generat", "decoded") if word in report]


def test_generators_of_an_evaluation_are_planned(options):
    _, config = parse_config(["--config", "sft_jsonl", *options], program="plan")
    task = CopyDigits.Config(max_prompt_tokens=32)
    generator = GeneratorConfig(kv_cache_gib=3.5)
    config.evaluation = SampledEvaluationConfig(task=task, max_tokens=50, generator=generator)
    config.hardware.memory_gib = 2
    plan = Plan(config)
    assert [rank.mesh for rank in plan.ranks] == ["trainer", "generator-0"]
    assert plan.as_json()["kv_cache"]["longest_sequence_tokens"] == 32 + 50
    steps = (plan.step, Plan(replace(config, evaluation=None)).step)
    alone, beside = (replace(step, assumptions=()) for step in steps)
    assert alone == beside
    assert "evaluation.generator.kv_cache_gib to at most" in plan.errors[0]
    assert "step, ~" in describe("sft", plan)


@pytest.mark.parametrize(
    ("name", "field", "value", "said"),
    [
        ("sft_jsonl", "trainer.parallelism.tensor_parallel_degree", "3", "parallel_degree is 3"),
        ("dpo_jsonl", "hardware.memory_gib", "0.5", "reference rank 0 needs .*set hardware.memory"),
    ],
)
def test_a_run_that_cannot_work_is_refused_with_advice(name, field, value, said, options, capsys):
    code, plan = planned(capsys, "--config", name, *options, f"--{field}", value)
    assert (code, plan["feasible"]) == (2, False)
    assert re.search(said, "\n".join(plan["errors"]))


def test_configs_of_two_trainers_can_be_compared(options, capsys):
    for name, other in (("dpo_jsonl", "reward_model_jsonl"), ("sft_jsonl", "quickstart")):
        assert main(["--config", name, *options, "--diff", other]) == 0
        text = capsys.readouterr().out
        kinds = [type(find_config(each)()).__qualname__ for each in (name, other)]
        assert re.search(rf"\nnumerics\n(  .*\n)*  type: .*{kinds[0]} → .*{kinds[1]}\n", text)
