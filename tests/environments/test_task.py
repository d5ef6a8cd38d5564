from dataclasses import dataclass

import pytest

from rl.environments.task import Score, Task
from rl.errors import ConfigError
from rl.model.shape import ModelConfig
from rl.tasks.copy_digits import word_tokenizer


class Reverse(Task):
    """Task as a user defines it in another package."""

    @dataclass(kw_only=True, slots=True)
    class Config(Task.Config):
        stop: tuple[int | None, ...] = (2,)

    def __init__(self, config, *, seed, model):
        super().__init__(config, seed=seed, model=model)
        self.set_tokenizer(word_tokenizer(), config.stop)

    def prompt(self, prompt_id):
        raise NotImplementedError

    def eval_prompts(self, count):
        raise NotImplementedError

    def score(self, prompt, text, completion):
        return Score(reward=1.0, correct=True)


def test_a_task_of_the_users_own_is_built_from_its_config():
    task = Reverse.Config().build(seed=3, model=ModelConfig())
    assert (task.seed, task.stop_token_ids) == (3, (2,))
    assert task.decode([9, 7, 2]) == "3 1"


@pytest.mark.parametrize(
    ("stop", "model", "message"),
    [
        ((2,), {"vocab_size": 8}, "model.vocab_size: 8 .* set it to 16"),
        ((), {}, "eos_token"),
        ((None,), {}, r"Reverse names the stop tokens \(None,\); they must be token ids"),
        ((2, 16), {"vocab_size": 16}, r"stop tokens \(2, 16\); they must be token ids below 16"),
    ],
)
def test_a_tokenizer_that_does_not_fit_the_model_is_refused(stop, model, message):
    with pytest.raises(ConfigError, match=message):
        Reverse.Config(stop=stop).build(seed=0, model=ModelConfig(**model))
