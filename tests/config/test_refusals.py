"""Values that cannot work are refused by field, value and what is allowed (C5).

tests/validation refuses numbers out of their range.
"""

import re
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
from torchtitan.components.lora import LoRAConverter
from torchtitan.components.quantization import Float8LinearConverter
from torchtitan.distributed.activation_checkpoint import MemoryBudgetAC

from rl.algorithms.advantages import GAE, GroupAdvantage, LeaveOneOut, ReinforcePlusPlus
from rl.algorithms.losses import ClippedLoss, DistillationLoss
from rl.cli.arguments import find_config
from rl.config import RLConfig, RoleConfig
from rl.errors import ConfigError
from rl.tasks.guessing_game import GuessingGame
from rl.validation import validate
from rl.weights.transport import NETWORKS
from tests.kit.command_line import parse
from tests.kit.full_config import put
from tests.kit.tables import check_rows

EP, DP, TP, CP = (
    f"trainer.parallelism.{name}_degree"
    for name in ("expert_parallel", "data_parallel_shard", "tensor_parallel", "context_parallel")
)
BALANCER = "trainer.parallelism.context_parallel_load_balancer"
SEQUENCES = "trainer.parallelism.enable_sequence_parallel"
GPUS = {"hardware.device": "h100", "hardware.gpus_per_node": 8}
GRAPHS = {"generator.dtype": "bfloat16", "generator.enforce_eager": False}
EXPERTS = {"model.num_experts": 4, "model.moe_hidden_dim": 20}
MIXTURE = EXPERTS | {"model.experts_per_token": 2}
CLAMPED = MIXTURE | {"model.family": "gpt_oss"}
SHARING = {"trainer.prompt_sharing": 4}
VARLEN = {"model.attention": "varlen"}
LORA = LoRAConverter.Config
FLOAT8 = Float8LinearConverter.Config
EMULATED = {"trainer.float8": FLOAT8(emulate=True)}
FLOAT32 = {"trainer.training.mixed_precision_param": "float32"}
BFLOAT16 = {"trainer.training.mixed_precision_param": "bfloat16"}
BITWISE = {"parity": "bitwise"}
GROUPS = ReinforcePlusPlus.Config(baseline="group_mean")
COMPARING = (GroupAdvantage.Config(), LeaveOneOut.Config(), GROUPS)
ALONE = (GAE.Config(), ReinforcePlusPlus.Config())
ONE_SAMPLE = {"rollout.samples_per_prompt": 1}
GAME = {"task": GuessingGame.Config(max_prompt_tokens=16, max_episode_tokens=32)}
BY_TURN = {"discount_per": "turn"}
TURNS = {"algorithm.credit": "turn"}

Edits = dict[str, Any]

REFUSED: list[tuple[Edits, str]] = [
    ({"trainer.checkpoint.async_mode": "async_with_pinned_mem"}, "'disabled' or 'async' on CPU"),
    ({"trainer.micro_batch_tokens": 21}, "at least 22, the longest"),
    ({"trainer.dither": True}, "False for weights that come from no Hugging Face folder"),
    ({"trainer.nodes": 3}, r"a divisor of the trainer's 1 ranks: one of \[1\]"),
    ({"trainer.optimizer.param_groups.0.optimizer_name": "SGD"}, "one of 'Adam', 'AdamW'"),
    (
        {"trainer.offload_optimizer": True}
        | {"trainer.optimizer.param_groups.0.optimizer_name": "DistMuon"},
        "'Adam' or 'AdamW' with offload_optimizer=True",
    ),
    ({"generator.block_size": 16}, "None or a multiple of 32"),
    (GPUS | {"generator.block_size": 24}, "None or a multiple of 16"),
    ({"generator.max_batched_tokens": 64}, "at least generator.max_running_requests=256"),
    ({"generator.kv_cache_gib": 1e-5}, "at least 0.000061, for one sequence of"),
    (GPUS | {"model.head_dim": 36}, "a multiple of 8 up to 256 for vLLM's attention on CUDA"),
    ({"rollout.max_staleness": 1, "colocate": "all"}, "'none' or 'models' unless rollout.max_sta"),
    (
        {"generator.nodes": 1, "weights.transport": "shared_memory"},
        "'auto', 'tcp', .* with trainer.nodes=1 and generator.nodes=1",
    ),
    ({"trainer.packing": False} | SHARING, "1 with packing=False"),
    ({"rollout.oversampling": 2.0}, "1 without rollout.max_resampled_groups, and in an asyn"),
    (
        {"rollout.pipeline": "asynchronous", "rollout.final_temperature": 0.5},
        "0 in an asynchronous pipeline: its steps have no rollouts of their own",
    ),
    ({"rollout.stream_chunks": 2}, "1 unless rollout.pipeline is 'asynchronous'"),
    ({"algorithm.adaptive_kl.target": 0.1}, "0 unless algorithm.loss.kl_coef or"),
    ({"algorithm.overlong_buffer": 1000}, "at most rollout.max_tokens="),
    ({"trainer.balance.loss_coefficient": 0.1}, "0 for a model without experts"),
    ({"model.expert_bias": True}, "False without experts"),
    (MIXTURE | {"trainer.balance.bias_rate": 0.1}, "0 unless model.expert_bias=True"),
    (
        MIXTURE
        | {"trainer.training.dtype": "bfloat16", "model.expert_bias": True}
        | {"trainer.balance.bias_rate": 0.1},
        "0 unless trainer.training.dtype='float32'",
    ),
    ({"model.family": "olmo2", TP: 2}, "1 for the family 'olmo2', whose norms of queries and keys"),
    (
        {"model.family": "olmo3", "generator.tensor_parallel_degree": 2},
        "1 for the family 'olmo3', whose norms",
    ),
    ({"model.n_kv_heads": 3}, "a divisor of model.n_heads=2"),
    ({"model.head_dim": 48}, r"one of \[32, 64"),
    (VARLEN, "'auto' or 'dense' on CPU"),
    (GPUS | BFLOAT16 | {CP: 2} | VARLEN, ".*'auto' or 'flex' with .*context_parallel_degree=2"),
    (GPUS | SHARING | VARLEN, ".*'flex' with trainer.prompt_sharing=4"),
    (GPUS | FLOAT32 | VARLEN, ".*'flex' with .*, since it rounds to bf"),
    (GPUS | BFLOAT16 | CLAMPED | VARLEN, ".*'flex' with attention sinks"),
    ({CP: 2, BALANCER: "ptrr"}, "'headtail' on CPU"),
    ({"weights.transport": "cuda_ipc"}, "'auto', 'shared_memory', 'tcp', .* on CPU"),
    *(
        (GPUS | {"weights.transport": each, "weights.delta": True}, "False with weights.transport=")
        for each in ("shared_memory", "cuda_ipc")
    ),
    ({"weights.transport": "rdma", "weights.fan_out": 2}, "1 with weights.transport='rdma'"),
    ({"watchdog.entropy_min": 0.5, "watchdog.entropy_max": 0.4}, "0 or above entropy_min=0.5"),
    ({"profile.steps": (3, 201)}, "at most steps=200"),
    ({"profile.ranks": ("trainer[1]",)}, r"ranks of the run, of which the first is 'trainer\[0\]'"),
    ({"watchdog.drift": "warning"}, "'ignore' or 'warn' or 'fail'"),
    ({"slurm.time": "1h"}, "empty, or minutes, minutes:seconds, hours:minutes:seconds or"),
    *(
        (
            {"algorithm.advantage": each} | ONE_SAMPLE,
            f"at least 2 with .*advantage={type(each).__qualname__}, which compares the completion",
        )
        for each in COMPARING
    ),
    *(
        (
            ONE_SAMPLE | {"algorithm.advantage": each, "rollout.max_resampled_groups": 3},
            "0 with rollout.samples",
        )
        for each in ALONE
    ),
    # experts
    ({EP: 2}, "1 where model.num_experts is 0"),
    ({"generator.expert_parallel": True}, "False if model.num_experts"),
    ({"generator.record_experts": True}, "None or False with model.num_experts=0"),
    (
        MIXTURE | {"generator.expert_parallel": True, "generator.enforce_eager": False},
        "True with .*expert_parallel",
    ),
    (MIXTURE | GPUS | GRAPHS | {"generator.dtype": "float32"}, "True with experts and .*float32"),
    (MIXTURE | GPUS | {"hardware.device": "a100"} | GRAPHS, "True with experts on .* than H100"),
    (MIXTURE | {"trainer.compile.enable": True}, "False unless trainer.parallelism"),
    (EXPERTS | {"model.experts_per_token": 0}, "between 1 and model.num_experts=4"),
    (EXPERTS | {"model.experts_per_token": 5}, "between 1 and model.num_experts=4"),
    ({"model.num_experts": 4, "model.experts_per_token": 2, "model.moe_hidden_dim": 0}, "least 1"),
    (MIXTURE | {EP: 2}, r".*shard\*context_parallel\*tensor_parallel=1: one of \[1\]"),
    (MIXTURE | {DP: 3, EP: 3}, r"a divisor of model.num_experts=4 .*=3: one of \[1\]"),
    (MIXTURE | {DP: 8, EP: 8}, r"a divisor of model.num_experts=4 .*=8: one of \[1, 2, 4\]"),
    (MIXTURE | {EP: 2, TP: 2, SEQUENCES: False}, "True where experts and tensors"),
    ({"trainer.router_replay": "generator"}, "'none' where model.num_experts is 0"),
    (
        MIXTURE | {"generator.record_experts": False, "trainer.router_replay": "generator"},
        "'none' with generator.record_experts=False",
    ),
    # equal bits
    *(
        (BITWISE | edits, allowed)
        for edits, allowed in (
            ({TP: 2}, "1 with parity"),
            ({CP: 2}, "1 with parity"),
            (MIXTURE | {DP: 2, EP: 2}, "1 with parity"),
            ({"trainer.lora": LORA()}, "None with parity"),
            (EMULATED, "None with parity"),
            ({"trainer.compile.enable": True}, "False with parity"),
            ({"trainer.threads": 2}, "1 or 'auto' with parity"),
            ({"trainer.cpu_matmul": "onednn"}, "'auto' or 'mkl'"),
            (MIXTURE | {"trainer.router_replay": "generator"}, "'none' with parity"),
            ({"generator.tensor_parallel_degree": 2}, "1 with parity"),
            ({"generator.enforce_eager": False}, "True with parity"),
            ({"generator.threads": 2}, "1 or 'auto' with parity"),
            ({"generator.dtype": "bfloat16"}, "'float32' with parity"),
            ({"generator.inflight_policy": "continue"}, "'drain' or"),
            (GPUS | FLOAT32, "'bfloat16' with parity"),
            (GPUS | BFLOAT16 | SHARING, "1 with parity"),
            (GPUS | BFLOAT16 | {"trainer.tune_attention": True}, "False with parity"),
            (GPUS | BFLOAT16 | VARLEN, "'auto' or 'flex' with parity"),
        )
    ),
    ({"watchdog.parity": "fail"}, "None unless parity is 'bitwise'"),
    # ways to train
    ({"trainer.lora": LORA(), "trainer.lora.rank": 0}, "at least 1"),
    ({"trainer.lora": LORA(), "trainer.lora.alpha": 0.0}, "above 0"),
    (
        {"trainer.lora": LORA(), "trainer.lora.target_modules": ["wo", "wq"]},
        r".*some of \['wqkv', 'wo', 'w1', 'w2', 'w3'\] with model.fuse_qkv=True",
    ),
    (
        MIXTURE | {"trainer.lora": LORA(), "trainer.lora.target_modules": ["w1"]},
        r".*some of \['wqkv', 'wo', 'experts'\] with model.fuse_qkv=True",
    ),
    (
        {
            "model.fuse_qkv": False,
            "trainer.lora": LORA(),
            "trainer.lora.target_modules": ["wqkv"],
        },
        r".*some of \['wq', 'wkv', .*'w3'\] with model.fuse_qkv=False",
    ),
    (
        EMULATED | {"trainer.float8.recipe_name": "rowwise_with_gw_hp"},
        "'rowwise' with trainer.float8.emulate=True",
    ),
    ({"steps": 10, "trainer.lr_scheduler.total_steps": 9}, "None or at least the run's 10 opt"),
    # episodes
    ({"algorithm.advantage": GAE.Config()} | TURNS, "'episode' unless the task is an environment"),
    (GAME | TURNS, "'episode' with .*GroupAdvantage, which compares whole"),
    (GAME | {"algorithm.overlong_buffer": 2}, "0 if the task is an environment"),
    ({"rollout.min_episodes": 2}, "0 unless the task is an environment"),
    (GAME | {"rollout.min_episodes": 8}, "less than .*samples_per_prompt=8"),
    (GAME | {"rollout.min_episodes": 1}, "0 or at least 2: the advantage"),
]
"""Edits of a config, of which the last is refused, and what the message allows instead."""

OTHERWISE: list[tuple[Edits, str]] = [
    ({"algorithm.prompts_per_minibatch": 7}, "minibatch is 7; it must divide rollout.prompts_per_"),
    (
        {"task.max_prompt_tokens": 27},
        "task.max_prompt_tokens=27 .*rollout.max_tokens=6 is 33; .*at most model.max_seq_len=32",
    ),
    (BITWISE | GPUS | MIXTURE, "parity is 'bitwise'; it must be 'close' on GPUs .* with experts"),
    ({"model.hf_path": "/nowhere"}, "model.hf_path: there is no folder '/nowhere'; name one"),
    (
        {"generator.tensor_parallel_degree": 3},
        r"generator.tensor_parallel_degree is 3; .*n_heads=2.*allowed are \[1, 2\]",
    ),
    ({TP: 4}, rf"{TP} is 4; it must divide .*n_kv_heads=2.*allowed are \[1, 2\]"),
    ({"slurm.time": "5"}, "slurm.warn_s is 300; it must be less than slurm.time='5', which is 300"),
    (
        MIXTURE | {TP: 2, "model.moe_hidden_dim": 21},
        rf"{TP} is 2; .*moe_hidden_dim=21: allowed are \[1\]",
    ),
    (
        MIXTURE | {DP: 8},
        r"moe_hidden_dim is 20 .*more ranks \(8\) than experts \(4\) FSDP cuts both, so the 8 shar",
    ),
    (MIXTURE | {DP: 16, EP: 2}, "the 8 shards must divide them"),
    (
        {"trainer.float8": FLOAT8()},
        "trainer.float8.emulate is False; it must be True with .*='auto': .*SM89",
    ),
    (
        EMULATED | {"trainer.compile.enable": True},
        "trainer.float8.emulate is True; it must be False with trainer.compile.enable=True",
    ),
    (
        {"trainer.activation_checkpoint": MemoryBudgetAC.Config()},
        "trainer.compile.enable is False; it must be True with .*=memory-budget: or choose selecti",
    ),
    (
        EMULATED | {"trainer.lora": LORA()},
        "trainer.lora is LoRAConverter.Config; it must be None with .*float8",
    ),
    ({"algorithm.advantage": GAE.Config(**BY_TURN)}, "discount_per is 'turn'.*an environment"),
    *(
        (GAME | {"algorithm.advantage": each}, "discount_per is 'turn'.*nothing to discount")
        for each in (GAE.Config(lam=1.0, **BY_TURN), ReinforcePlusPlus.Config(**BY_TURN))
    ),
]
"""Edits of a config, and a message about another field or of another form."""

ACCEPTED: list[Edits] = [
    {},
    {CP: 2},
    SHARING,
    GPUS | BFLOAT16 | VARLEN,
    MIXTURE | GPUS | GRAPHS | {"generator.expert_parallel": True},
    *({"weights.delta": True, "weights.transport": each} for each in ("auto", *NETWORKS)),
    *({"weights.fan_out": 2, "weights.transport": each} for each in ("auto", "tcp")),
    {"weights.canary_tolerance": 0},
    *({"algorithm.advantage": each, "rollout.samples_per_prompt": 2} for each in COMPARING),
    *({"algorithm.advantage": each} | ONE_SAMPLE for each in ALONE),
    {"trainer.lr_scheduler.total_steps": 10, "steps": 10},
    EMULATED,
    MIXTURE,
    MIXTURE | {EP: 2, DP: 2},
    CLAMPED | SHARING | {CP: 2, TP: 2},
    MIXTURE | {EP: 2, DP: 2, "trainer.compile.enable": True},
    MIXTURE | {EP: 4, DP: 2, TP: 2},
    MIXTURE | {EP: 2, TP: 2},
    MIXTURE | {DP: 8, "model.moe_hidden_dim": 24},
    MIXTURE | {"generator.tensor_parallel_degree": 2},
    MIXTURE | {"generator.expert_parallel": True, "generator.record_experts": True},
    MIXTURE | {"trainer.lora": LORA(), "trainer.lora.target_modules": ["experts"]},
    GAME | {"rollout.min_episodes": 2},
    GAME | {"algorithm.advantage": GAE.Config(), "rollout.min_episodes": 1},
    GAME | {"algorithm.advantage": GAE.Config(lam=1.0)} | TURNS,
    GAME | {"algorithm.advantage": ReinforcePlusPlus.Config(gamma=0.9, **BY_TURN)} | TURNS,
    GAME | {"algorithm.advantage": GAE.Config(**BY_TURN)},
    GAME,
]
"""Edits with which a config can work."""


def edited(edits: Edits, config: RLConfig | None = None) -> RLConfig:
    """Return ``config``, by default the quickstart, with ``edits``."""
    config = config or find_config("quickstart")()
    for field, value in edits.items():
        put(config, field, deepcopy(value))
    return config


def check_refused(row: tuple[Edits, str]) -> None:
    """Check that the last of the edits is refused, and what is allowed."""
    edits, allowed = row
    field, value = [*edits.items()][-1]
    with pytest.raises(ConfigError, match=rf"^{field} is {re.escape(repr(value))}; .*{allowed}"):
        validate(edited(edits))


@pytest.fixture(autouse=True)
def _no_float8(monkeypatch):
    monkeypatch.setattr("rl.session.hardware.has_cuda_capability", lambda *_: False)


def test_a_value_that_cannot_work_is_refused_with_field_value_and_what_is_allowed():
    check_rows(REFUSED, check_refused)


def test_values_that_cannot_work_together_are_refused():
    def check(row: tuple[Edits, str]) -> None:
        with pytest.raises(ConfigError, match=row[1]):
            validate(edited(row[0]))

    check_rows(OTHERWISE, check)


def test_values_that_can_work_are_accepted():
    check_rows(ACCEPTED, lambda edits: validate(edited(edits)))


def test_a_gpu_host_must_have_as_many_as_the_config_needs():
    config = edited({"hardware.device": "h100", "hardware.gpus_per_node": 2, DP: 4})
    with pytest.raises(
        ConfigError, match="trainer.parallelism's degrees put 4 ranks on a node, which has 2 GPUs"
    ):
        validate(config)
    put(config, DP, 2)
    with pytest.raises(
        ConfigError, match="the meshes need 3 GPUs on a node, which has 2[:;] set generator.nodes"
    ):
        validate(config)
    config.generator.nodes = 1
    validate(config)


# Models beside the policy.


def background() -> RLConfig:
    """Return a policy with a teacher and a judge, a reference and a critic."""
    config = find_config("quickstart")()
    model = config.model
    teacher = RoleConfig(model=model, checkpoint="some/step-1", column="teacher_logprobs")
    judge = RoleConfig(model=model, checkpoint="some/step-2", head="values", reward_weight=1.0)
    config.roles |= {"teacher": teacher, "judge": judge}
    config.algorithm.advantage = GAE.Config()
    config.algorithm.loss = DistillationLoss.Config(kl_coef=0.1)
    return config


@pytest.fixture
def checkpoints(tmp_path, monkeypatch):
    """Make the checkpoints of the background."""
    for step in ("step-1", "step-2"):
        (tmp_path / "some" / step).mkdir(parents=True)
        (tmp_path / "some" / step / ".metadata").touch()
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("checkpoints")
def test_models_beside_the_policy_have_fields_on_the_command_line():
    names = ("reference", "critic", "roles.teacher")
    layouts = [f"--{name}.parallelism.tensor_parallel_degree=2" for name in names]
    config = parse(*layouts, config=f"{__name__}.background")
    sections = (config.reference, config.critic, config.roles["teacher"])
    assert [each.parallelism.tensor_parallel_degree for each in sections] == [2, 2, 2]


@pytest.mark.usefixtures("checkpoints")
def test_a_role_that_cannot_work_is_refused_by_name():
    model = background().model
    asynchronous = {"rollout.pipeline": "asynchronous"}
    rows: list[tuple[Edits, str]] = [
        ({"reference.parallelism.tensor_parallel_degree": 3}, "_degree is 3"),
        ({"critic.parallelism.pipeline_parallel_degree": 2}, "it must be 1"),
        ({"roles.teacher.parallelism.tensor_parallel_degree": 3}, "_degree is 3"),
        ({"roles.judge.checkpoint": None}, "it must be the folder of the weights"),
        ({"roles.judge.checkpoint": "some/step-3"}, "it must be the folder of a complete"),
        (
            {"roles.teacher.model": replace(model, vocab_size=32)},
            "it must be that of the policy, 16",
        ),
        ({"roles.teacher.model": replace(model, max_seq_len=8)}, "it must be at least 22"),
        ({"roles.judge.head": "logprobs"}, "roles.judge.reward_weight is 1.0; it must be"),
        (
            {"roles.policy": RoleConfig(model=model, checkpoint="some/step-1")},
            "roles: 'policy' cannot be the name of a",
        ),
        ({"algorithm.loss.kl_estimator": "k1"}, "it must be 'k2' or 'k3'"),
        ({"algorithm.loss": ClippedLoss.Config(dual_clip=0.5)}, "it must be 0, or above 1"),
        ({"algorithm.reward_kl_coef": 0.1}, "it must be 0 with"),
        (asynchronous | {"rollout.stream_chunks": 2}, "it must be 1 where a step has several upd"),
    ]

    def check(row: tuple[Edits, str]) -> None:
        edits, message = row
        with pytest.raises(ConfigError, match=message) as error:
            validate(edited(edits, background()))
        assert str(error.value).startswith(("roles", *edits))

    validate(background())
    check_rows(rows, check)
