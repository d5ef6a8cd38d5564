"""Fields of episodes that cannot act are refused."""

import pytest

from rl.algorithms.advantages import GAE, GroupAdvantage, ReinforcePlusPlus
from rl.cli import find_config
from rl.errors import ConfigError
from rl.tasks.guessing_game import GuessingGame
from rl.validation import validate
from rl.validation.rollouts import validate_episodes


def config_of(task=None, **fields):
    config = find_config("quickstart")()
    config.task = task or config.task
    for name, value in fields.items():
        setattr(config.algorithm, name, value)
    return config


GAME = GuessingGame.Config()
BY_TURN = {"discount_per": "turn"}


@pytest.mark.parametrize(
    ("task", "fields", "message"),
    [
        (None, {"credit": "turn", "advantage": GAE.Config()}, "credit is 'turn'.*an environment"),
        (GAME, {"credit": "turn"}, "credit is 'turn'.*GroupAdvantage, which compares whole"),
        (None, {"advantage": GAE.Config(**BY_TURN)}, "discount_per is 'turn'.*an environment"),
        (
            GAME,
            {"advantage": GAE.Config(lam=1.0, **BY_TURN)},
            "discount_per is 'turn'.*nothing to discount",
        ),
        (
            GAME,
            {"advantage": ReinforcePlusPlus.Config(**BY_TURN)},
            "discount_per is 'turn'.*nothing to discount",
        ),
        (GAME, {"overlong_buffer": 2}, "overlong_buffer is 2; it must be 0 if the task is an"),
    ],
)
def test_credit_that_cannot_act_is_refused(task, fields, message):
    with pytest.raises(ConfigError, match=message):
        validate_episodes(config_of(task, **fields))


def test_every_run_is_checked():
    with pytest.raises(ConfigError, match="algorithm.credit is 'turn'"):
        validate(config_of(credit="turn"))


@pytest.mark.parametrize(
    "fields",
    [
        {"credit": "turn", "advantage": GAE.Config(lam=1.0)},
        {"credit": "turn", "advantage": ReinforcePlusPlus.Config(gamma=0.9, **BY_TURN)},
        {"advantage": GAE.Config(**BY_TURN)},
        {"advantage": GroupAdvantage.Config()},
    ],
)
def test_credit_of_turns_is_accepted(fields):
    validate_episodes(config_of(GAME, **fields))


@pytest.mark.parametrize(
    ("task", "advantage", "least", "message"),
    [
        (None, GroupAdvantage.Config(), 2, "min_episodes is 2; it must be 0 unless the task is"),
        (GAME, GroupAdvantage.Config(), 8, "is 8; it must be less than .*samples_per_prompt=8"),
        (GAME, GroupAdvantage.Config(), 1, "is 1; it must be 0 or at least 2: the advantage"),
        (GAME, GroupAdvantage.Config(), 2, None),
        (GAME, GAE.Config(), 1, None),
    ],
)
def test_a_group_that_goes_on_can_be_compared(task, advantage, least, message):
    config = config_of(task, advantage=advantage)
    config.rollout.min_episodes = least
    if message is None:
        validate_episodes(config)
        return
    with pytest.raises(ConfigError, match=message):
        validate_episodes(config)
