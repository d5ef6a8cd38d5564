"""Checks of what vLLM and torchtitan refuse when they start, or silently do wrong."""

from collections.abc import Iterator

from rl.config import RLConfig, RunConfig
from rl.errors import ConfigError, counted, require, require_value
from rl.generation.generator_config import check_variables, kv_bytes_at_least
from rl.model.shape import shape_of
from rl.session.session_config import LEARNING
from rl.validation.values import check

ADAM_OPTIONS = (
    *("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize", "foreach", "fused"),
    *("capturable", "differentiable"),
)
OPTIMIZERS: dict[str, tuple[str, ...]] = {
    "Adam": (*ADAM_OPTIONS, "decoupled_weight_decay"),
    "AdamW": ADAM_OPTIONS,
    "DistMuon": (),
}
"""Options of a parameter group by optimizer; empty if they are not checked. torch keeps other
options in the group and ignores them."""
MAX_CUDA_HEAD_DIM = 256


def validate_optimizers(config: RunConfig) -> None:
    """Raise ConfigError, naming field, value and what is allowed, if an optimizer could not start
    or would ignore an option.
    """
    for model in config.models().values():
        if model.field not in LEARNING:
            continue
        optimizer = model.trainer.optimizer
        field = f"{model.field}.optimizer"
        groups = optimizer.param_groups
        rule = "one or more groups, as default_adamw(lr=...) has"
        require_value(bool(groups), f"{field}.param_groups", groups, rule)
        names = sorted({group.optimizer_name for group in groups})
        for name in optimizer.optimizer_factory_kwargs_by_name:
            rule = f"the optimizer_name of one of {field}.param_groups: {names}"
            place = f"{field}.optimizer_factory_kwargs_by_name"
            require(name in names, f"{place} has {name!r}", field=place, fix=f"it must be {rule}")
        for number, group in enumerate(groups):
            place = f"{field}.param_groups.{number}"
            name = group.optimizer_name
            rule = f"one of {', '.join(map(repr, OPTIMIZERS))}"
            require_value(name in OPTIMIZERS, f"{place}.optimizer_name", name, rule)
            fits = not model.trainer.offload_optimizer or name != "DistMuon"
            rule = "'Adam' or 'AdamW' with offload_optimizer=True"
            require_value(fits, f"{place}.optimizer_name", name, rule)
            options = OPTIMIZERS[name]
            for key in group.optimizer_kwargs:
                known = not options or key in options
                kwargs = f"{place}.optimizer_kwargs"
                fix = f"{name} takes {', '.join(options)}"
                require(known, f"{kwargs} has {key!r}", field=kwargs, fix=fix)


def long_warmups(config: RunConfig, updates: int) -> Iterator[ConfigError]:
    """Yield an error for each learning rate that warms up over all ``updates`` optimizer steps, if
    their number is known. A run starts all the same.
    """
    for role in config.models().values():
        warm = role.trainer.lr_scheduler.warmup_steps
        if role.field in LEARNING and warm >= updates > 0:
            field = f"{role.field}.lr_scheduler.warmup_steps"
            problem = (
                f"{field} is {warm}, and the run takes {counted(updates, 'optimizer step')}: the "
                "learning rate warms up over all of them, and a resume with more steps lowers it "
                "again"
            )
            yield ConfigError(problem, field=field, fix="lower it, or raise steps")


def validate_generator(config: RLConfig) -> None:
    """Raise ConfigError, naming field, value and what is allowed, if an engine could not start."""
    check_variables()
    cuda = config.hardware.kind == "cuda"
    generator = config.generator
    shape = shape_of(config.model)
    running = generator.max_running_requests
    batched = generator.max_batched_tokens
    rule = f"at least generator.max_running_requests={running}: each has a token in an engine step"
    check(config, "generator.max_batched_tokens", batched >= running, rule)
    size = generator.block_size
    unit, device = (16, "CUDA") if cuda else (32, "CPU")
    rule = f"None or a multiple of {unit}, as vLLM's attention needs on {device}"
    check(config, "generator.block_size", size is None or size % unit == 0, rule)
    if cuda:
        holds = shape.head_dim % 8 == 0 and shape.head_dim <= MAX_CUDA_HEAD_DIM
        rule = f"a multiple of 8 up to {MAX_CUDA_HEAD_DIM} for vLLM's attention on CUDA"
        require_value(holds, "model.head_dim", shape.head_dim, rule)
        return
    least = kv_bytes_at_least(generator, shape, cuda=False) / 2**30
    rule = f"at least {least:.6f}, for one sequence of model.max_seq_len={shape.max_seq_len}"
    check(config, "generator.kv_cache_gib", generator.kv_cache_gib >= least, rule)
