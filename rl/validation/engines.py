"""Checks for what vLLM and torchtitan refuse when their engines start, or silently do wrong."""

from collections.abc import Iterator
from typing import Any

from rl.config import RLConfig
from rl.errors import require
from rl.generation.config import kv_bytes_at_least
from rl.model.shape import shape_of
from rl.roles import roles_of
from rl.session.config import Role
from rl.training.config import TrainerConfig

OPTIMIZERS = ("Adam", "AdamW", "DistMuon")
MAX_CUDA_HEAD_DIM = 256


def validate_engines(config: RLConfig) -> None:
    """Raise ConfigError, naming field, value and what is allowed, where an engine could not start
    or would be wrong.
    """
    cuda = config.hardware.kind == "cuda"
    for role in roles_of(config).values():
        if role.field in ("trainer", "critic"):
            _validate_optimizer(role)
    _validate_training(config.trainer)
    _validate_generator(config, cuda=cuda)


def _validate_optimizer(role: Role) -> None:
    optimizer = role.trainer.optimizer
    field = f"{role.field}.optimizer"
    for number, group in enumerate(optimizer.param_groups):
        name = group.optimizer_name
        place = f"{field}.param_groups.{number}"
        require(
            name in OPTIMIZERS,
            f"{place}.optimizer_name is {name!r}; torchtitan has "
            f"{', '.join(map(repr, OPTIMIZERS))}",
        )
    require(
        bool(optimizer.param_groups),
        f"{field}.param_groups is empty; it must have one: default_adamw(lr=...)",
    )


def _validate_training(trainer: TrainerConfig) -> None:
    require(
        not trainer.training.enable_cpu_offload,
        "trainer.training.enable_cpu_offload is True; it must be False: set colocate to 'models' "
        "to have memory in turns, or data_parallel_shard_degree to more",
    )


def _validate_generator(config: RLConfig, *, cuda: bool) -> None:
    for name, value, allowed, holds in _generator_rules(config, cuda=cuda):
        require(holds, f"generator.{name} is {value}; {allowed}")


def _generator_rules(config: RLConfig, *, cuda: bool) -> Iterator[tuple[str, Any, str, bool]]:
    """Field, value, what is allowed, and whether it is so."""
    generator = config.generator
    shape = shape_of(config.model)
    running = generator.max_running_requests
    batched = generator.max_batched_tokens
    room = batched if cuda else max(batched, shape.max_seq_len)
    allowed = (
        f"it must be at least generator.max_running_requests={running}: each has a token in an "
        "engine step"
    )
    yield "max_batched_tokens", batched, allowed, room >= running
    size = generator.block_size
    unit = 16 if cuda else 32
    allowed = (
        f"it must be None or a multiple of {unit}, as vLLM's attention wants on "
        f"{'CUDA' if cuda else 'CPU'}"
    )
    yield "block_size", size, allowed, size is None or size % unit == 0
    if cuda:
        head_dim = shape.head_dim
        require(
            head_dim % 8 == 0 and head_dim <= MAX_CUDA_HEAD_DIM,
            f"model.head_dim is {head_dim}; vLLM's attention on CUDA allows multiples of 8 up to "
            f"{MAX_CUDA_HEAD_DIM}",
        )
        return
    minimum_gib = kv_bytes_at_least(generator, shape, cuda=False) / 2**30
    allowed = (
        f"it must be at least {minimum_gib:.6f}, for one sequence of "
        f"model.max_seq_len={shape.max_seq_len}"
    )
    yield "kv_cache_gib", generator.kv_cache_gib, allowed, generator.kv_cache_gib >= minimum_gib
