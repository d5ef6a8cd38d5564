"""Checks of a config: refusals, memory, machines, and settings that are worth a look."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rl.algorithms.losses import CrossEntropyLoss
from rl.config import PolicyGradientConfig, RLConfig, RunConfig
from rl.doctor.findings import Finding, refused, warning
from rl.errors import ConfigError
from rl.host.platform import device_type
from rl.plan.planned_run import LEARNING
from rl.validation.engines import long_warmups

BFLOAT16_NOISE = 0.05  # log-probs of trainer and generators differ by up to half of it


def check_config(config: RunConfig, made: Sequence[Callable[[Any], None]]) -> Iterator[Finding]:
    """Yield the first refusal of each of the checks of ``rl.validation`` in ``made``."""
    for check in made:
        try:
            check(config)
        except ConfigError as reason:
            yield refused("config", reason)


def check_settings(config: RunConfig) -> Iterator[Finding]:
    """Yield settings of a valid config that are hardly intended."""
    yield from _check_learning(config)
    for reason in config.session().slow_products():
        yield refused("config", reason, severity="warning")
    if isinstance(config, RLConfig):
        yield from _check_precision(config)
        yield from _check_staleness(config)
        yield from _check_shares(config)
        for name, role in config.roles.items():
            if not role.column and not role.reward_weight:
                what = "nothing reads the output of the model"
                fix = "set its column for the loss, or its reward_weight, or remove the role"
                yield warning("config", f"roles.{name}", what, fix)


def check_cluster(config: RunConfig, nodes: int) -> Iterator[Finding]:
    """Yield how the machines differ from those of a program that is started here, which has
    ``nodes`` nodes.
    """
    kind = config.hardware.kind
    if kind != device_type():
        what = f"the run computes on {kind}, this host on {device_type()}"
        fix = "start it by python -m rl.launch slurm, or give --hardware.device auto"
        yield warning("config", "hardware.device", what, fix)
    elif config.nodes > nodes:
        what = f"the run needs {config.nodes} nodes; a program that is started here has {nodes}"
        fix = "start it by python -m rl.launch, or give --trainer.nodes 1 --generator.nodes 0"
        yield warning("config", "trainer.nodes", what, fix)
    slurm = config.slurm
    ranks = sum(role.trainer.ranks for role in config.models().values()) // config.trainer.nodes
    if 0 < slurm.cpus_per_node < ranks:
        what = f"is {slurm.cpus_per_node}; a node of the trainer has {ranks} ranks"
        yield warning("config", "slurm.cpus_per_node", what, f"set it to {2 * ranks} or more")
    if slurm.gpus_per_node and slurm.gpus_per_node < config.hardware.gpus:
        what = f"is {slurm.gpus_per_node}; ranks are placed on {config.hardware.gpus} GPUs"
        fix = "set it to None, or hardware.gpus_per_node to the same"
        yield warning("config", "slurm.gpus_per_node", what, fix)
    if config.nodes > 1 and config.output_dir.startswith(("/tmp/", "/dev/shm/")):
        what = f"is {config.output_dir!r}, which nodes do not share"
        yield warning("config", "output_dir", what, "name a folder that all nodes see")


def _check_precision(config: RLConfig) -> Iterator[Finding]:
    training = config.trainer.training
    generated = config.generator.dtype
    limit = config.weights.canary_limit(generated)
    bfloat16 = "bfloat16" in (generated, training.mixed_precision_param, training.dtype)
    if bfloat16 and 0 < limit < BFLOAT16_NOISE:
        what = f"is {limit} with a model in bfloat16, whose log-probs differ by more: pushes fail"
        fix = "set it to 0.5, or trainer.training.mixed_precision_param and generator.dtype to "
        yield warning("config", "weights.canary_tolerance", what, f"{fix}'float32'")


def _check_learning(config: RunConfig) -> Iterator[Finding]:
    for reason in long_warmups(config, config.optimizer_steps or 0):
        yield refused("config", reason, severity="warning")
    for role in config.models().values():
        if role.field not in LEARNING:
            continue
        field = role.field
        rates = [g.optimizer_kwargs.get("lr") for g in role.trainer.optimizer.param_groups]
        if rates and not any(rates):
            what = "the learning rate is 0: the weights stay as they are"
            fix = "set lr in optimizer_kwargs of a group, as default_adamw(lr=1e-6) does"
            yield warning("config", f"{field}.optimizer", what, fix)


def _check_staleness(config: RLConfig) -> Iterator[Finding]:
    algorithm = config.algorithm
    if not isinstance(algorithm, PolicyGradientConfig):
        return
    if algorithm.corrections or algorithm.loss.needs_proximal:
        return
    stale = config.rollout.max_staleness
    fix = "choose DecoupledLoss, add TruncatedIS.Config() to algorithm.corrections, or set "
    fix += "rollout.max_staleness to 0"
    if stale and algorithm.recomputes:
        what = f"is 'recomputed' with rollout.max_staleness={stale}: no ratio corrects for it"
        yield warning("config", "algorithm.old_logprobs", what, f"set it to 'behaviour', {fix}")
    elif stale and isinstance(algorithm.loss, CrossEntropyLoss.Config):
        what = f"has no importance ratio, and rollout.max_staleness is {stale}"
        yield warning("config", "algorithm.loss", what, fix)


def _check_shares(config: RLConfig) -> Iterator[Finding]:
    rollout = config.rollout
    groups = rollout.prompts_per_step
    updates = config.algorithm.updates(groups) // config.algorithm.passes
    batch = groups * rollout.samples_per_prompt // max(1, updates)
    parts = config.trainer.dp_degree
    if parts > batch:
        what = f"{parts} data-parallel ranks share {batch} sequences per update: some have none"
        fix = "lower the data-parallel degrees, or raise rollout.prompts_per_step"
        yield warning("config", "trainer.parallelism", what, fix)
    running = groups * (1 + rollout.max_staleness)
    if config.generator.replicas > running:
        what = f"is {config.generator.replicas}, and at most {running} groups run at once"
        fix = f"lower it to {running}, or raise rollout.prompts_per_step"
        yield warning("config", "generator.replicas", what, fix)
