"""Prompts that no generator accepts are refused with task, call and expected value."""

from dataclasses import replace

import numpy as np
import pytest

from rl.errors import ConfigError, RunError
from rl.model.shape import ModelConfig
from rl.rollout.prompts import eval_prompts, training_prompt
from rl.tasks.copy_digits import CopyDigits
from rl.types import Prompt


class Digits(CopyDigits):
    """Task that returns ``answer``, or its result for the right prompt if it is callable."""

    answer: object

    def prompt(self, prompt_id):
        return self._given(super().prompt(prompt_id))

    def eval_prompts(self, count):
        if not callable(self.answer):
            return self.answer
        return [self._given(prompt) for prompt in super().eval_prompts(count)]

    def _given(self, prompt):
        return self.answer(prompt) if callable(self.answer) else self.answer


class Unspeakable(Exception):
    def __str__(self):
        raise RuntimeError("no words")


def fails(error):
    def fail(prompt):
        raise error

    return fail


def task(answer):
    digits = Digits(
        CopyDigits.Config(max_prompt_tokens=6),
        seed=0,
        model=ModelConfig(vocab_size=16, max_seq_len=32),
    )
    digits.answer = answer
    return digits


LIMIT = "task.max_prompt_tokens=6"
LIST = "expected a list of token ids, at least one"
KNOWN = "expected token ids of the model's vocabulary, from 0 to 15"
WRONG = [
    (None, "is None; expected a Prompt"),
    ([4, 5], "is [4, 5]; expected a Prompt"),
    ({"tokens": None}, f"has tokens=None; {LIST}"),
    ({"tokens": []}, f"has tokens=[]; {LIST}"),
    ({"tokens": (4, 5)}, f"has tokens=(4, 5); {LIST}"),
    ({"tokens": np.array([4, 5])}, f"has tokens=array([4, 5]); {LIST}"),
    ({"tokens": [4, np.int64(5)]}, f"has tokens=[4, np.int64(5)]; {LIST}"),
    ({"tokens": [4, True]}, f"has tokens=[4, True]; {LIST}"),
    ({"tokens": [4, "5"]}, f"has tokens=[4, '5']; {LIST}"),
    ({"tokens": [4, 16]}, f"has tokens=[4, 16]; {KNOWN}"),
    ({"tokens": [-1, 4]}, f"has tokens=[-1, 4]; {KNOWN}"),
    ({"tokens": [4] * 7}, f"has tokens={[4] * 7}; expected at most 6 tokens, not 7, by {LIMIT}"),
    ({"prompt_id": 5}, "has prompt_id=5; expected NUMBER"),
    ({"prompt_id": None}, "has prompt_id=None; expected NUMBER"),
    ({"text": None}, "has text=None; expected text"),
    ({"answer": 42}, "has answer=42; expected text"),
    ({"task": None}, "has task=None; expected text"),
    (SystemExit(3), "raised SystemExit: 3"),
    (KeyboardInterrupt(), "raised KeyboardInterrupt"),
    (Unspeakable(), "raised tests.rollout.test_prompts.Unspeakable: <exception str() failed>"),
    (ConfigError("no"), "raised rl.errors.ConfigError: no"),
]


@pytest.mark.parametrize(("answer", "message"), WRONG, ids=[message for _, message in WRONG])
def test_a_prompt_that_cannot_be_used_is_named(answer, message):
    def changed(answer):
        if isinstance(answer, dict):
            return lambda prompt: replace(prompt, **answer)
        return fails(answer) if isinstance(answer, BaseException) else lambda prompt: answer

    place = "" if isinstance(answer, BaseException) else "[0]"
    for ask, number, call in (
        (training_prompt, 3, "Digits.prompt(3)"),
        (eval_prompts, 4, f"Digits.eval_prompts(4){place}"),
    ):
        with pytest.raises(RunError) as error:
            ask(task(changed(answer)), number)
        expected = message.replace("NUMBER", "3" if ask is training_prompt else "0")
        assert str(error.value).startswith(f"task: {call} {expected}")


@pytest.mark.parametrize("answer", [None, (), {}, "abc", [None] * 5])
def test_evaluation_prompts_of_a_wrong_type_or_number_are_refused(answer):
    with pytest.raises(
        RunError,
        match=r"Digits.eval_prompts\(4\) returned .*; expected a list of at most 4 prompts",
    ):
        eval_prompts(task(answer), 4)


def test_the_frame_that_raised_is_in_the_message():
    with pytest.raises(RunError, match="test_prompts.py.*in fail"):
        training_prompt(task(fails(ZeroDivisionError())), 3)


def test_good_prompts_pass_unchanged():
    digits = task(lambda prompt: prompt)
    assert training_prompt(digits, 3) == CopyDigits.prompt(digits, 3)
    assert eval_prompts(digits, 4) == CopyDigits.eval_prompts(digits, 4)
    assert isinstance(training_prompt(digits, 0), Prompt)
