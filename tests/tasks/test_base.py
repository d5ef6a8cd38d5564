from dataclasses import dataclass

import pytest

from rl.errors import ConfigError
from rl.model.shape import ModelConfig
from rl.tasks.base import Score, Task, epoch_index
from rl.tasks.copy_digits import word_tokenizer


class Reverse(Task):
    """Task as a user defines it in another package."""

    @dataclass(kw_only=True, slots=True)
    class Config(Task.Config):
        stop: tuple[int, ...] = (2,)

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


def test_a_vocabulary_larger_than_the_model_is_refused():
    with pytest.raises(ConfigError, match=r"model.vocab_size: 8 .* set it to 16"):
        Reverse.Config().build(seed=0, model=ModelConfig(vocab_size=8))


def test_a_tokenizer_that_ends_nothing_is_refused():
    with pytest.raises(ConfigError, match="eos_token"):
        Reverse.Config(stop=()).build(seed=0, model=ModelConfig())


def test_stop_tokens_that_are_no_ids_are_refused():
    with pytest.raises(
        ConfigError, match=r"Reverse names the stop tokens \(None,\); they must be token ids"
    ):
        Reverse.Config(stop=(None,)).build(seed=0, model=ModelConfig())


@pytest.mark.parametrize("size", [1, 2, 7, 100])
def test_every_epoch_shows_every_example_once(size):
    for epoch in range(3):
        assert sorted(epoch_index(5, epoch * size + place, size) for place in range(size)) == list(
            range(size)
        )


def test_epochs_and_seeds_have_orders_of_their_own():
    cases = [(seed, epoch) for seed in (0, 1) for epoch in (0, 1)]
    orders = {
        tuple(epoch_index(seed, epoch * 50 + place, 50) for place in range(50))
        for seed, epoch in cases
    }
    assert len(orders) == 4


def test_the_order_is_the_same_in_every_process_and_release():
    assert [epoch_index(7, place, 5) for place in range(10)] == [0, 3, 4, 1, 2, 2, 1, 0, 4, 3]
