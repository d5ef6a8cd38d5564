"""Fields of torchtitan's dataclasses act on the engine of a rank."""

import os
from contextlib import nullcontext

import pytest
import torch
import torch._functorch.config as functorch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer
from torchtitan.components.optimizer.optimizer import ParamGroupConfig
from torchtitan.components.quantization import Float8LinearConverter
from torchtitan.config import CommConfig, CompileConfig, DebugConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC, MemoryBudgetAC, SelectiveAC
from torchtitan.models.common.attention import FlexAttention, VarlenAttention

from rl.errors import ConfigError
from rl.training import attention as attention_module
from rl.training.attention import DenseAttention, attention_config
from rl.training.context import SequenceShard
from rl.training.engine import TrainingEngine
from rl.training.trainer_config import TrainerConfig, one_rank
from tests.kit.ranks import on_ranks
from tests.kit.scenes import TIED_FUSED


def cells_of(balancers: list[str | None]) -> list[list[int]]:
    """Return the cells of a row of eight that this rank of two computes, by balancer."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    masks = torch.ones(1, 1, 8, 8, dtype=torch.bool)
    row = torch.arange(8).view(1, 8)
    shards = [SequenceShard(mesh, balancer).shard(row, masks=masks) for balancer in balancers]
    return [mine.flatten().tolist() for (mine,), _ in shards]


def engine_of(folder: str, **fields) -> TrainingEngine:
    config = TrainerConfig(**fields)
    return TrainingEngine(config, TIED_FUSED, seed=0, steps=10, folder=folder)


def test_weights_have_the_dtype_of_the_config(folder):
    training = TrainingConfig(dtype="bfloat16", mixed_precision_param="bfloat16")
    engine = engine_of(folder, training=training)
    assert {each.dtype for each in engine.model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("kernel", ["onednn", "mkl"])
def test_products_are_of_the_kernel_of_the_config(folder, kernel):
    assert engine_of(folder, cpu_matmul=kernel).matmul == kernel


@pytest.mark.parametrize("kernel", ["onednn", "mkl"])
def test_an_engine_without_a_run_computes_with_the_faster_kernel(folder, kernel, monkeypatch):
    monkeypatch.setattr("rl.training.sharded_model.faster_kernel", lambda: kernel)
    assert engine_of(folder).matmul == kernel


@pytest.mark.parametrize("implementation", ["for-loop", "foreach", "fused"])
def test_the_optimizer_is_the_implementation_of_the_config(folder, implementation):
    options = {"lr": 1e-3, "eps": 1e-5}
    group = ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs=options)
    optimizer = OptimizersContainer.Config(param_groups=[group], implementation=implementation)
    engine = engine_of(folder, optimizer=optimizer)
    ((found,),) = [each.param_groups for each in engine.optimizers]
    kind = {name for name in ("foreach", "fused") if found[name]}
    assert kind == {implementation} - {"for-loop"}
    assert found["eps"] == 1e-5


def test_parameters_have_the_optimizer_and_options_of_the_first_pattern_that_they_match(folder):
    groups = [
        ParamGroupConfig(pattern="norm", optimizer_name="Adam", optimizer_kwargs={"lr": 0.5}),
        ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 0.25}),
    ]
    options = {"AdamW": {"amsgrad": True}}
    optimizer = OptimizersContainer.Config(
        param_groups=groups, optimizer_factory_kwargs_by_name=options
    )
    adam, adamw = engine_of(folder, optimizer=optimizer).optimizers
    for each, kind, lr, amsgrad in ((adam, "Adam", 0.5, False), (adamw, "AdamW", 0.25, True)):
        (group,) = each.param_groups
        assert (type(each).__name__, group["lr"], group["amsgrad"]) == (kind, lr, amsgrad)
        assert {"norm" in name for name in group["param_names"]} == {kind == "Adam"}


SCHEDULES = {
    "warmup": ({"warmup_steps": 2, "decay_ratio": 0.0}, [0.5, 1, 1, 1, 1]),
    "from the end of the warmup on": ({"warmup_steps": 0}, [1, 0.75, 0.5, 0.25, 0]),
    "share that decays": ({"warmup_steps": 0, "decay_ratio": 0.5}, [1, 1, 1, 0.5, 0]),
    "total": ({"warmup_steps": 0, "total_steps": 8}, [1, 0.875, 0.75, 0.625, 0.5]),
    "cosine": ({"warmup_steps": 0, "decay_type": "cosine"}, [1, 0.85, 0.5, 0.15, 0]),
    "least": ({"warmup_steps": 0, "min_lr_factor": 0.5}, [1, 0.875, 0.75, 0.625, 0.5]),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_schedule_is_that_of_the_config(name):
    fields, wanted = SCHEDULES[name]
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    config = LRSchedulersContainer.Config(**fields)
    schedule = config.build(optimizers=[optimizer], training_steps=4)
    rates = [optimizer.param_groups[0]["lr"]]
    for _ in wanted[1:]:
        optimizer.step()
        schedule.step()
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx(wanted, abs=0.005)


def test_activation_checkpointing_has_the_options_of_the_config(folder):
    config = FullAC.Config(preserve_rng_state=False, determinism_check="none", debug=True)
    layer = engine_of(folder, activation_checkpoint=config).model.layers["0"]
    given = {"preserve_rng_state": False, "determinism_check": "none", "debug": True}
    assert layer.checkpoint_fn.keywords.items() >= given.items()


def test_layers_to_recompute_are_looked_up_by_name(folder):
    config = SelectiveAC.Config(force_recompute_mm_shapes_by_fqns=["attention_norm"])
    with pytest.raises(ValueError, match="force_recompute_mm_shapes_by_fqns expected to match a"):
        engine_of(folder, activation_checkpoint=config)


def test_a_memory_budget_is_that_of_the_config(folder, tmp_path):
    with functorch.patch(activation_memory_budget=1.0, visualize_memory_budget_pareto=False):
        config = MemoryBudgetAC.Config(memory_budget=0.3, visualize_memory_budget_pareto=True)
        compiled = CompileConfig(enable=True)
        engine_of(folder, activation_checkpoint=config, compile=compiled)
        assert functorch.activation_memory_budget == 0.3
        assert functorch.visualize_memory_budget_pareto is True
        assert (tmp_path / "memory_budget_pareto").is_dir()


@pytest.mark.parametrize("enable", [True, False])
def test_the_backend_of_the_config_compiles_the_model(folder, enable):
    """torchtitan refuses the backend of the config, but only if it is to compile."""
    compiled = CompileConfig(enable=enable, backend="eager")
    expected = pytest.raises(ValueError, match="backend 'eager'") if enable else nullcontext()
    with expected:
        engine_of(folder, compile=compiled)


@pytest.mark.parametrize("policy", ["always", "never"])
def test_weights_are_sharded_again_after_a_forward_as_the_config_says(folder, policy):
    parallelism = one_rank()
    parallelism.fsdp_reshard_after_forward = policy
    engine = engine_of(folder, parallelism=parallelism)
    layer = engine.model.layers["0"]
    group = layer._get_fsdp_state()._fsdp_param_group
    assert (group.post_forward_mesh_info is not None) == (policy == "always")


def test_collectives_have_the_timeout_and_traces_of_the_config(folder, monkeypatch):
    if dist.is_initialized():
        dist.destroy_process_group()
    for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DUMP_ON_TIMEOUT"):
        monkeypatch.setenv(name, "")
    comm = CommConfig(init_timeout_seconds=77, trace_buf_size=9)
    comm.save_traces_folder = "traces"
    comm.save_traces_file_prefix = "rank-"
    engine_of(folder, comm=comm)
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    assert backend.options._timeout.total_seconds() == 77
    assert os.environ["TORCH_FR_BUFFER_SIZE"] == "9"
    assert os.environ["TORCH_FR_DUMP_TEMP_FILE"] == f"{folder}/traces/rank-"


def test_debugging_is_switched_on_by_the_config(folder):
    debug = DebugConfig(deterministic=True, deterministic_warn_only=True, detect_anomaly=True)
    try:
        engine_of(folder, debug=debug)
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled()
        assert torch.is_anomaly_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
        torch.autograd.set_detect_anomaly(False)
    engine_of(folder)
    assert not torch.are_deterministic_algorithms_enabled()


BALANCERS = ["headtail", None]
"""Values of ``context_parallel_load_balancer``."""


def test_context_parallel_load_balancer_deals_the_cells():
    assert on_ranks(2, cells_of, BALANCERS) == [
        [[0, 1, 6, 7], [0, 1, 2, 3]],
        [[2, 3, 4, 5], [4, 5, 6, 7]],
    ]


def test_attention_is_of_the_kind_of_the_config():
    for attention in ("auto", "dense"):
        config = attention_config(attention, context_parallel=False)
        assert isinstance(config, DenseAttention.Config)
    for attention in ("flex", "varlen"):
        with pytest.raises(ConfigError, match=f"model.attention is '{attention}', which needs"):
            attention_config(attention, context_parallel=False)


@pytest.mark.parametrize(
    ("needed", "installed", "kind"),
    [
        (None, [], VarlenAttention),
        ("FA3", [], FlexAttention),
        ("FA4", [], FlexAttention),
        ("FA3", ["flash_attn_interface"], VarlenAttention),
        ("FA4", ["flash_attn"], FlexAttention),  # FlashAttention 2
        ("FA4", ["flash_attn", "flash_attn.cute"], VarlenAttention),
    ],
)
def test_auto_attention_on_a_gpu_is_one_that_is_installed(monkeypatch, needed, installed, kind):
    monkeypatch.setattr(attention_module, "device_type", lambda: "cuda")
    monkeypatch.setattr(attention_module, "get_cuda_flash_attention_impl", lambda: needed)
    monkeypatch.setattr(attention_module, "find_spec", lambda name: name in installed or None)
    assert isinstance(attention_config("auto", context_parallel=False), kind.Config)
    assert isinstance(attention_config("auto", context_parallel=True), FlexAttention.Config)
    assert isinstance(attention_config("auto", float32=True), FlexAttention.Config)
    assert isinstance(attention_config("auto", bitwise=True), FlexAttention.Config)


def test_float8_has_the_recipe_of_the_config(monkeypatch):
    monkeypatch.setattr(
        "torchtitan.components.quantization.float8.has_cuda_capability", lambda *_: True
    )
    recipes = [
        Float8LinearConverter.Config(recipe_name=name).build().torchao_config
        for name in ("rowwise", "rowwise_with_gw_hp")
    ]
    assert recipes[0] != recipes[1]
