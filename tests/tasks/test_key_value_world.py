import re

import pytest

from rl.model.shape import ModelConfig
from rl.tasks.key_value_world import KeyValueWorld
from tests.tiny_tokenizers import make_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return ModelConfig(hf_path=str(make_model(tmp_path_factory.mktemp("world"))))


class Player:
    """An episode that is played with tool calls."""

    def __init__(self, task, prompt):
        self.game = task.environment(prompt, 0)
        self.request = self.game.reset().messages[0]["content"]

    def call(self, name, **arguments):
        calls = [{"function": {"name": name, "arguments": arguments}}]
        reply = self.game.step({"role": "assistant", "content": "", "tool_calls": calls})
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
        reply = self.game.step({"role": "assistant", "content": "done"})
        assert reply.done
        return reply.reward, reply.correct


def test_worlds_are_a_function_of_the_seed_and_are_not_held_out(model):
    task = KeyValueWorld.Config().build(seed=1, model=model)
    prompts = [task.prompt(prompt_id) for prompt_id in range(50)]
    assert [task.prompt(prompt_id) for prompt_id in reversed(range(50))] == prompts[::-1]
    held_out = task.eval_prompts(50)
    assert len({prompt.answer for prompt in [*prompts, *held_out]}) == 100
    other = KeyValueWorld.Config().build(seed=2, model=model)
    assert other.eval_prompts(50) == held_out
    assert other.prompt(0) != prompts[0]


def test_the_final_store_is_scored(model):
    task = KeyValueWorld.Config(keys=5, changes=4).build(seed=1, model=model)
    for prompt_id in range(30):
        for most in range(5):
            player = Player(task, task.prompt(prompt_id))
            player.obey(most)
            assert player.end() == (most / 4, most == 4)


@pytest.mark.parametrize("name, arguments", [("set", {"value": -1}), ("delete", {})])
def test_a_change_of_another_key_costs_the_reward(model, name, arguments):
    task = KeyValueWorld.Config(keys=3, changes=2).build(seed=1, model=model)
    for prompt_id in range(10):
        player = Player(task, task.prompt(prompt_id))
        (other,) = {"key0", "key1", "key2"} - {*re.findall(r"key\d+", player.request)}
        player.obey()
        player.call(name, key=other, **arguments)
        assert player.end() == (0.0, False)
    player = Player(task, task.prompt(0))
    player.obey()
    player.call("set", key="new", value=1)
    assert player.end() == (0.0, False)


def test_episodes_share_no_store_and_a_missing_key_is_an_error_of_the_tool(model):
    task = KeyValueWorld.Config(keys=3, changes=1).build(seed=1, model=model)
    player = Player(task, task.prompt(0))
    player.call("delete", key="key1")
    assert player.call("get", key="key1").startswith("error: KeyError")
    assert Player(task, task.prompt(0)).call("get", key="key1").isdigit()


def test_the_store_has_the_keys_and_changes_of_the_config(model):
    task = KeyValueWorld.Config(keys=4, changes=9).build(seed=1, model=model)
    player = Player(task, task.prompt(0))
    assert sorted(re.findall(r"key\d+", player.request)) == ["key0", "key1", "key2", "key3"]
    assert player.call("get", key="key3").isdigit()
    assert player.call("get", key="key4").startswith("error")
