import pytest

from rl.errors import RunError
from rl.model.shape import ModelConfig
from rl.tasks.calculator import Calculator, is_held_out
from tests.tiny_tokenizers import make_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return ModelConfig(hf_path=str(make_model(tmp_path_factory.mktemp("calculator"))))


def build(model, **config):
    return Calculator.Config(**config).build(seed=1, model=model)


def test_expressions_are_a_function_of_the_seed_and_have_their_results(model):
    task = build(model, operations=3, largest=20)
    prompts = [task.prompt(prompt_id) for prompt_id in range(100)]
    assert [task.prompt(prompt_id) for prompt_id in reversed(range(100))] == prompts[::-1]
    held_out = task.eval_prompts(40)
    assert len({prompt.text for prompt in held_out}) == 40
    assert all(is_held_out(prompt.text) for prompt in held_out)
    assert not any(is_held_out(prompt.text) for prompt in prompts)
    for prompt in [*prompts, *held_out]:
        assert eval(prompt.text) == int(prompt.answer)
        numbers = [
            int(word.strip("()")) for word in prompt.text.split() if word.strip("()").isdigit()
        ]
        assert len(numbers) == 4
        assert max(numbers) <= 20


def test_few_expressions_are_held_out_once_and_too_few_are_refused(model):
    task = build(model, operations=1, largest=3)
    held_out = [prompt.text for prompt in task.eval_prompts(10**3)]
    assert len(held_out) == len({*held_out}) < 48


def test_a_policy_that_uses_the_tools_is_rewarded(model):
    task = build(model)
    game = task.environment(task.seed_prompt(0, text="(17 + 4) * 23", answer="483"), 0)
    opening = game.reset()
    assert opening.messages[0]["content"].startswith("(17 + 4) * 23 = ?")
    assert [each["function"]["name"] for each in opening.tools] == ["add", "subtract", "multiply"]

    def call(name, **arguments):
        calls = [{"function": {"name": name, "arguments": arguments}}]
        return game.step({"role": "assistant", "content": "", "tool_calls": calls})

    assert call("add", a=17, b=4).messages == [{"role": "tool", "content": "21"}]
    assert call("multiply", a=21, b=23).messages == [{"role": "tool", "content": "483"}]
    end = game.step({"role": "assistant", "content": "17 + 4 = 21, so it is 483."})
    assert (end.reward, end.correct, end.done) == (1.0, True, True)


@pytest.mark.parametrize("content", ["", "483 or 21", "4830", "I do not know"])
def test_another_answer_has_no_reward(model, content):
    task = build(model)
    game = task.environment(task.seed_prompt(0, text="(17 + 4) * 23", answer="483"), 0)
    end = game.step({"role": "assistant", "content": content})
    assert (end.reward, end.correct, end.done) == (0.0, False, True)


def test_a_config_that_leaves_nothing_to_train_on_is_refused(model, monkeypatch):
    monkeypatch.setattr("rl.tasks.calculator.is_held_out", lambda text: True)
    with pytest.raises(RunError, match="task.largest: 99 leaves no expression"):
        build(model).prompt(0)
