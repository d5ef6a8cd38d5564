"""Checks of fields that act on episodes of several turns."""

from rl.algorithms.advantages import GAE, ReinforcePlusPlus
from rl.algorithms.policy_gradient import PolicyGradient
from rl.config import RLConfig
from rl.errors import require, require_value
from rl.tasks.environment import EnvironmentTask

ENVIRONMENT_OR_WHOLE = "unless the task is an environment: others lose whole groups"
ENVIRONMENT = "unless the task is an environment: other rollouts have one turn"


def validate_episodes(config: RLConfig) -> None:
    """Raise ConfigError, naming the field, if a field of episodes cannot act."""
    _validate_lost(config)
    algorithm = config.algorithm
    if not isinstance(algorithm, PolicyGradient.Config):
        return
    is_episodic = isinstance(config.task, EnvironmentTask.Config)
    advantage = algorithm.advantage
    name = type(advantage).__qualname__.removesuffix(".Config")
    credit = algorithm.credit
    by_turn = credit == "turn"
    require_value(
        is_episodic or not by_turn, "algorithm.credit", credit, f"'episode' {ENVIRONMENT}"
    )
    rule = f"'episode' with algorithm.advantage={name}, which compares whole rollouts"
    require_value(advantage.by_token or not by_turn, "algorithm.credit", credit, rule)
    if isinstance(advantage, GAE.Config | ReinforcePlusPlus.Config):
        field = "algorithm.advantage.discount_per"
        unit = advantage.discount_per
        rule = f"'token' {ENVIRONMENT}"
        require_value(is_episodic or unit == "token", field, unit, rule)
        rule = "'token' unless a discount is below 1: otherwise there is nothing to discount"
        require_value(advantage.has_discount or unit == "token", field, unit, rule)
    require(
        not (is_episodic and algorithm.overlong_buffer),
        f"algorithm.overlong_buffer is {algorithm.overlong_buffer}; it must be 0 if the task is an "
        "environment: rollout.max_tokens limits one answer, not the rollout",
    )


def _validate_lost(config: RLConfig) -> None:
    least = config.rollout.min_episodes
    samples = config.rollout.samples_per_prompt
    field = "rollout.min_episodes"
    is_episodic = isinstance(config.task, EnvironmentTask.Config)
    require_value(is_episodic or least == 0, field, least, f"0 {ENVIRONMENT_OR_WHOLE}")
    rule = f"less than rollout.samples_per_prompt={samples}, or 0 to drop the group"
    require_value(least < samples or least == 0, field, least, rule)
    algorithm = config.algorithm
    compares = isinstance(algorithm, PolicyGradient.Config) and algorithm.advantage.needs_group
    rule = "0 or at least 2: the advantage compares the rollouts of a prompt"
    require_value(least != 1 or not compares, field, least, rule)
