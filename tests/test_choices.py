"""Kinds of parts of the trainer, and messages about choices that cannot work (C5)."""

import re
from dataclasses import replace

import pytest
from torchtitan.components.lora import LoRAConverter
from torchtitan.components.quantization import Float8LinearConverter
from torchtitan.distributed.activation_checkpoint import FullAC, MemoryBudgetAC, SelectiveAC

from rl.algorithms.advantages import GAE
from rl.algorithms.losses import ClippedLoss, DistillationLoss
from rl.cli import find_config
from rl.config import RLConfig, RoleConfig
from rl.errors import ConfigError
from rl.training.config import ranks_of
from rl.validation import validate
from tests.config.command_line import parse

FRUGAL = f"{__name__}.frugal"


def frugal() -> RLConfig:
    """A config with choices of its own."""
    config = find_config("quickstart")()
    config.trainer.activation_checkpoint = FullAC.Config()
    config.trainer.float8 = Float8LinearConverter.Config(emulate=True)
    return config


# Choices between kinds of config, each with fields of its own.


@pytest.mark.parametrize(
    ("choice", "chosen"),
    [
        ("full", FullAC.Config()),
        ("selective", SelectiveAC.Config()),
        ("memory-budget", MemoryBudgetAC.Config()),
        ("none", None),
    ],
)
def test_activation_checkpointing_is_chosen_by_name(choice, chosen):
    config = parse(f"trainer.activation-checkpoint:{choice}", "--trainer.compile.enable")
    assert config.trainer.activation_checkpoint == chosen


def test_fields_may_stand_on_either_side_of_a_choice():
    config = parse(
        *(
            "--steps",
            "7",
            "trainer.activation_checkpoint:selective",
            "--trainer.activation_checkpoint.debug",
        ),
        *(
            "trainer.float8:linear",
            "--seed",
            "3",
            "--trainer.float8.emulate",
            "--trainer.float8.filter-fqns",
            "wo,w2",
        ),
    )
    assert (config.steps, config.seed) == (7, 3)
    assert config.trainer.activation_checkpoint == SelectiveAC.Config(debug=True)
    assert config.trainer.float8 == Float8LinearConverter.Config(
        emulate=True, filter_fqns=["wo", "w2"]
    )
    assert parse().trainer.float8 is None


def test_adapters_are_switched_on_by_name():
    config = parse(
        "trainer.lora:on", "--trainer.lora.rank", "4", "--trainer.lora.target-modules", "wqkv,w2"
    )
    assert config.trainer.lora == LoRAConverter.Config(rank=4, target_modules=["wqkv", "w2"])
    config = parse("trainer.lora:on", "--trainer.lora.target-modules", "wkv", "--model.no-fuse-qkv")
    assert config.trainer.lora == LoRAConverter.Config(target_modules=["wkv"])
    assert parse("trainer.lora:on").trainer.lora == LoRAConverter.Config()
    assert parse("trainer.lora:none").trainer.lora is None
    assert parse().trainer.lora is None


def test_a_part_chosen_on_the_command_line_has_its_own_fields():
    budget = [
        "trainer.activation-checkpoint:memory-budget",
        "--trainer.activation-checkpoint.memory-budget",
        "0.3",
    ]
    config = parse(*budget, "trainer.float8:none", "--trainer.compile.enable", config=FRUGAL)
    assert config.trainer.activation_checkpoint == MemoryBudgetAC.Config(memory_budget=0.3)
    assert config.trainer.float8 is None
    config = parse("--trainer.float8.filter-fqns", "wo", config=FRUGAL)
    assert config.trainer.float8 == Float8LinearConverter.Config(emulate=True, filter_fqns=["wo"])


# Experts and float8.


LORA = ["trainer.lora:on"]
MIXTURE = {"model.num_experts": 4, "model.experts_per_token": 2, "model.moe_hidden_dim": 20}
EP, DP, TP = (
    f"trainer.parallelism.{name}_degree"
    for name in ("expert_parallel", "data_parallel_shard", "tensor_parallel")
)


def parse_fields(fields: dict) -> RLConfig:
    return parse(
        *(f"--{name}" if value is None else f"--{name}={value}" for name, value in fields.items())
    )


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {EP: 2, DP: 2},
        {EP: 4, DP: 2, TP: 2},
        {EP: 2, TP: 2},
        {DP: 8, "model.moe_hidden_dim": 24},
        {"generator.tensor_parallel_degree": 2},
    ],
)
def test_experts_can_be_divided_in_many_ways(fields):
    assert parse_fields(MIXTURE | fields).model.num_experts == 4


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"model.experts_per_token": 0},
            "model.experts_per_token is 0; it must be between 1 and model.num_experts=4",
        ),
        (
            {"model.experts_per_token": 5},
            "model.experts_per_token is 5; it must be between 1 and model.num_experts=4",
        ),
        ({"model.moe_hidden_dim": 0}, "model.moe_hidden_dim is 0; it must be at least 1"),
        ({EP: 0}, rf"{EP} is 0; it must be at least 1"),
        (
            {EP: 2},
            (
                rf"{EP} is 2; .*data_parallel_shard\*context_parallel\*tensor_parallel=1: one "
                r"of \[1\]"
            ),
        ),
        (
            {EP: 3, DP: 3},
            rf"{EP} is 3; it must be a divisor of model.num_experts=4 .*=3: one of \[1\]",
        ),
        (
            {EP: 8, DP: 8},
            rf"{EP} is 8; it must be a divisor of model.num_experts=4 .*=8: one of \[1, 2, 4\]",
        ),
        (
            {TP: 2, "model.moe_hidden_dim": 21},
            rf"{TP} is 2; .*moe_hidden_dim=21: allowed are \[1\]",
        ),
        (
            {EP: 2, TP: 2, "trainer.parallelism.no_enable_sequence_parallel": None},
            "enable_sequence_parallel is False; it must be True where experts and tensors",
        ),
        (
            {DP: 8},
            (
                r"moe_hidden_dim is 20 .*more ranks \(8\) than experts \(4\) FSDP cuts both, so "
                r"the "
                r"8 shards"
            ),
        ),
        ({DP: 16, EP: 2}, "the 8 shards must divide them"),
    ],
)
def test_experts_are_refused_where_they_cannot_be_divided_as_asked(fields, message):
    with pytest.raises(ConfigError, match=message):
        parse_fields(MIXTURE | fields)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["trainer.float8:linear"],
            "trainer.float8.emulate is False; it must be True with .*='auto': .*SM89",
        ),
        (
            ["trainer.float8:linear", "--trainer.float8.emulate", "--trainer.compile.enable"],
            "trainer.float8.emulate is True; it must be False with trainer.compile.enable=True",
        ),
        (
            ["trainer.activation-checkpoint:memory-budget"],
            (
                "trainer.compile.enable is False; it must be True with "
                "trainer.activation_checkpoint=memory-budget: or choose selective"
            ),
        ),
        ([*LORA, "--trainer.lora.rank", "0"], "trainer.lora.rank is 0; it must be at least 1"),
        ([*LORA, "--trainer.lora.alpha", "0"], "trainer.lora.alpha is 0.0; it must be above 0"),
        (
            [*LORA, "--trainer.lora.target-modules", "wo,wq"],
            (
                r"target_modules is \['wo', 'wq'\]; .*some of \['wqkv', 'wo', 'w1', 'w2', 'w3'\] "
                r"with model.fuse_qkv=True"
            ),
        ),
        (
            [*LORA, "--trainer.lora.target-modules", "wqkv", "--model.no-fuse-qkv"],
            (
                r"target_modules is \['wqkv'\]; .*some of \['wq', 'wkv', .*'w3'\] with "
                r"model.fuse_qkv=False"
            ),
        ),
        (
            [*LORA, "trainer.float8:linear", "--trainer.float8.emulate"],
            "trainer.lora is LoRAConverter.Config; it must be None with .*float8",
        ),
        (
            [*LORA, *(f"--{name}={value}" for name, value in MIXTURE.items())],
            "trainer.lora is LoRAConverter.Config; .* model's 4 experts",
        ),
    ],
)
def test_ways_to_train_that_cannot_work_are_refused(arguments, message, monkeypatch):
    monkeypatch.setattr("rl.session.hardware.has_cuda_capability", lambda *_: False)
    with pytest.raises(ConfigError, match=message):
        parse(*arguments)


def test_a_gpu_of_the_right_kind_computes_in_float8_itself(monkeypatch):
    monkeypatch.setattr(
        "rl.session.hardware.has_cuda_capability", lambda major, minor: (major, minor) <= (8, 9)
    )
    assert not parse("trainer.float8:linear", "--trainer.compile.enable").trainer.float8.emulate


# Models beside the policy.


def background() -> RLConfig:
    """A policy with a teacher and a judge, a reference and a critic."""
    config = find_config("quickstart")()
    config.roles["teacher"] = RoleConfig(
        model=config.model, checkpoint="some/step-1", column="teacher_logprobs"
    )
    config.roles["judge"] = RoleConfig(
        model=config.model, checkpoint="some/step-2", head="values", reward_weight=1.0
    )
    config.algorithm.advantage = GAE.Config()
    config.algorithm.loss = DistillationLoss.Config(kl_coef=0.1)
    return config


@pytest.fixture
def checkpoints(tmp_path, monkeypatch):
    """Create the checkpoints that the roles name."""
    for step in ("step-1", "step-2"):
        (tmp_path / "some" / step).mkdir(parents=True)
        (tmp_path / "some" / step / ".metadata").touch()
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("checkpoints")
def test_models_beside_the_policy_have_layouts_of_their_own():
    parsed = parse(
        *(
            "--reference.parallelism.data_parallel_shard_degree",
            "2",
            "--critic.parallelism.tensor_parallel_degree",
            "2",
        ),
        *("--roles.teacher.parallelism.tensor_parallel_degree", "2"),
        config=f"{__name__}.background",
    )
    assert (
        ranks_of(parsed.reference.parallelism) == ranks_of(parsed.roles["teacher"].parallelism) == 2
    )


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            lambda c: setattr(c.reference.parallelism, "tensor_parallel_degree", 3),
            "reference.parallelism.tensor_parallel_degree is 3",
        ),
        (
            lambda c: setattr(c.critic.parallelism, "pipeline_parallel_degree", 2),
            "critic.parallelism.pipeline_parallel_degree is 2; it must be 1",
        ),
        (
            lambda c: setattr(c.roles["teacher"].parallelism, "tensor_parallel_degree", 3),
            "roles.teacher.parallelism.tensor_parallel_degree is 3",
        ),
        (
            lambda c: c.roles.update({"policy": c.roles["teacher"]}),
            ("roles: 'policy' cannot be the name of a role"),
        ),
        (
            lambda c: setattr(c.roles["judge"], "head", "logprobs"),
            ("roles.judge.reward_weight is 1.0; it must be"),
        ),
        (
            lambda c: setattr(c.roles["judge"], "checkpoint", None),
            ("roles.judge.checkpoint is None; it must be the folder of the weights"),
        ),
        (
            lambda c: setattr(c.roles["judge"], "checkpoint", "some/step-3"),
            "roles.judge.checkpoint is 'some/step-3'; it must be the folder of a complete",
        ),
        (
            lambda c: setattr(c.roles["teacher"], "model", replace(c.model, vocab_size=32)),
            "roles.teacher.model.vocab_size is 32; it must be that of the policy, 16",
        ),
        (
            lambda c: setattr(c.roles["teacher"], "model", replace(c.model, max_seq_len=8)),
            "roles.teacher.model.max_seq_len is 8; it must be at least 22",
        ),
        (
            lambda c: setattr(c.algorithm.loss, "kl_estimator", "k1"),
            "algorithm.loss.kl_estimator is 'k1'; it must be 'k2' or 'k3'",
        ),
        (
            lambda c: setattr(c.algorithm, "loss", ClippedLoss.Config(dual_clip=0.5)),
            "algorithm.loss.dual_clip is 0.5; it must be 0, or above 1",
        ),
        (
            lambda c: setattr(c.algorithm, "reward_kl_coef", 0.1),
            ("algorithm.reward_kl_coef is 0.1; it must be 0 with"),
        ),
        (
            lambda c: (
                setattr(c.rollout, "pipeline", "asynchronous")
                or setattr(c.rollout, "stream_chunks", 2)
            ),
            (
                "rollout.stream_chunks is 2; it must be 1 where a step has several updates or its "
                "advantages"
            ),
        ),
    ],
)
@pytest.mark.usefixtures("checkpoints")
def test_a_role_that_cannot_work_is_refused_by_name(edit, message):
    config = background()
    edit(config)
    with pytest.raises(ConfigError, match=re.escape(message)):
        validate(config)
