"""Invalid rewards are refused with their input, whatever the user's code does."""

import json
import pickle
from fractions import Fraction

import numpy as np
import pytest
import torch

from rl.environments.task import Score
from rl.errors import GroupLost
from rl.metrics import Value
from rl.rollout.scoring import rollouts_of, score_group
from rl.types import Completion, Prompt, Rollout

PROMPT = Prompt(prompt_id=9, tokens=[1], text="", answer="")
COMPLETIONS = [Completion.written([token]) for token in (4, 5)]


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


def rollouts(answer):
    return rollouts_of(PROMPT, COMPLETIONS, score_group(Moody(answer), PROMPT, COMPLETIONS))


def lost(task) -> GroupLost:
    with pytest.raises(GroupLost) as error:
        score_group(task, PROMPT, COMPLETIONS)
    return error.value


def test_rollouts_have_texts_and_scores():
    for sample, (rollout, text, reward, metrics) in enumerate(
        zip(
            rollouts(Score(reward=0.5, correct=False)),
            ["<4>", "<5>"],
            [1.0, 0.5],
            [{"correct": 1.0, "words": 3.0}, {"correct": 0.0}],
            strict=True,
        )
    ):
        fields = {"sample": sample, "text": text, "reward": reward, "metrics": metrics}
        assert rollout == Rollout.single_turn(PROMPT, COMPLETIONS[sample], **fields)


def test_a_reward_of_none_abstains():
    first, second = rollouts(Score(reward=None, correct=True))
    assert [first.abstained, second.abstained] == [False, True]
    assert second.metrics == {"correct": 1.0}


def scored(*, reward=1.0, correct=True, **metrics):
    return Score(reward=reward, correct=correct, metrics=metrics)


NOT_FINITE = "which is not a finite number"
INVALID = [
    (None, "None, which is not a Score"),
    (1.0, "1.0, which is not a Score"),
    (scored(reward=float("nan")), f"reward=nan, {NOT_FINITE}"),
    (scored(reward="1.0"), f"reward='1.0', {NOT_FINITE}"),
    (scored(reward=1j), f"reward=1j, {NOT_FINITE}"),
    (scored(reward=torch.tensor(1.0)), f"reward=tensor(1.), {NOT_FINITE}"),
    (scored(reward=10**400), f"reward={'1' + '0' * 199}…, {NOT_FINITE}"),
    (scored(reward=10**5000), f"reward=an int that cannot be shown, {NOT_FINITE}"),
    (scored(reward=-1e39), f"reward=-1e+39, {NOT_FINITE} in float32"),
    (scored(reward=np.float64("nan")), f"reward=np.float64(nan), {NOT_FINITE}"),
    (scored(reward=Unprintable()), f"reward=an Unprintable that cannot be shown, {NOT_FINITE}"),
    *[
        (scored(correct=value), f"correct={value!r}, which is not a bool")
        for value in (None, "yes", 1)
    ],
    (Score(reward=1.0, correct=True, metrics=None), "metrics=None, which is not a dict"),
    *[
        (
            Score(reward=1.0, correct=True, metrics={name: 1.0}),
            f"a metric named {name!r}; names are",
        )
        for name in (3, "", "correct", "mean")
    ],
    (scored(words="many"), f"words='many', {NOT_FINITE}"),
    (scored(words=10**400), "words=1000"),
    (scored(words=2.0, length=float("inf")), f"length=inf, {NOT_FINITE}"),
    (scored(words=Value(2.0, "median")), "words=Value(value=2.0, rule='median', weight=1.0, mean="),
    (scored(words=Value(2.0, "mean", -1.0)), "words=Value(value=2.0, rule='mean', weight=-1.0, me"),
    (scored(words=Value(2.0, "max", "many")), f"words='many', {NOT_FINITE}"),
]


@pytest.mark.parametrize(("answer", "named"), INVALID)
def test_an_invalid_reward_is_named_with_its_value(answer, named):
    error = lost(Moody(answer))
    assert str(error).startswith(f"the reward of Moody returned {named}")
    assert str(error).endswith("; prompt 9, sample 1, completion '<5>'")
    assert error.reason == "reward was invalid"


@pytest.mark.parametrize(
    "number", [np.float32(0.5), np.float64(0.5), Fraction(1, 2), 0.5, np.float16(0.5)]
)
@pytest.mark.parametrize("yes", [True, np.bool_(True)])
def test_numbers_of_any_library_become_plain_floats(number, yes):
    metrics = {np.str_("words"): number, "all": np.int64(3), "some": yes}
    _, rollout = rollouts(Score(reward=number, correct=yes, metrics=metrics))
    plain = {"correct": 1.0, "words": 0.5, "all": 3.0, "some": 1.0}
    assert (rollout.reward, rollout.metrics) == (0.5, plain)
    assert {type(value) for value in [rollout.reward, *rollout.metrics.values()]} == {float}
    assert {type(name) for name in rollout.metrics} == {str}
    assert json.loads(json.dumps(rollout.metrics)) == rollout.metrics


def test_numbers_with_a_reduction_become_plain_floats():
    _, rollout = rollouts(scored(words=Value.of(np.float32(2), "std", 3)))
    assert repr(rollout.metrics["words"]) == repr(Value(0.0, "std", 3.0, 2.0))


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ZeroDivisionError("no reward today"), "ZeroDivisionError: no reward today"),
        (SystemExit(3), "SystemExit: 3"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (Unspeakable(), "tests.rollout.test_scoring.Unspeakable: <exception str() failed>"),
        (ValueError("half \ud800"), r"ValueError: half \ud800"),
        (ExceptionGroup("two", [Unspeakable()]), "ExceptionGroup: two (1 sub-exception)"),
    ],
)
def test_a_reward_that_raises_loses_its_group_and_is_named_with_its_input_and_traceback(
    error, said
):
    group = lost(Moody(error))
    where = "prompt 9, sample 1, completion '<5>'"
    assert str(group).splitlines()[0] == f"the reward of Moody raised {said}; {where}"
    assert "test_scoring.py" in str(group)
    str(group).encode()  # a file or terminal accepts it
    assert group.reason == "reward raised"
    copy = pickle.loads(pickle.dumps(group))
    assert (copy.reason, str(copy)) == (group.reason, str(group))


@pytest.mark.parametrize("decoded", [None, 5, b"text", SystemExit("no text")])
def test_a_decode_that_fails_loses_only_its_group(decoded):
    class Mute(Moody):
        def decode(self, tokens):
            if isinstance(decoded, BaseException):
                raise decoded
            return decoded

    error = lost(Mute(Score(reward=1.0, correct=True)))
    assert "Mute" in str(error)
    assert "; prompt 9, sample 0" in str(error)
