"""The environments that ship: their prompts, and what a policy is rewarded for."""

import re

import pytest

from rl.errors import RunError
from rl.tasks import calculator, guessing_game
from rl.tasks.calculator import Calculator
from rl.tasks.guessing_game import GuessingGame
from rl.tasks.key_value_world import KeyValueWorld

IS_HELD_OUT = {
    Calculator: lambda prompt: calculator.is_held_out(prompt.text),
    GuessingGame: lambda prompt: guessing_game.is_held_out(int(prompt.answer)),
    KeyValueWorld: lambda prompt: int(prompt.answer) % 2 == 1,
}


def build(kind, model, seed=1, **config):
    return kind.Config(**config).build(seed=seed, model=model)


def said(text):
    return {"role": "assistant", "content": text}


def called(name, **arguments):
    return said("") | {"tool_calls": [{"function": {"name": name, "arguments": arguments}}]}


@pytest.mark.parametrize("kind", IS_HELD_OUT)
def test_prompts_are_a_function_of_the_seed_and_those_of_training_are_not_held_out(model, kind):
    task = build(kind, model)
    prompts = [task.prompt(number) for number in range(200)]
    assert [task.prompt(number) for number in reversed(range(200))] == prompts[::-1]
    held_out = task.eval_prompts(40)
    assert all(map(IS_HELD_OUT[kind], held_out))
    assert not any(map(IS_HELD_OUT[kind], prompts))
    assert len({(prompt.text, prompt.answer) for prompt in held_out}) == len(held_out) > 10
    assert len({prompt.answer for prompt in prompts}) > 50
    other = build(kind, model, seed=2)
    assert other.eval_prompts(40) == held_out
    assert [other.prompt(number) for number in range(200)] != prompts


def test_expressions_have_the_size_of_the_config_and_their_results(model):
    task = build(Calculator, model, operations=3, largest=20)
    for prompt in [*map(task.prompt, range(100)), *task.eval_prompts(40)]:
        assert eval(prompt.text) == int(prompt.answer)
        numbers = [int(number) for number in re.findall(r"\d+", prompt.text)]
        assert len(numbers) == 4
        assert max(numbers) <= 20
    few = [prompt.text for prompt in build(Calculator, model, largest=3).eval_prompts(10**3)]
    assert len(few) == len({*few})


def test_expressions_that_are_all_held_out_are_refused(model, monkeypatch):
    monkeypatch.setattr(calculator, "is_held_out", lambda text: True)
    with pytest.raises(RunError, match="task.largest: 99 leaves no expression"):
        build(Calculator, model).prompt(0)


@pytest.mark.parametrize(
    ("content", "reward"),
    [
        ("17 + 4 = 21, so it is 483.", 1.0),
        ("", 0.0),
        ("483 or 21", 0.0),
        ("4830", 0.0),
        ("I do not know", 0.0),
    ],
)
def test_an_expression_is_computed_with_tools_and_its_last_number_counts(model, content, reward):
    task = build(Calculator, model)
    game = task.environment(task.seed_prompt(0, text="(17 + 4) * 23", answer="483"), 0)
    opening = game.reset()
    assert opening.messages[0]["content"].startswith("(17 + 4) * 23 = ?")
    assert [each["function"]["name"] for each in opening.tools] == ["add", "subtract", "multiply"]
    for name, a, b, result in (("add", 17, 4, "21"), ("multiply", 21, 23, "483")):
        reply = game.step(called(name, a=a, b=b))
        assert reply.messages == [{"role": "tool", "content": result}]
    end = game.step(said(content))
    assert (end.reward, end.correct, end.done) == (reward, bool(reward), True)


@pytest.mark.parametrize(
    ("config", "guesses", "texts", "reward"),
    [
        ({}, ["Is it 50?", "hm", "20", "30"], ["lower", "Write a number.", "higher"], 0.8),
        ({"numbers": 40, "turn_cost": 0.25}, ["1", "2", "30"], ["higher", "higher"], 0.5),
        ({}, ["9" * 100_000, "30"], ["lower"], 0.9),
    ],
)
def test_each_wrong_guess_costs_reward(model, config, guesses, texts, reward):
    task = build(GuessingGame, model, **config)
    last = config.get("numbers", 100) - 1
    assert max(int(task.prompt(number).answer) for number in range(200)) <= last
    game = task.environment(task.seed_prompt(0, answer="30"), 0)
    assert f"from 0 to {last}" in game.reset().messages[0]["content"]
    *replies, end = [game.step(said(guess)) for guess in guesses]
    assert [reply.messages[0]["content"] for reply in replies] == texts
    assert not any(reply.done or reply.reward for reply in replies)
    assert (end.done, end.correct, end.reward) == (True, True, reward)


class Player:
    """An episode of the key-value world that is played with tool calls."""

    def __init__(self, task, prompt_id=0):
        self.game = task.environment(task.prompt(prompt_id), 0)
        self.request = self.game.reset().messages[0]["content"]

    def call(self, name, **arguments):
        reply = self.game.step(called(name, **arguments))
        assert not reply.done
        return reply.messages[0]["content"]

    def obey(self, most=None):
        """Make the first ``most`` of the requested changes."""
        pattern = r"(Set|Add|Delete) (?:(\d+) to )?(key\d+)(?: to (\d+))?"
        for kind, amount, key, value in re.findall(pattern, self.request)[:most]:
            if kind == "Delete":
                self.call("delete", key=key)
            elif kind == "Add":
                self.call("set", key=key, value=int(self.call("get", key=key)) + int(amount))
            else:
                self.call("set", key=key, value=int(value))

    def end(self):
        reply = self.game.step(said("done"))
        assert reply.done
        return reply.reward, reply.correct


def test_the_final_store_is_scored(model):
    task = build(KeyValueWorld, model, keys=5, changes=4)
    for prompt_id in range(30):
        for most in range(5):
            player = Player(task, prompt_id)
            player.obey(most)
            assert player.end() == (most / 4, most == 4)


@pytest.mark.parametrize("name, arguments", [("set", {"value": -1}), ("delete", {})])
def test_a_change_of_another_key_costs_the_reward(model, name, arguments):
    task = build(KeyValueWorld, model, keys=3, changes=2)
    for prompt_id in range(10):
        player = Player(task, prompt_id)
        (other,) = {"key0", "key1", "key2"} - {*re.findall(r"key\d+", player.request)}
        player.obey()
        player.call(name, key=other, **arguments)
        assert player.end() == (0.0, False)
    player = Player(task)
    player.obey()
    player.call("set", key="new", value=1)
    assert player.end() == (0.0, False)


def test_a_store_has_the_keys_of_the_config_and_no_other_episode_shares_it(model):
    task = build(KeyValueWorld, model, keys=4, changes=9)
    player = Player(task)
    assert sorted(re.findall(r"key\d+", player.request)) == ["key0", "key1", "key2", "key3"]
    player.call("delete", key="key1")
    assert player.call("get", key="key1").startswith("error: KeyError")
    assert player.call("get", key="key4").startswith("error")
    assert Player(task).call("get", key="key1").isdigit()
