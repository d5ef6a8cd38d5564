"""What ``python -m rl.plan`` says, without starting anything, of configs that can work and of those
that cannot.
"""

import json
import os
import re
import subprocess
import sys
import textwrap

import pytest

from rl.cli import parse_config, shipped_configs
from rl.plan.__main__ import main
from rl.plan.plan import Plan

EIGHT = ("--trainer.parallelism.data_parallel_shard_degree", "8")
SHARED = (
    "--generator.replicas",
    "8",
    "--generator.gpu_memory_utilization",
    "0.95",
    *EIGHT,
)  # trainer and generators on the same eight GPUs
EIGHT_EXPERTS = (
    *("--model.num_experts", "8", "--model.experts_per_token", "2", "--model.moe_hidden_dim", "64"),
    *("--trainer.parallelism.data_parallel_shard_degree", "2"),
)


def planned(capsys, *arguments: str) -> tuple[int, dict]:
    code = main([*arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


# What cannot work: by a rule, or because it does not fit.

RULES = [
    (
        "quickstart",
        ("--trainer.parallelism.tensor_parallel_degree", "4"),
        r"tensor_parallel_degree is 4; .* \[1, 2\]",
    ),
    (
        "quickstart",
        ("--generator.tensor_parallel_degree", "3"),
        r"tensor_parallel_degree is 3; .*allowed are \[1, 2\]",
    ),
    (
        "quickstart",
        ("--task.max_prompt_tokens", "27"),
        "max_prompt_tokens=27 .* is 33; .* at most model.max_seq_len=32",
    ),
    (
        "quickstart",
        ("--task.max_prompt_tokens", "0"),
        "task.max_prompt_tokens is 0; it must be at least 1",
    ),
    (
        "quickstart",
        ("--trainer.micro_batch_tokens", "21"),
        "micro_batch_tokens is 21; it must be at least 22",
    ),
    (
        "quickstart",
        ("--algorithm.prompts_per_minibatch", "7"),
        "prompts_per_minibatch is 7; it must divide rollout.prompts_per_step=32",
    ),
    (
        "quickstart",
        ("--rollout.stream_chunks", "2"),
        "stream_chunks is 2; it must be 1 unless rollout.pipeline is",
    ),
    ("quickstart", ("--trainer.training.max_norm", "0"), "max_norm is 0.0; it must be above 0"),
    (
        "quickstart",
        ("--trainer.training.enable_cpu_offload",),
        "enable_cpu_offload is True; .* set colocate to 'models'",
    ),
    (
        "quickstart",
        ("--trainer.optimizer.param_groups.0.optimizer_name", "SGD"),
        "param_groups.0.optimizer_name is 'SGD'; torchtitan has 'Adam', 'AdamW', 'DistMuon'",
    ),
    (
        "quickstart",
        ("--generator.block_size", "16"),
        "block_size is 16; it must be None or a multiple of 32",
    ),
    (
        "quickstart",
        ("--generator.max_running_requests", "0"),
        "max_running_requests is 0; it must be at least 1",
    ),
    (
        "quickstart",
        ("--generator.max_batched_tokens", "64"),
        "max_batched_tokens is 64; it must be at least generator.max_running_requests=256",
    ),
    (
        "quickstart",
        ("--generator.kv_cache_gib", "1e-5"),
        "kv_cache_gib is 1e-05; .*0.000244, for one sequence of model",
    ),
    (
        "qwen3_8b",
        ("--generator.block_size", "24"),
        "block_size is 24; it must be None or a multiple of 16",
    ),
    (
        "qwen3_8b",
        ("--generator.gpu_memory_utilization", "1.5"),
        "gpu_memory_utilization is 1.5; it must be at most 1",
    ),
    (
        "qwen3_8b",
        ("--model.head_dim", "36"),
        "model.head_dim is 36; .* CUDA allows multiples of 8 up to 256",
    ),
    (
        "qwen3_8b",
        ("--trainer.nodes", "3"),
        r"trainer.nodes is 3; it must divide the trainer's 4 ranks: .*\[1, 2, 4\]",
    ),
    (
        "qwen3_8b",
        ("--colocate", "all"),
        "colocate is 'all'; it must be 'none' or 'models' unless rollout.max_stale",
    ),
    ("qwen3_8b", ("--deadlines.reward", "0"), "deadlines.reward is 0.0; it must be above 0"),
    (
        "qwen3_8b",
        ("--hardware.training_efficiency", "40"),
        "hardware.training_efficiency is 40.0; it must be at",
    ),
    (
        "qwen3_8b_2_nodes",
        ("--weights.transport", "shared_memory"),
        (
            "transport is 'shared_memory', which stays on one host; .*'auto', 'rdma' and "
            "'torchstore' are allowed"
        ),
    ),
    (
        "quickstart",
        (*EIGHT_EXPERTS, "--trainer.parallelism.expert_parallel_degree", "4"),
        (
            r"expert_parallel_degree is 4; it must divide model.num_experts=8 and .*=2: allowed "
            r"are "
            r"\[1, 2\]"
        ),
    ),
    ("quickstart", ("--seed", "two"), "Error parsing --seed: invalid literal"),
    ("quickstar", (), "did you mean quickstart"),
]

TOO_LARGE = [
    (
        "qwen3_8b",
        ("--trainer.parallelism.data_parallel_shard_degree", "2"),
        r"trainer rank 0 needs \d+\.\d GiB of the 79\.0 .*optimizer states, 30\.5 GiB on each "
        r"of 1 rank of trainer: "
        "set trainer.parallelism.data_parallel_shard_degree to 4",
    ),
    (
        "qwen3_8b",
        ("trainer.activation-checkpoint:none",),
        "activations.*: give trainer.activation-checkpoint:full",
    ),
    (
        "qwen3_8b",
        ("--trainer.micro_batch_tokens", "262144"),
        "largest item is activations.*: set trainer.micro_batch_tokens to 131072",
    ),
    (
        "qwen3_8b",
        ("--trainer.micro_batch_tokens", "65536", "--trainer.logits_mib", "40000"),
        "largest item is logits.*: set trainer.logits_mib to 20000",
    ),
    (
        "qwen3_0_6b",
        SHARED,
        r"GPU 0 of host 0: .* KV cache.*: set generator.gpu_memory_utilization to at most 0\.\d+",
    ),
    (
        "qwen3_14b",
        ("--generator.gpu_memory_utilization", "0.3"),
        (
            "gpu_memory_utilization is 0.3, which leaves 0.00 GiB .* set "
            "generator.tensor_parallel_degree to 2"
        ),
    ),
    (
        "qwen3_14b",
        ("--generator.gpu_memory_utilization", "0.395"),
        r"is 0.395, which leaves 0\.\d+ GiB .* one sequence of model.max_seq_len=4096 needs "
        r"0\.63 GiB: "
        r"set generator.gpu_memory_utilization to 0\.4",
    ),
    (
        "qwen3_8b",
        (
            *EIGHT,
            "--generator.nodes",
            "1",
            "--algorithm.loss.kl_coef",
            "0.1",
            "--hardware.memory_gib",
            "60",
        ),
        "reference rank 0 need .* of the 60.0 .*: set colocate to 'models', for one at a time",
    ),
    (
        "qwen3_8b",
        ("--hardware.host_memory_gib", "140"),
        "host 0: .*checkpoint staging, .*async_mode to 'disabled'",
    ),
    (
        "quickstart",
        ("--generator.kv_cache_gib", "10"),
        "generator-0 rank 0 needs .* of the 4.0 .*kv_cache_gib to at mo",
    ),
    (
        "quickstart",
        ("--hardware.memory_gib", "0.5"),
        "process, .*: set hardware.memory_gib to 0.9, if a rank has",
    ),
]


@pytest.mark.parametrize(("config", "arguments", "message"), RULES)
def test_what_cannot_work_is_refused_with_field_value_and_what_is_allowed(
    config, arguments, message, capsys
):
    code, said = planned(capsys, "--config", config, *arguments)
    assert (code, said["feasible"]) == (2, False)
    assert re.search(message, said["errors"][0])


@pytest.mark.parametrize(("config", "arguments", "message"), TOO_LARGE)
def test_what_does_not_fit_is_refused_and_whoever_does_what_is_advised_ends_with_what_fits(
    config, arguments, message, capsys
):
    given = list(arguments)
    code, said = planned(capsys, "--config", config, *given)
    assert (code, said["feasible"]) == (2, False)
    assert re.search(message, said["errors"][0])
    for _ in range(8):
        advice = said["errors"][0].rpartition(": ")[2].partition(", or ")[0]
        for field, value in re.findall(r"(?:set|and) ([\w.]+) to (?:at most )?'?([\w.]+)", advice):
            given += [f"--{field}", value]
        if "give" in advice:
            given = [*(g for g in given if "checkpoint:" not in g), advice.removeprefix("give ")]
        code, said = planned(capsys, "--config", config, *given)
        if code == 0:
            return
    pytest.fail(f"{given}: {said['errors']}")


# What can work.


# of parameters, all and active, as published; a token looks one row of an untied embedding up
BILLIONS = {
    "qwen3_0_6b": (0.596, 0.596),
    "qwen3_1_7b": (1.72, 1.72),
    "qwen3_8b": (8.19, 7.57),
    "qwen3_14b": (14.77, 13.99),
    "qwen3_30b_a3b": (30.53, 3.04),
}


@pytest.mark.parametrize("config", shipped_configs())
def test_shipped_configs_can_work_and_recipes_have_the_sizes_of_the_published_models(
    config, capsys
):
    code, said = planned(capsys, "--config", config)
    assert (code, said["feasible"], said["errors"]) == (0, True, [])
    assert said["kv_cache"]["sequences"] >= 1
    if config in BILLIONS:
        model = (said["model"]["parameters"] / 1e9, said["model"]["active_parameters"] / 1e9)
        assert model == pytest.approx(BILLIONS[config], rel=0.005)


def test_a_plan_says_where_each_rank_goes_and_what_it_pushes(capsys):
    _, said = planned(capsys, "--config", "qwen3_30b_a3b")
    trainer, first, *_, last = said["meshes"]
    assert trainer["degrees"] == {"dp_replicate": 1, "dp_shard": 16, "cp": 1, "tp": 1, "ep": 8}
    assert trainer["seats"] == [
        {"host": 0, "ranks": [*range(8)], "gpus": [*range(8)]},
        {"host": 1, "ranks": [*range(8, 16)], "gpus": [*range(8)]},
    ]
    assert first["seats"] == [{"host": 2, "ranks": [0, 1], "gpus": [0, 1]}]
    assert last["seats"] == [{"host": 3, "ranks": [0, 1], "gpus": [6, 7]}]
    assert (said["push"]["transport"], said["push"]["over_network"]) == ("rdma", True)
    read = said["push"]["per_reader"]
    assert sum(read) > 2 * said["model"]["parameters"]  # bfloat16, and what both ranks have
    assert said["push"]["total"] == 8 * sum(read)
    assert said["push"]["seconds"] == pytest.approx(
        max(*read, said["push"]["most_from_a_rank"]) / 50e9
    )


def test_models_that_take_turns_need_what_the_largest_needs(capsys):
    arguments = [
        "--config",
        "qwen3_8b",
        *EIGHT,
        "--generator.nodes",
        "1",
        "--algorithm.loss.kl_coef",
        "0.1",
    ]
    assert main([*arguments, "--colocate", "models"]) == 0
    assert "\n  trainer and reference share GPU 0 of host 0\n" in capsys.readouterr().out
    apart, in_turns = (
        Plan(parse_config([*arguments, "--colocate", colocate], program="plan")[1])
        for colocate in ("none", "models")
    )
    assert [memory.name for memory in apart.memories] == [
        memory.name for memory in in_turns.memories
    ]
    first = apart.memories[0]
    second = in_turns.memories[0]
    stays = sum(item.bytes for item in first.ranks[0].named("CUDA context", "RoPE tables"))
    largest = max(rank.total(on_host=False) for rank in first.ranks)
    assert second.used == largest + stays
    assert first.used == sum(rank.total(on_host=False) for rank in first.ranks)
    moved = in_turns.memories[-2].used - apart.memories[-2].used
    kept = ("parameters", "gradients", "optimizer states")
    assert moved == sum(
        item.bytes
        for rank in apart.ranks
        for item in rank.items
        if rank.host == 0 and item.name in kept
    )


def test_stages_that_run_side_by_side_take_the_longest(capsys):
    lockstep, pipelined = (
        planned(capsys, "--config", "qwen3_8b", "--rollout.max_staleness", staleness)[1]["step"]
        for staleness in ("0", "1")
    )
    stages = [lockstep[name] for name in ("generation", "training", "push")]
    assert lockstep["seconds"] == pytest.approx(sum(stages))
    assert pipelined["seconds"] == pytest.approx(max(stages))
    assert (
        pipelined["trainer_idle"] == 0 < pipelined["generators_idle"] < lockstep["generators_idle"]
    )


# The program.


def test_people_get_one_screen(capsys):
    assert main(["--config", "qwen3_8b"]) == 0
    text = capsys.readouterr().out
    assert len(text.splitlines()) <= 50 and max(map(len, text.splitlines())) <= 140
    for part in (
        "8.19 billion parameters",
        "dp_shard 4",
        "~ activations",
        "KV cache hold",
        "push by",
        "idle: trainer",
    ):
        assert part in text
    assert text.endswith("\nthis can work\n")


def test_people_are_told_what_cannot_work(capsys):
    assert main(["--config", "quickstart", "--generator.kv_cache_gib", "10"]) == 2
    assert "this cannot work\n  error: generator-0 rank 0 needs" in capsys.readouterr().out
    assert main(["--config", "quickstart", "--steps", "0"]) == 2
    assert capsys.readouterr().err == "error: steps is 0; it must be at least 1\n"


def test_the_program_starts_no_process_and_imports_no_engine():
    """``os.fork`` and all that goes through it, ``posix_spawn`` and ``subprocess``, are audited by
    Python itself.
    """
    program = """
        import sys
        started = []
        sys.addaudithook(lambda event, args: event in STARTS and started.append((event, args)))
        STARTS = ("os.fork", "os.forkpty", "os.posix_spawn", "os.exec", "os.system")
        STARTS += ("subprocess.Popen",)
        from rl.plan.__main__ import main
        code = main(["--config", "quickstart", "--json"])
        loaded = {name.partition(".")[0] for name in sys.modules}
        foreign = loaded & {"vllm", "monarch", "torchstore"}
        print(started, foreign, file=sys.stderr)
        sys.exit(code or bool(started or foreign))
    """
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ,
    )
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["feasible"]
