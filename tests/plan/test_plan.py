"""``python -m rl.plan`` plans configs that can work, without starting a process."""

import json
import re
import subprocess
import sys
import textwrap

import pytest

from rl.cli.arguments import parse_config, shipped_configs
from rl.config import RLConfig
from rl.plan.__main__ import main
from rl.plan.memory import CUDA_GRAPHS
from rl.plan.plan import Plan
from rl.weights.transport import RELAYS
from tests.kit.tables import cases
from tests.plan.programs import planned

# Billions of parameters, all and active, as published. A token uses one row of an untied embedding.
BILLIONS = {
    "qwen3_0_6b": (0.596, 0.596),
    "qwen3_1_7b": (1.72, 1.72),
    "qwen3_8b": (8.19, 7.57),
    "qwen3_14b": (14.77, 13.99),
    "qwen3_30b_a3b": (30.53, 3.04),
}


RL_CONFIGS = [
    name
    for name, make in shipped_configs().items()
    if isinstance(make(), RLConfig) and not make.__module__.endswith(".benchmarks")
]


@pytest.mark.parametrize("config", RL_CONFIGS)
def test_shipped_configs_can_work_and_have_the_sizes_of_the_published_models(config, capsys):
    code, plan = planned(capsys, "--config", config)
    assert (code, plan["feasible"], plan["errors"]) == (0, True, [])
    assert plan["kv_cache"]["sequences"] >= 1
    if config in BILLIONS:
        model = (plan["model"]["parameters"] / 1e9, plan["model"]["active_parameters"] / 1e9)
        assert model == pytest.approx(BILLIONS[config], rel=0.005)


SMALL = (
    "--config quickstart --model.family llama --model.vocab_size 49152 --model.dim 576 "
    "--model.n_layers 30 --model.n_heads 9 --model.n_kv_heads 3 --model.head_dim 64 "
    "--model.hidden_dim 1536 --model.max_seq_len 256 --rollout.max_tokens 96 "
    "--rollout.prompts_per_step 8 --trainer.micro_batch_size 8 --hardware.host_memory_gib 24"
)
"""A published model of 135 million parameters on a small host."""


@pytest.mark.parametrize("lora", ["", "trainer.lora:on"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_small_published_model_fits_on_a_host_of_24_gib(dtype, lora, capsys):
    dtypes = f"--trainer.training.mixed_precision_param {dtype} --generator.dtype {dtype}"
    code, plan = planned(capsys, *f"{SMALL} {dtypes} {lora}".split())
    assert (code, plan["errors"]) == (0, [])
    assert 134e6 < plan["model"]["parameters"] < 135e6
    (memory,) = (each for each in plan["memory"]["devices_and_hosts"] if "host" in each["name"])
    assert memory["used"] < memory["limit"] == 24 * 2**30


def test_a_plan_has_the_seat_of_each_rank_and_the_bytes_of_a_push(capsys):
    _, plan = planned(capsys, "--config", "qwen3_30b_a3b")
    trainer, first, *_, last = plan["meshes"]
    assert trainer["degrees"] == {"dp_replicate": 1, "dp_shard": 16, "cp": 1, "tp": 1, "ep": 8}
    assert trainer["seats"] == [
        {"host": 0, "ranks": [*range(8)], "gpus": [*range(8)]},
        {"host": 1, "ranks": [*range(8, 16)], "gpus": [*range(8)]},
    ]
    assert first["seats"] == [{"host": 2, "ranks": [0, 1], "gpus": [0, 1]}]
    assert last["seats"] == [{"host": 3, "ranks": [0, 1], "gpus": [6, 7]}]
    assert (plan["push"]["transport"], plan["push"]["over_network"]) == ("collective", True)
    read = plan["push"]["per_reader"]
    # bfloat16, and some weights are on both ranks
    assert sum(read) > 2 * plan["model"]["parameters"]
    assert plan["push"]["total"] == 8 * sum(read)
    fetched = max(*read, plan["push"]["most_from_a_rank"])
    assert plan["push"]["seconds"] == pytest.approx((fetched + max(read)) / 50e9)


PUSHES = {
    "shared_memory": {"publish": (1 / 4, 50), "pull": (1, 50)},
    "collective": {"fetch": (1, 50), "pull": (1, 50)},
    "tcp": {"publish": (1 / 4, 50), "fetch": (1, 50), "pull": (1, 50)},
    "rdma": {"publish": (1 / 4, 50), "fetch": (1, 50), "pull": (1, 50)},
    "cuda_ipc": {"pull": (1, 450)},
}
"""Stages of a push from four trainer ranks to four generators of a node: the share of the weights
that the busiest rank moves, and the GB/s of its link.
"""


def test_a_plan_has_the_time_of_a_push_by_each_transport(capsys):
    _, plan = planned(capsys, "--config", "qwen3_8b")
    pushes = {push["transport"]: push for push in plan["pushes"]}
    assert [*pushes] == [*PUSHES] and plan["push"] == plan["pushes"][0]
    weights = 2 * plan["model"]["parameters"]
    for name, push in pushes.items():
        stages = {each["what"]: each for each in push["stages"]}
        assert [*stages] == [*PUSHES[name]]
        for stage, (share, rate) in PUSHES[name].items():
            assert stages[stage]["bytes"] == pytest.approx(share * weights, rel=1e-3)
            assert stages[stage]["seconds"] == stages[stage]["bytes"] / (rate * 1e9)
        assert push["seconds"] == sum(each["seconds"] for each in push["stages"])
    assert main(["--config", "qwen3_8b"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"\n    cuda_ipc +15\.26 GiB, 36\.4 ms +36\.4 ms\n", text)


def test_a_plan_has_what_moves_when_devices_change_hands(capsys):
    turns = "--colocate all --rollout.max_staleness 0 --generator.enforce_eager"
    arguments = f"--config qwen3_8b {turns} --rollout.pipeline deterministic".split()
    _, plan = planned(capsys, *arguments)
    (turn,) = plan["turns"]
    # float32 weights and two moments on four ranks; gradients are gone then
    assert turn["bytes"] == pytest.approx(3 * 4 * plan["model"]["parameters"] / 4, rel=1e-3)
    assert (turn["what"], turn["seconds"]) == ("trainer", turn["bytes"] / 50e9)
    main(arguments)
    said = "when the devices change hands, a rank of trainer moves 22.88 GiB to its host in 491 ms"
    assert said in capsys.readouterr().out
    assert planned(capsys, "--config", "qwen3_8b")[1]["turns"] == []


def test_a_plan_has_the_size_of_recorded_experts(capsys):
    """48 layers of 8 experts in a byte each."""
    options = ("--config", "qwen3_30b_a3b", "--trainer.router_replay", "generator")
    _, plan = planned(capsys, *options)
    assert plan["record_bytes"] == 48 * 8
    names = [item["name"] for rank in plan["memory"]["ranks"] for item in rank["items"]]
    assert names.count("records of experts") == 16
    main([*options])
    assert "  records of experts: 384 bytes a token, at most " in capsys.readouterr().out


def test_colocated_models_need_the_memory_of_the_largest(capsys):
    options = "--trainer.parallelism.data_parallel_shard_degree 8 --generator.nodes 1"
    room = "--hardware.gpus_per_node 9"  # the reference has a GPU of its own unless it shares
    arguments = f"--config qwen3_8b {options} {room} --algorithm.loss.kl_coef 0.1".split()
    assert main([*arguments, "--colocate", "models"]) == 0
    assert "\n  trainer and reference share GPU 0 of host 0\n" in capsys.readouterr().out
    apart, in_turns = (
        Plan(parse_config([*arguments, "--colocate", colocate], program="plan")[1])
        for colocate in ("none", "models")
    )
    (trainer,) = apart.memories[0].ranks
    (reference,) = (rank for rank in apart.ranks if rank.role == "reference")
    assert (trainer.gpu, reference.gpu) == (0, 8)
    stays = sum(item.bytes for item in trainer.named("CUDA context", "RoPE tables"))
    largest = max(rank.total(on_host=False) for rank in (trainer, reference))
    assert in_turns.memories[0].used == largest + stays
    assert apart.memories[0].used == trainer.total(on_host=False)
    moved = in_turns.memories[-2].used - apart.memories[-2].used
    kept = ("parameters", "gradients", "optimizer states")
    least = sum(
        item.bytes
        for rank in apart.ranks
        for item in rank.items
        if rank.host == 0 and item.name in kept
    )
    assert least < moved < 2 * least  # pinned memory is rounded up to powers of two


def test_a_generator_leaves_its_graphs_on_the_gpu_in_the_turns_of_the_trainer():
    """A config of both is accepted. The trainer is the larger one."""
    turns = "--config qwen3_8b --rollout.max_staleness 0 --colocate all"
    arguments = f"{turns} --generator.gpu_memory_utilization 0.4".split()
    assert main(arguments) == 0
    eager, graphs = (
        Plan(parse_config([*arguments, f"--generator.{flag}"], program="plan")[1])
        for flag in ("enforce_eager", "no-enforce_eager")
    )
    assert graphs.memories[0].used - eager.memories[0].used == CUDA_GRAPHS


def test_parallel_stages_take_the_time_of_the_longest(capsys):
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


def test_groups_that_may_be_replaced_are_named(capsys):
    config = ["--config", "quickstart", "--rollout.prompts_per_step", "16"]
    said = "assumed: no replaced groups; all 32 make generation 3 times as long"
    assert main([*config, "--rollout.max_resampled_groups", "32"]) == 0
    assert said in capsys.readouterr().out
    assert main(config) == 0
    assert "replaced groups" not in capsys.readouterr().out


def test_a_shared_prompt_is_computed_once_and_its_logits_never():
    options = "--config quickstart --task.max_prompt_tokens 40 --model.max_seq_len 48"
    both = [options, f"{options} --trainer.prompt_sharing 8"]
    config, shared = (parse_config(each.split(), program="plan")[1] for each in both)
    shape = config.model
    head = 2 * shape.vocab_size * shape.dim
    tokens = config.sequences * 20
    completions = config.sequences * config.rollout.max_tokens / 2
    saved = (Plan(config).step.tflop - Plan(shared).step.tflop) * 1e12
    layers = saved / 3 / (tokens * 7 / 8)  # operations for a token
    whole = Plan(config).step.tflop * 1e12
    assert whole == pytest.approx(3 * ((tokens + completions) * layers + completions * head))


def test_the_report_fits_on_one_screen(capsys):
    assert main(["--config", "qwen3_8b"]) == 0
    text = capsys.readouterr().out
    assert len(text.splitlines()) <= 50 and max(map(len, text.splitlines())) <= 140
    for part in (
        "8.19 billion parameters",
        "dp_shard 4",
        "~ activations",
        "KV cache hold",
        "push by",
        "collectives: 30.51 GiB reduce-scatter, 29.35 GiB all-gather in a micro-batch; no waiting",
        "idle: trainer",
    ):
        assert part in text
    assert text.endswith("\nthis can work\n")


def test_errors_are_printed(capsys):
    limit = ["--hardware.memory_gib", "4"]
    assert main(["--config", "quickstart", "--generator.kv_cache_gib", "10", *limit]) == 2
    assert "this cannot work\n  error: generator-0 rank 0 needs" in capsys.readouterr().out
    assert main(["--config", "quickstart", "--steps", "0"]) == 2
    assert capsys.readouterr().err == "error: steps is 0; it must be at least 1\n"


def test_the_program_starts_no_process_and_imports_no_engine():
    """Python audits ``os.fork`` and its users, ``posix_spawn`` and ``subprocess``."""
    program = """
        import sys
        started = []
        sys.addaudithook(lambda event, args: starts(event, args) and started.append((event, args)))
        STARTS = ("os.fork", "os.forkpty", "os.posix_spawn", "os.exec", "os.system")
        STARTS += ("subprocess.Popen",)
        # Triton of a CUDA build looks for the driver's library with it
        starts = lambda event, args: event in STARTS and args[0] != "/sbin/ldconfig"
        from rl.plan.__main__ import main
        code = main(["--config", "quickstart", "--json"])
        loaded = {name.partition(".")[0] for name in sys.modules}
        foreign = loaded & {"vllm", "monarch", "torchstore"}
        print(started, foreign, file=sys.stderr)
        sys.exit(code or bool(started or foreign))
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["feasible"]


SLOWER = {
    "qwen3_8b --hardware.tflops 1": "training",
    "qwen3_8b --hardware.training_efficiency 0.1": "training",
    "qwen3_8b --hardware.memory_gb_s 1": "generation",
    "qwen3_8b --hardware.generation_efficiency 0.1": "generation",
    "qwen3_8b --generator.no-prefix_caching": "generation",
    "qwen3_8b_2_nodes --weights.transport auto --hardware.network_gb_s 1": "push",
    "qwen3_8b --weights.transport cuda_ipc --hardware.link_gb_s 1": "push",
}
"""Command lines whose last option makes a part of the step slower."""


@pytest.mark.parametrize("arguments", cases(SLOWER, [*SLOWER][:4:3]))
def test_slower_hardware_takes_longer(arguments, capsys):
    usual = arguments.partition(" --hardware")[0].removesuffix(" --generator.no-prefix_caching")
    before, after = (
        planned(capsys, "--config", *each.split())[1]["step"][SLOWER[arguments]]
        for each in (usual, arguments)
    )
    assert after > before


@pytest.mark.parametrize("relay", cases(RELAYS, ["tcp"]))
def test_hosts_of_generators_send_the_weights_on_to_each_other(relay, capsys):
    """Two hosts have four generators each."""
    given = ["--config", "qwen3_30b_a3b", "--weights.transport"]
    rdma, chain, wide = (
        planned(capsys, *given, *arguments)[1]["push"]
        for arguments in (["rdma"], [relay], [relay, "--weights.fan_out", "4"])
    )
    assert rdma["most_from_a_rank"] == 8 * chain["most_from_a_rank"]
    assert wide["most_from_a_rank"] == 2 * chain["most_from_a_rank"]
    fetch = next(each for each in chain["stages"] if each["what"] == "fetch")
    assert fetch["seconds"] == pytest.approx(max(chain["per_reader"]) / 50e9)
