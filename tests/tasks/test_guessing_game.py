import pytest

from rl.model.shape import ModelConfig
from rl.tasks.guessing_game import GuessingGame, is_held_out
from tests.tiny_tokenizers import make_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return ModelConfig(hf_path=str(make_model(tmp_path_factory.mktemp("guessing"))))


@pytest.fixture(scope="module")
def task(model):
    return GuessingGame.Config().build(seed=1, model=model)


def said(text):
    return {"role": "assistant", "content": text}


def test_prompts_are_a_function_of_the_seed_and_are_not_held_out(task):
    prompts = [task.prompt(prompt_id) for prompt_id in range(200)]
    assert [task.prompt(prompt_id) for prompt_id in reversed(range(200))] == prompts[::-1]
    assert len({prompt.answer for prompt in prompts}) > 50
    assert not any(is_held_out(int(prompt.answer)) for prompt in prompts)
    held_out = [int(prompt.answer) for prompt in task.eval_prompts(100)]
    assert held_out == [number for number in range(100) if is_held_out(number)]


def test_each_wrong_guess_costs_reward(task):
    prompt = task.seed_prompt(0, answer="30")
    game = task.environment(prompt, 0)
    assert "from 0 to 99" in game.reset().messages[0]["content"]
    replies = [game.step(said(text)) for text in ("Is it 50?", "hm", "20", "30")]
    texts = [reply.messages[0]["content"] for reply in replies[:3]]
    assert texts == ["lower", "Write a number.", "higher"]
    assert [reply.done for reply in replies] == [False, False, False, True]
    assert [reply.reward for reply in replies] == [0.0, 0.0, 0.0, 0.8]
    assert replies[-1].correct


def test_numbers_and_the_cost_of_a_guess_are_those_of_the_config(model):
    task = GuessingGame.Config(numbers=40, turn_cost=0.25).build(seed=1, model=model)
    assert {int(task.prompt(prompt_id).answer) for prompt_id in range(200)} <= {*range(40)}
    game = task.environment(task.seed_prompt(0, answer="30"), 0)
    assert "from 0 to 39" in game.reset().messages[0]["content"]
    assert [game.step(said(guess)).reward for guess in ("1", "2", "30")] == [0.0, 0.0, 0.5]


def test_a_number_of_many_digits_is_a_wrong_guess(task):
    game = task.environment(task.seed_prompt(0, answer="30"), 0)
    assert game.step(said("9" * 100_000)).messages[0]["content"] == "lower"
