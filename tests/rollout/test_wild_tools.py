"""Tools that misbehave: the policy gets an error as the answer, or the episode is lost."""

import asyncio

import pytest

from rl.environments.protocol import MessageEnvironment, Opening
from rl.environments.tools import Tools
from rl.errors import GroupLost
from rl.rollout.episodes import Environments
from rl.types import Completion
from tests.kit import wild_tools as wild
from tests.kit.conversations import user
from tests.kit.tokenizers import qwen3

ANSWER = Completion.written(qwen3().encode("The answer is 42.<|im_end|>"))


def play(environments, prompt):
    """Return the tokens that follow the first answer, and the reward."""

    async def work():
        await environments.open(1, prompt, 0)
        turn = await environments.step(1, ANSWER)
        return turn.tokens, (await environments.step(1, ANSWER)).end.reward

    return asyncio.run(work())


@pytest.mark.parametrize("tool", wild.HARMLESS, ids=lambda tool: tool.__name__)
def test_a_tool_that_misbehaves_is_answered(model, tool, capfd):
    task = wild.WildTools.Config(step_s=200.0).build(seed=0, model=model)
    tokens, reward = play(Environments(task), task.prompt(wild.ALL.index(tool)))
    assert reward == len("The answer is 42.") % 3 / 2
    assert len(tokens) < 200
    assert tokens.count(qwen3().convert_tokens_to_ids("<|im_start|>")) == 2
    capfd.readouterr()


@pytest.mark.parametrize("tool", [wild.interrupts, wild.sleeps], ids=lambda tool: tool.__name__)
def test_a_tool_that_cannot_be_answered_costs_its_episode(model, tool):
    step_s = 0.3 if tool is wild.sleeps else 200.0
    task = wild.WildTools.Config(step_s=step_s).build(seed=0, model=model)
    environments = Environments(task)
    with pytest.raises(GroupLost) as lost:
        play(environments, task.prompt(wild.ALL.index(tool)))
    assert lost.value.reason == wild.LOST[tool]
    assert environments.hung == (tool is wild.sleeps), "closing waits for no call that hangs"


def test_half_of_a_surrogate_pair_is_shown_as_its_number():
    assert Tools([wild.half]).call("half", {}) == "half \\ud800"


class Broken(MessageEnvironment):
    def __init__(self, error):
        self.error = error

    def reset(self):
        return Opening([user("Go.")])

    def step(self, message):
        raise self.error


class BrokenLater(Broken):
    async def step(self, message):
        raise self.error


@pytest.mark.parametrize("number", range(4))
def test_an_exception_that_no_future_takes_costs_the_episode_at_once(model, number):
    class BrokenTask(wild.WildTools):
        def environment(self, prompt, sample):
            kind = (Broken, BrokenLater)[prompt.prompt_id // 2]
            return kind((StopIteration(), asyncio.CancelledError())[prompt.prompt_id % 2])

    task = BrokenTask(wild.WildTools.Config(step_s=60.0), seed=0, model=model)
    environments = Environments(task)
    with pytest.raises(GroupLost) as lost:
        play(environments, task.prompt(number))
    assert lost.value.reason == "environment raised"
    assert len(environments) == environments.hung == 0
