"""Checks of what vLLM and torchtitan refuse when they start, or silently do wrong."""

from rl.config import RLConfig, RunConfig
from rl.errors import require, require_value
from rl.generation.config import check_variables, kv_bytes_at_least
from rl.model.shape import shape_of
from rl.roles import roles_of
from rl.session.config import Role

OPTIMIZERS = ("Adam", "AdamW", "DistMuon")
MAX_CUDA_HEAD_DIM = 256


def validate_engines(config: RunConfig) -> None:
    """Raise ConfigError, naming field, value and what is allowed, if an engine could not start or
    would compute something wrong.
    """
    for role in roles_of(config).values():
        if role.field in ("trainer", "critic"):
            _validate_optimizer(role)
    require(
        not config.trainer.training.enable_cpu_offload,
        "trainer.training.enable_cpu_offload is True; it must be False: set colocate to 'models' "
        "to have memory in turns, or data_parallel_shard_degree to more",
    )
    if isinstance(config, RLConfig):
        _validate_generator(config)


def _validate_optimizer(role: Role) -> None:
    groups = role.trainer.optimizer.param_groups
    field = f"{role.field}.optimizer.param_groups"
    for number, group in enumerate(groups):
        name = group.optimizer_name
        have = ", ".join(map(repr, OPTIMIZERS))
        require(
            name in OPTIMIZERS,
            f"{field}.{number}.optimizer_name is {name!r}; torchtitan has {have}",
        )
    require(bool(groups), f"{field} is empty; it must have one: default_adamw(lr=...)")


def _validate_generator(config: RLConfig) -> None:
    check_variables()
    cuda = config.hardware.kind == "cuda"
    generator = config.generator
    shape = shape_of(config.model)
    running = generator.max_running_requests
    batched = generator.max_batched_tokens
    require_value(
        (batched if cuda else max(batched, shape.max_seq_len)) >= running,
        "generator.max_batched_tokens",
        batched,
        f"at least generator.max_running_requests={running}: each has a token in an engine step",
    )
    size = generator.block_size
    unit, device = (16, "CUDA") if cuda else (32, "CPU")
    rule = f"None or a multiple of {unit}, as vLLM's attention needs on {device}"
    require_value(size is None or size % unit == 0, "generator.block_size", size, rule)
    if cuda:
        require(
            shape.head_dim % 8 == 0 and shape.head_dim <= MAX_CUDA_HEAD_DIM,
            f"model.head_dim is {shape.head_dim}; vLLM's attention on CUDA allows multiples of 8 "
            f"up to {MAX_CUDA_HEAD_DIM}",
        )
        return
    cache = generator.kv_cache_gib
    least = kv_bytes_at_least(generator, shape, cuda=False) / 2**30
    rule = f"at least {least:.6f}, for one sequence of model.max_seq_len={shape.max_seq_len}"
    require_value(cache >= least, "generator.kv_cache_gib", cache, rule)
