"""Checks of RL runs: sampling, the algorithm, the push of weights and other models."""

from collections.abc import Callable
from typing import Any

from rl.algorithms.advantages import GAE, ReinforcePlusPlus
from rl.config import PolicyGradientConfig, RLConfig
from rl.config.rollout import CurriculumConfig
from rl.errors import require, require_value
from rl.model.shape import shape_of
from rl.model.tokenizer import difference
from rl.validation.engines import validate_generator
from rl.validation.folders import RESERVED, validate_other_folders
from rl.validation.layouts import (
    validate_devices,
    validate_generator_layout,
    validate_lengths,
    validate_nodes,
)
from rl.validation.values import check
from rl.weights.transport import BETWEEN_HOSTS, NETWORKS, RELAYS

ENVIRONMENT = "unless the task is an environment"
RESERVED_ROLES = ("checkpoints", "generator", "policy", "reward", "trainer")


def _validate_sampling(config: RLConfig) -> None:
    """Check how many completions are sampled, and in which chunks they are trained on."""
    rollout = config.rollout
    holds = rollout.samples_per_prompt > 1 or rollout.max_resampled_groups == 0
    rule = "0 with rollout.samples_per_prompt=1"
    fix = "the rewards of every group are equal"
    check(config, "rollout.max_resampled_groups", holds, rule, fix)
    holds = rollout.pipeline == "deterministic" or not rollout.final_temperature
    fix = "its steps have no rollouts of their own"
    check(config, "rollout.final_temperature", holds, "0 in an asynchronous pipeline", fix)
    holds = rollout.max_resampled_groups > 0 and rollout.pipeline == "deterministic"
    rule = "1 without rollout.max_resampled_groups, and in an asynchronous pipeline"
    check(config, "rollout.oversampling", holds or rollout.oversampling == 1, rule)
    if not rollout.curriculum.prompts:
        for name in ("rule", "memory", "floor", "skip_solved", "skip_unsolved"):
            default = getattr(CurriculumConfig(), name)
            holds = getattr(rollout.curriculum, name) == default
            rule = f"{default!r} unless rollout.curriculum.prompts is above 0"
            check(config, f"rollout.curriculum.{name}", holds, rule)
    field = "rollout.stream_chunks"
    prompts = rollout.prompts_per_step
    holds = rollout.stream_chunks <= prompts
    check(config, field, holds, f"at most rollout.prompts_per_step={prompts}")
    if rollout.stream_chunks > 1:
        rule = "1 unless rollout.pipeline is 'asynchronous'"
        fix = "the order in which groups finish would change the numbers"
        check(config, field, rollout.pipeline == "asynchronous", rule, fix)
        holds = config.updates_per_step == 1 and config.algorithm.by_group
        rule = "1 where a step has several updates or its advantages are compared over all groups"
        check(config, field, holds, rule, "both need the whole batch")


def _validate_push(config: RLConfig) -> None:
    """Check that the transport can push weights as configured, and between the run's nodes."""
    transport = config.weights.transport
    local = transport not in ("auto", *NETWORKS)
    setting = f"weights.transport={transport!r}"
    check(config, "weights.delta", not (config.weights.delta and local), f"False with {setting}")
    serves = config.weights.fan_out == 1 or transport in ("auto", *RELAYS)
    fix = "only with 'collective' and 'tcp' readers serve each other"
    check(config, "weights.fan_out", serves, f"1 with {setting}", fix)
    rule = (
        f"{BETWEEN_HOSTS} with trainer.nodes={config.trainer.nodes} and "
        f"generator.nodes={config.generator.nodes}"
    )
    check(config, "weights.transport", config.nodes == 1 or not local, rule)


def _validate_algorithm(config: RLConfig) -> None:
    """Check the algorithm's own fields, and when it may share devices with generators."""
    config.algorithm.check(config.rollout)
    holds = config.colocate != "all" or config.rollout.max_staleness == 0
    rule = "'none' or 'models' unless rollout.max_staleness is 0"
    check(config, "colocate", holds, rule, "the devices are used in turns")


def _validate_episodes(config: RLConfig) -> None:
    """Check the fields that act on episodes of several turns."""
    algorithm = config.algorithm
    is_episodic = config.task.is_episodic
    least = config.rollout.min_episodes
    samples = config.rollout.samples_per_prompt
    field = "rollout.min_episodes"
    fix = "other tasks lose whole groups"
    check(config, field, is_episodic or least == 0, f"0 {ENVIRONMENT}", fix)
    rule = f"less than rollout.samples_per_prompt={samples}, or 0 to drop the group"
    check(config, field, least < samples or least == 0, rule)
    if not isinstance(algorithm, PolicyGradientConfig):
        return
    advantage = algorithm.advantage
    holds = least != 1 or not advantage.needs_group
    fix = "the advantage compares the rollouts of a prompt"
    check(config, field, holds, "0 or at least 2", fix)
    fix = "other rollouts have one turn"
    field = "algorithm.credit"
    by_turn = algorithm.credit == "turn"
    whole = algorithm.credit == "episode"
    check(config, field, is_episodic or whole, f"'episode' {ENVIRONMENT}", fix)
    name = type(advantage).__qualname__.removesuffix(".Config")
    rule = f"'episode' with algorithm.advantage={name}, which compares whole rollouts"
    check(config, field, advantage.by_token or not by_turn, rule)
    if isinstance(advantage, GAE.Config | ReinforcePlusPlus.Config):
        field = "algorithm.advantage.discount_per"
        by_token = advantage.discount_per == "token"
        check(config, field, is_episodic or by_token, f"'token' {ENVIRONMENT}", fix)
        rule = "'token' unless a discount is below 1"
        fix = "otherwise there is nothing to discount"
        check(config, field, advantage.has_discount or by_token, rule, fix)
    holds = not (is_episodic and algorithm.overlong_buffer)
    fix = "rollout.max_tokens limits one answer, not the rollout"
    rule = "0 if the task is an environment"
    check(config, "algorithm.overlong_buffer", holds, rule, fix)


def _validate_parity(config: RLConfig) -> None:
    """Check that the trainer can compute as the generators do, and with their experts."""
    field = "trainer.router_replay"
    free = config.trainer.router_replay == "none"
    rule = "'none' where model.num_experts is 0"
    check(config, field, free or shape_of(config.model).num_experts > 0, rule)
    rule = "'none' with generator.record_experts=False"
    check(config, field, free or config.generator.record_experts is not False, rule)
    config.session().check_parity()
    alarm = config.watchdog.parity
    holds = alarm is None or config.parity == "bitwise"
    check(config, "watchdog.parity", holds, "None unless parity is 'bitwise'")


def _validate_roles(config: RLConfig) -> None:
    """Check the names of other models, and that they take the policy's sequences."""
    vocabulary = shape_of(config.model).vocab_size
    longest = config.longest
    taken = (*RESERVED, *RESERVED_ROLES)
    for name, role in config.roles.items():
        field = f"roles.{name}"
        require(
            name.isidentifier() and name not in taken,
            f"{name!r} cannot be the name of a role",
            field="roles",
            fix=f"it must be an identifier other than {', '.join(taken)}",
        )
        shape = shape_of(role.model)
        size = shape.vocab_size
        rule = f"that of the policy, {vocabulary}"
        require_value(size == vocabulary, f"{field}.model.vocab_size", size, rule)
        room = shape.max_seq_len
        rule = f"at least {longest}, the longest prompt and completion"
        require_value(room >= longest, f"{field}.model.max_seq_len", room, rule)
        rule = f"0 unless {field}.head is 'values'"
        holds = role.reward_weight == 0 or role.head == "values"
        check(config, f"{field}.reward_weight", holds, rule)
        check(config, f"{field}.share", role.share == 1 or bool(role.column), "1 without a column")
        known = getattr(config.task, "tasks", {})
        rule = f"tasks of the mixture, {', '.join(known)}" if known else "empty without a mixture"
        check(config, f"{field}.tasks", known.keys() >= {*role.tasks}, rule)
        check(config, f"{field}.tasks", not role.tasks or bool(role.column), "empty without column")
        same_ids = ""
        if config.model.hf_path and role.model.hf_path:
            same_ids = difference(config.model.hf_path, role.model.hf_path)
        rule = (
            f"a model with the policy's tokenizer: it reads the ids of the policy, and {same_ids}"
        )
        require_value(not same_ids, f"{field}.model.hf_path", role.model.hf_path, rule)
    for column in {role.column for role in config.roles.values()} - {""}:
        roles = [role for role in config.roles.values() if role.column == column]
        left = {*getattr(config.task, "tasks", {})}.difference(*(role.tasks for role in roles))
        require(
            not left or not all(role.tasks for role in roles),
            f"roles: no model gives the column {column} for the task {min(left, default='')}",
        )


ROLLOUT_CHECKS: list[Callable[[Any], None]] = [
    *(validate_other_folders, validate_generator_layout, validate_nodes, validate_devices),
    *(validate_generator, validate_lengths, _validate_push, _validate_sampling),
    *(_validate_algorithm, _validate_episodes, _validate_parity, _validate_roles),
]
"""Checks of RL runs, beside those of all runs."""
