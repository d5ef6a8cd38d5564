"""Plans of runs whose rollouts are episodes count their turns, context and workers."""

import pytest

from rl.cli.arguments import find_config
from rl.plan.memory import GIB, WORKER_PROCESS, all_ranks
from rl.plan.plan import Plan, lacks_of, memories
from rl.plan.planned_run import PlannedRun
from rl.plan.report import describe
from rl.tasks.guessing_game import GuessingGame


def config_of(**task):
    config = find_config("quickstart")()
    config.model.max_seq_len = 512
    limits = {"max_prompt_tokens": 64, "max_episode_tokens": 256, "max_turns": 6}
    config.task = GuessingGame.Config(**limits | task)
    config.rollout.max_tokens = 32
    return config


def test_episodes_are_in_the_plan():
    config = config_of()
    config.rollout.reward_workers = 3
    plan = Plan(config)
    assert plan.as_json()["episodes"] == {
        "max_turns": 6,
        "max_tokens": 256,
        "max_tokens_of_a_turn": 32,
        "at_once": 256,
        "workers": 3,
    }
    assert plan.as_json()["kv_cache"]["longest_sequence_tokens"] == 256
    text = describe("games", plan)
    assert "up to 256 episodes at once, of at most 6 turns and 256 tokens, in 3 env" in text
    assert "mean episode 128 tokens, half of task.max_episode_tokens, of which 48 are" in text
    assert Plan(find_config("quickstart")()).as_json()["episodes"] is None


def test_a_context_is_what_the_kv_cache_has_to_hold():
    long = Plan(config_of(max_episode_tokens=512)).as_json()["kv_cache"]["sequences"]
    short = Plan(config_of(max_episode_tokens=128)).as_json()["kv_cache"]["sequences"]
    assert short == pytest.approx(4 * long, rel=0.01)


def test_more_turns_sample_more_tokens_and_compute_prefixes_again():
    few, many = (Plan(config_of(max_turns=turns)).step for turns in (2, 6))
    assert many.tokens == few.tokens  # the limit of all tokens is the same
    assert many.generation > few.generation
    config = config_of(max_turns=6)
    config.rollout.pipeline = "asynchronous"
    assert Plan(config).step.generation < many.generation


def test_each_worker_needs_memory_of_the_host():
    def host_of(config) -> int:
        """Return the bytes that the plan expects on the host."""
        setting = PlannedRun(config)
        return memories(setting, all_ranks(setting))[-1].used

    config = config_of()
    before = host_of(config)
    config.rollout.reward_workers += 4
    assert host_of(config) == before + 4 * WORKER_PROCESS
    config.hardware.host_memory_gib = (before + 3 * WORKER_PROCESS) / GIB
    setting = PlannedRun(config)
    (lack, *_) = lacks_of(setting, memories(setting, all_ranks(setting)))
    assert lack.field == "host 0"
    config.rollout.reward_workers = 0
    assert "in the controller's process" in describe("games", Plan(config))
