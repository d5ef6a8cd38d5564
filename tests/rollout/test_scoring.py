"""A reward that is of no use is refused with its input, whatever the user's code did."""

import pickle

import pytest

from rl.errors import GroupLost
from rl.rollout.scoring import rollouts_of, score_group
from rl.tasks.base import Score
from rl.types import Completion, Prompt

PROMPT = Prompt(ordinal=9, tokens=[1], text="", answer="")
COMPLETIONS = [Completion(tokens=[n], logprobs=[0.0], versions=[0], finish_reason="stop") for n in (4, 5)]


class Moody:
    """Scores the first completion well, and the second as it is told."""

    def __init__(self, answer):
        self.answer = answer

    def decode(self, tokens):
        return f"<{tokens[0]}>"

    def score(self, prompt, text, completion):
        if completion is COMPLETIONS[0]:
            return Score(reward=1, exact=True, metrics={"words": 3.0})
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def test_rollouts_are_made_of_texts_and_scores():
    good = Score(reward=0.5, exact=False)
    first, second = rollouts_of(PROMPT, COMPLETIONS, score_group(Moody(good), PROMPT, COMPLETIONS))
    assert (first.sample, first.text, first.reward, first.metrics) == (0, "<4>", 1, {"exact": 1.0, "words": 3.0})
    assert (second.sample, second.text, second.reward, second.metrics) == (1, "<5>", 0.5, {"exact": 0.0})
    assert (second.prompt, second.completion) == (PROMPT, COMPLETIONS[1])


def test_a_reward_that_raises_is_named_with_its_input_and_its_traceback():
    with pytest.raises(GroupLost) as error:
        score_group(Moody(ZeroDivisionError("no reward today")), PROMPT, COMPLETIONS)
    cause = "the reward of Moody raised ZeroDivisionError: no reward today; prompt 9, sample 1, completion '<5>'"
    assert str(error.value).splitlines()[0] == cause
    assert "test_scoring.py" in str(error.value)
    assert error.value.reason == "reward raised"


@pytest.mark.parametrize(
    ("answer", "named"),
    [
        (None, "None, which is no Score"),
        (1.0, "1.0, which is no Score"),
        (Score(reward=float("nan"), exact=False), "reward=nan, which is no finite number"),
        (Score(reward="1.0", exact=False), "reward='1.0', which is no finite number"),
        (
            Score(reward=1.0, exact=False, metrics={"words": 2.0, "length": float("inf")}),
            "length=inf, which is no finite number",
        ),
    ],
)
def test_a_reward_that_makes_no_sense_is_named_with_what_it_returned(answer, named):
    with pytest.raises(GroupLost) as error:
        score_group(Moody(answer), PROMPT, COMPLETIONS)
    assert str(error.value) == f"the reward of Moody returned {named}; prompt 9, sample 1, completion '<5>'"
    assert error.value.reason == "reward made no sense"


def test_why_a_group_was_lost_crosses_processes():
    lost = pickle.loads(pickle.dumps(GroupLost("reward raised", "the reason")))
    assert (lost.reason, str(lost)) == ("reward raised", "the reason")
