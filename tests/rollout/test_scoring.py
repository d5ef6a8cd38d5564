"""Invalid rewards are refused with their input, whatever the user's code does."""

import json
import pickle
from fractions import Fraction

import numpy as np
import pytest
import torch

from rl.errors import GroupLost
from rl.metrics import Value
from rl.rollout.scoring import rollouts_of, score_group
from rl.tasks.base import Score
from rl.types import Completion, Prompt, Rollout

PROMPT = Prompt(prompt_id=9, tokens=[1], text="", answer="")
COMPLETIONS = [
    Completion(tokens=[n], logprobs=[0.0], versions=[0], finish_reason="stop") for n in (4, 5)
]


class Moody:
    """Task with a valid score for the first completion and ``answer`` for the second."""

    def __init__(self, answer):
        self.answer = answer

    def decode(self, tokens):
        return f"<{tokens[0]}>"

    def score(self, prompt, text, completion):
        if completion is COMPLETIONS[0]:
            return Score(reward=1, correct=True, metrics={"words": 3.0})
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer


class Unprintable:
    def __repr__(self):
        raise RuntimeError("no name")


class Unspeakable(Exception):
    def __str__(self):
        raise RuntimeError("no words")

    __repr__ = __str__


def test_rollouts_have_texts_and_scores():
    good = Score(reward=0.5, correct=False)
    first, second = rollouts_of(PROMPT, COMPLETIONS, score_group(Moody(good), PROMPT, COMPLETIONS))
    assert (first.sample, first.text, first.reward, first.metrics) == (
        0,
        "<4>",
        1,
        {"correct": 1.0, "words": 3.0},
    )
    assert (second.sample, second.text, second.reward, second.metrics) == (
        1,
        "<5>",
        0.5,
        {"correct": 0.0},
    )
    assert second == Rollout.single_turn(
        PROMPT, COMPLETIONS[1], sample=1, text="<5>", reward=0.5, metrics={"correct": 0.0}
    )


def test_a_reward_that_raises_is_named_with_its_input_and_its_traceback():
    with pytest.raises(GroupLost) as error:
        score_group(Moody(ZeroDivisionError("no reward today")), PROMPT, COMPLETIONS)
    cause = (
        "the reward of Moody raised ZeroDivisionError: no reward today; prompt 9, sample 1, "
        "completion '<5>'"
    )
    assert str(error.value).splitlines()[0] == cause
    assert "test_scoring.py" in str(error.value)
    assert error.value.reason == "reward raised"


@pytest.mark.parametrize(
    ("answer", "named"),
    [
        (None, "None, which is not a Score"),
        (1.0, "1.0, which is not a Score"),
        (Score(reward=float("nan"), correct=False), "reward=nan, which is not a finite number"),
        (Score(reward="1.0", correct=False), "reward='1.0', which is not a finite number"),
        (Score(reward=None, correct=False), "reward=None, which is not a finite number"),
        (Score(reward=1j, correct=False), "reward=1j, which is not a finite number"),
        (
            Score(reward=torch.tensor(1.0), correct=False),
            "reward=tensor(1.), which is not a finite number",
        ),
        (
            Score(reward=10**400, correct=False),
            f"reward={'1' + '0' * 199}…, which is not a finite number",
        ),
        (
            Score(reward=10**5000, correct=False),
            "reward=an int that cannot be shown, which is not a finite number",
        ),
        (
            Score(reward=-1e39, correct=False),
            "reward=-1e+39, which is not a finite number in float32",
        ),
        (
            Score(reward=np.float64("nan"), correct=False),
            "reward=np.float64(nan), which is not a finite number",
        ),
        (
            Score(reward=Unprintable(), correct=False),
            "reward=an Unprintable that cannot be shown, which is not a finite",
        ),
        (Score(reward=1.0, correct=None), "correct=None, which is not a bool"),
        (Score(reward=1.0, correct="yes"), "correct='yes', which is not a bool"),
        (Score(reward=1.0, correct=1), "correct=1, which is not a bool"),
        (Score(reward=1.0, correct=True, metrics=None), "metrics=None, which is not a dict"),
        (Score(reward=1.0, correct=True, metrics={3: 1.0}), "a metric named 3; names are text"),
        (Score(reward=1.0, correct=True, metrics={"": 1.0}), "a metric named ''; names are text"),
        (
            Score(reward=1.0, correct=True, metrics={"correct": 1.0}),
            "a metric named 'correct'; names are text",
        ),
        (
            Score(reward=1.0, correct=True, metrics={"mean": 1.0}),
            "a metric named 'mean'; names are text",
        ),
        (
            Score(reward=1.0, correct=True, metrics={"words": "many"}),
            "words='many', which is not a finite number",
        ),
        (Score(reward=1.0, correct=True, metrics={"words": 10**400}), "words=1000"),
        (
            Score(reward=1.0, correct=True, metrics={"words": Value(2.0, "median")}),
            "words=Value(value=2.0, rule='median', weight=1.0, mean=0.0), which is no",
        ),
        (
            Score(reward=1.0, correct=True, metrics={"words": Value(2.0, "mean", -1.0)}),
            "words=Value(value=2.0, rule='mean', weight=-1.0, mean=0.0), which is no",
        ),
        (
            Score(reward=1.0, correct=True, metrics={"words": Value(2.0, "max", "many")}),
            "words='many', which is not a finite number",
        ),
        (
            Score(reward=1.0, correct=False, metrics={"words": 2.0, "length": float("inf")}),
            "length=inf, which is not a finite number",
        ),
    ],
)
def test_an_invalid_reward_is_named_with_its_value(answer, named):
    with pytest.raises(GroupLost) as error:
        score_group(Moody(answer), PROMPT, COMPLETIONS)
    assert str(error.value).startswith(f"the reward of Moody returned {named}")
    assert str(error.value).endswith("; prompt 9, sample 1, completion '<5>'")
    assert error.value.reason == "reward was invalid"


@pytest.mark.parametrize(
    "number", [np.float32(0.5), np.float64(0.5), Fraction(1, 2), 0.5, np.float16(0.5)]
)
@pytest.mark.parametrize("yes", [True, np.bool_(True)])
def test_numbers_of_any_library_become_plain_floats(number, yes):
    score = Score(
        reward=number,
        correct=yes,
        metrics={np.str_("words"): number, "all": np.int64(3), "some": yes},
    )
    _, rollout = rollouts_of(PROMPT, COMPLETIONS, score_group(Moody(score), PROMPT, COMPLETIONS))
    assert (rollout.reward, rollout.metrics) == (
        0.5,
        {"correct": 1.0, "words": 0.5, "all": 3.0, "some": 1.0},
    )
    assert {type(value) for value in [rollout.reward, *rollout.metrics.values()]} == {float}
    assert {type(name) for name in rollout.metrics} == {str}
    assert json.loads(json.dumps(rollout.metrics)) == rollout.metrics


def test_numbers_with_a_reduction_become_plain_floats():
    score = Score(reward=1, correct=True, metrics={"words": Value.of(np.float32(2), "std", 3)})
    _, rollout = rollouts_of(PROMPT, COMPLETIONS, score_group(Moody(score), PROMPT, COMPLETIONS))
    assert repr(rollout.metrics["words"]) == repr(Value(0.0, "std", 3.0, 2.0))


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (SystemExit(3), "SystemExit: 3"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (Unspeakable(), "tests.rollout.test_scoring.Unspeakable: <exception str() failed>"),
        (ValueError("half \ud800"), r"ValueError: half \ud800"),
        (
            ExceptionGroup("two", [ValueError("one"), Unspeakable()]),
            "ExceptionGroup: two (2 sub-exceptions)",
        ),
    ],
)
def test_a_reward_that_raises_anything_loses_only_its_group(error, said):
    with pytest.raises(GroupLost) as lost:
        score_group(Moody(error), PROMPT, COMPLETIONS)
    assert (
        f"the reward of Moody raised {said}; prompt 9, sample 1" in str(lost.value).splitlines()[0]
    )
    str(lost.value).encode()  # a file or terminal accepts it
    assert lost.value.reason == "reward raised"


@pytest.mark.parametrize("decoded", [None, 5, b"text", SystemExit("no text")])
def test_a_decode_that_fails_loses_only_its_group(decoded):
    class Mute(Moody):
        def decode(self, tokens):
            if isinstance(decoded, BaseException):
                raise decoded
            return decoded

    with pytest.raises(GroupLost, match=r"Mute.*; prompt 9, sample 0"):
        score_group(Mute(Score(reward=1.0, correct=True)), PROMPT, COMPLETIONS)


def test_the_reason_of_a_lost_group_survives_pickling():
    lost = pickle.loads(pickle.dumps(GroupLost("reward raised", "the reason")))
    assert (lost.reason, str(lost)) == ("reward raised", "the reason")
