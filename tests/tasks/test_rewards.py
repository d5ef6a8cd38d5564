"""Rewards of several functions: their sum, their metrics, and what is refused."""

import asyncio
import threading
from dataclasses import dataclass
from functools import partial

import pytest

import rl
from rl.errors import ConfigError, GroupLost
from rl.rollout.scoring import score_group
from rl.tasks.rewards import Rewards

PROMPT = rl.Prompt(prompt_id=0, tokens=[1], text="", answer="4")
COMPLETIONS = [rl.Completion.written([token]) for token in (4, 5)]


def right(prompt, text, completion):
    return text == prompt.answer


async def short(prompt, text, completion):
    await asyncio.sleep(0)
    return 1 / len(text)


def mean(prompt, text, completion):
    return 0.0


class Judged:
    rewards = Rewards([right, short], weights={"short": 0.5})

    def decode(self, tokens):
        return str(tokens[0])

    async def score(self, prompt, text, completion):
        return await self.rewards.score(prompt, text, completion)


def test_a_score_is_the_weighted_sum_and_has_each_value_as_a_metric():
    (_, first), (_, second) = score_group(Judged(), PROMPT, COMPLETIONS)
    assert (first.reward, first.correct) == (1.5, True)
    assert first.metrics == {"right": 1.0, "short": 1.0}
    assert (second.reward, second.correct) == (0.5, False)
    assert second.metrics == {"right": 0.0, "short": 1.0}


def test_functions_may_abstain_and_the_reward_does_if_all_of_them_do():
    def score(count):
        silent = lambda *_: None  # noqa: E731
        silent.__name__ = "silent"
        rewards = Rewards([silent, right, short][:count])
        return asyncio.run(rewards.score(PROMPT, "4", COMPLETIONS[0]))

    assert score(3).reward == 2.0
    assert score(3).metrics == {"right": 1.0, "short": 1.0}
    assert not score(3).correct  # the first function says what is right
    assert score(1).reward is None


@dataclass
class Longer:
    than: int

    def __call__(self, prompt, text, completion):
        return len(text) > self.than


class Later(Longer):
    async def __call__(self, prompt, text, completion):
        return 2.0


def test_partials_and_objects_are_rewards_by_the_name_of_their_function_or_class():
    named = Longer(9)
    named.__name__ = "very_long"
    rewards = Rewards([partial(right), Longer(0), Later(0), named], weights={"Longer": 0.5})
    score = asyncio.run(rewards.score(PROMPT, "4", COMPLETIONS[0]))
    assert score.metrics == {"right": 1.0, "Longer": 1.0, "Later": 2.0, "very_long": 0.0}
    assert score.reward == 3.5


async def test_plain_functions_run_in_threads_while_the_event_loop_runs():
    meeting = threading.Barrier(3)

    def one(prompt, text, completion):
        return meeting.wait(100) >= 0

    scored = [Rewards([one]).score(PROMPT, "4", COMPLETIONS[0]) for _ in range(2)]
    await asyncio.gather(*scored, asyncio.to_thread(meeting.wait, 100))


@pytest.mark.parametrize("error", [SystemExit("bye"), StopIteration()])
@pytest.mark.parametrize("is_async", [False, True])
def test_an_exception_that_no_future_takes_loses_the_group(error, is_async):
    def fail(prompt, text, completion):
        raise error

    async def fail_later(prompt, text, completion):
        raise error

    class Broken(Judged):
        rewards = Rewards([fail_later if is_async else fail])

    with pytest.raises(GroupLost, match=f"fail(_later)? raised {type(error).__name__}|coroutine"):
        score_group(Broken(), PROMPT, COMPLETIONS)


async def test_coroutine_functions_run_at_once():
    meeting = asyncio.Barrier(2)

    async def one(prompt, text, completion):
        await meeting.wait()
        return 1.0

    async def other(prompt, text, completion):
        await meeting.wait()
        return 2.0

    assert (await Rewards([one, other]).score(PROMPT, "4", COMPLETIONS[0])).reward == 3.0


def test_a_function_that_raises_or_returns_no_number_loses_the_group():
    class Broken(Judged):
        rewards = Rewards([lambda prompt, text, completion: "many"])

    with pytest.raises(GroupLost, match="the reward of Broken raised ValueError: .*'many'"):
        score_group(Broken(), PROMPT, COMPLETIONS)


@pytest.mark.parametrize(
    ("functions", "weights", "words"),
    [
        ([], {}, "no functions"),
        ([right, right], {}, "two rewards have the name 'right'"),
        ([mean], {}, "a reward has the name 'mean'"),
        ([right], {"rigth": 1.0}, "weights names 'rigth'; did you mean right"),
        ([right], {"right": float("nan")}, "the weight of right is nan; it must be finite"),
    ],
)
def test_rewards_that_cannot_work_are_refused(functions, weights, words):
    with pytest.raises(ConfigError, match=words):
        Rewards(functions, weights=weights)
