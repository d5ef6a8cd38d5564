"""A trainer plays one episode before it starts anything, and refuses an environment that fails."""

import random
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from rl.cli.arguments import load_config
from rl.config import EvaluationConfig, RolloutConfig
from rl.errors import ConfigError
from rl.model.shape import ModelConfig
from rl.trainers import trial
from rl.trainers.rl import RLTrainer
from rl.trainers.trial import MAX_TURNS

TASK = """\
class Mine({kind}):
    @dataclass(kw_only=True, slots=True)
    class Config({kind}.Config):
        pass
    def prompt(self, prompt_id):
        return self.seed_prompt(prompt_id, answer="7")
    def eval_prompts(self, count):
        return []
    {body}

def mine() -> RLConfig:
    return RLConfig(task=Mine.Config())
"""
GAME = """\
import asyncio, os, random, time
from dataclasses import dataclass
import numpy, torch
import rl
from rl.config import RLConfig

async def later(*_):
    return None

def question(*_):
    return rl.Opening([{"role": "user", "content": "Guess."}])

class Game(rl.MessageEnvironment):
    def reset(self):
        return question()
    def step(self, message):
        return rl.Reply(reward=1.0, done=True)
    BODY

"""
AGENT = """\
import json, sys, time, urllib.request
from dataclasses import dataclass
import rl
from rl.config import RLConfig

def ask(api, **options):
    body = {"messages": [{"role": "user", "content": "Guess."}], **options}
    head = {"content-type": "application/json", "authorization": f"Bearer {api.key}"}
    url = f"{api.base_url}/chat/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), head)
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]

"""
MAKES_GAME = "def environment(self, prompt, sample): return Game()"


def environment(game: str = "", task: str = MAKES_GAME) -> str:
    """Return the source of an environment, with the given parts of its classes."""
    return GAME.replace("BODY", game) + TASK.format(kind="rl.EnvironmentTask", body=task)


def agent(body: str) -> str:
    return AGENT + TASK.format(kind="rl.AgentTask", body=body)


@pytest.fixture
def construct(tmp_path, monkeypatch, tiny_model):
    """Return a function that makes the trainer of a module's source, with fields of its task."""
    monkeypatch.syspath_prepend(tmp_path)
    name = f"played_{tmp_path.name}".replace("-", "_")

    model = ModelConfig(hf_path=str(tiny_model), max_seq_len=512)

    def make(source: str, *, is_given: bool = False, **fields) -> RLTrainer:
        (tmp_path / f"{name}.py").write_text(source)
        config = load_config(f"{name}.mine")[1]
        config.task = replace(config.task, **{"max_episode_tokens": 400, "step_s": 20.0} | fields)
        config.model = model
        config.rollout = RolloutConfig(max_tokens=32)
        config.evaluation = EvaluationConfig(prompts=0)
        config.output_dir = str(tmp_path / "run")
        config.quiet = True
        given = config.task.build(seed=0, model=model) if is_given else None
        return RLTrainer(config, given)

    yield make
    sys.modules.pop(name, None)
    assert not (tmp_path / "run").exists()


BROKEN = [
    ("def reset(self): return {}['x']", "Mine.reset raised KeyError: 'x'"),
    ("def reset(self): raise SystemExit(3)", "Mine.reset raised SystemExit: 3"),
    ("def reset(self): return 'hello'", "reset returned 'hello', which is not an Opening"),
    ("reset = later", "reset returned None, which is not an Opening"),
    ("def reset(self): return rl.Opening(None)", "there are no messages"),
    ("def reset(self): return rl.Opening([{'role': 'user'}])", "content is None"),
    ("def reset(self): return rl.Opening(question().messages, [later])", "tool 0 is <function"),
    ("def reset(self): return rl.Opening(question().messages, [{'a': {1}}])", "{1}} is not JSON"),
    ("def reset(self): return rl.Opening(question().messages, 7)", "tools is 7; write a list"),
    (
        "def reset(self): return rl.Opening([{'role': 'user', 'content': 'a b ' * 500}])",
        "task.max_episode_tokens=400 with room for",
    ),
    ("def step(self, message): raise rl.InfrastructureError('no server')", "no server; prompt 0"),
    ("def step(self, message): return message.content", "AttributeError: 'dict' object has no"),
    ("step = later", "step returned None, which is not a Reply"),
    ("def step(self, message): return 0.5", "step returned 0.5, which is not a Reply"),
    ("def step(self, message): return rl.Reply(reward=float('nan'))", "step returned reward=nan"),
    ("def step(self, message): return rl.Reply(reward='1')", "step returned reward='1'"),
    ("def step(self, message): return rl.Reply(done='no')", "step returned done='no'"),
    ("def step(self, message): return rl.Reply(done=True, correct=1)", "returned correct=1"),
    (
        "def step(self, message): return rl.Reply(done=True, metrics={'mean': 1})",
        "a metric named 'mean'",
    ),
    ("def step(self, message): return rl.Reply(metrics={'a': 'b'})", "a='b', which is not a"),
    ("def step(self, message): return rl.Reply()", "there are no messages"),
    (
        "def step(self, message):\n"
        "        self.turns = getattr(self, 'turns', 0) + 1\n"
        "        return rl.Reply(messages=question().messages, done=1 / (3 - self.turns) < 0)",
        "Mine.step raised ZeroDivisionError: division by zero; prompt 0, sample 0, turn 3",
    ),
]
BROKEN_TASKS = [
    ("def environment(self, prompt, sample): return None", "environment returned None, which has"),
    ("def environment(self, prompt): return Game()", "Mine.environment raised TypeError"),
    ("def environment(self, prompt, sample): return prompt.answr", "no attribute 'answr'"),
]
HANGS = [
    ("def reset(self): time.sleep(60)", "Mine.reset took longer than task.step_s=1"),
    ("async def step(self, _): await asyncio.sleep(3600)", "Mine.step took longer than task"),
    ("async def step(self, _): time.sleep(60)", "an episode of Mine did not end in 7 s"),
]
BROKEN_AGENTS = [
    ("async def agent(self, prompt, api): return {}['x']", "KeyError: 'x'"),
    ("async def agent(self, prompt): pass", "takes 2 positional arguments but 3 were given"),
    ("async def agent(self, prompt, api): pass", "returned None, which is not a Reply"),
    ("def agent(self, prompt, api): return rl.Reply()", "the agent ended without a request"),
    ("async def agent(self, _, api): await api.run(['no-such-program'])", "FileNotFoundError"),
    ("async def agent(self, _, api): await api.run(['false'])", "false ended with exit code 1"),
    ("def agent(self, _, api): return ask(api, wat=1)", "HTTP Error 400"),
    (
        "def agent(self, _, api): return ask(api) and rl.Reply(reward=float('nan'))",
        "step returned reward=nan",
    ),
    (
        "def agent(self, _, api): return ask(api) and rl.Reply(metrics={'correct': 1})",
        "a metric named 'correct'",
    ),
]


SOURCES = [
    *((environment(body), said, {}) for body, said in BROKEN),
    *((environment(task=body), said, {}) for body, said in BROKEN_TASKS),
    *((environment(body), said, {"step_s": 1.0}) for body, said in HANGS),
    *((agent(body), said, {}) for body, said in BROKEN_AGENTS),
]


@pytest.mark.parametrize(("source", "said", "fields"), SOURCES)
def test_an_environment_that_fails_is_refused_before_anything_starts(
    construct, tmp_path, monkeypatch, source, said, fields
):
    monkeypatch.setattr(trial, "END_S", 0.0)
    with pytest.raises(ConfigError) as error:
        construct(source, **fields)
    text = str(error.value)
    assert text.startswith("task: ")
    assert "Mine" in text
    assert said in text
    assert "with the answer '7'; correct the environment or the model's template" in text
    if "KeyError" in said:
        assert str(tmp_path) in text, "the file of the line"


def test_a_task_that_the_caller_gives_is_tried_too(construct):
    with pytest.raises(ConfigError, match="step returned None, which is not a Reply"):
        construct(environment("step = later"), is_given=True)


ENDLESS = """
    def step(self, message):
        SEEN.append(message["content"])
        SEEN.append((random.random(), numpy.random.rand(), torch.rand(1)) and "drawn")
        return rl.Reply(messages=question().messages, reward=0.5)
    def close(self):
        SEEN.append("closed")
SEEN = []
"""


def test_a_good_environment_is_played_for_some_turns_and_draws_nothing(construct):
    """A thread that a library started in an earlier test may draw once between both states."""

    def random_states() -> tuple[Any, ...]:
        return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()

    def draws() -> bool:
        before = random_states()
        trainer = construct(environment(ENDLESS))
        seen = sys.modules[type(trainer.dataset_train).__module__].SEEN
        assert seen == ["7", "drawn"] * MAX_TURNS + ["closed"]
        return random_states() != before

    assert not all(draws() for _ in range(3))


def test_an_environment_that_fails_for_one_prompt_alone_is_not_refused(construct):
    """It costs one group in a run."""
    unlucky = "def environment(self, prompt, sample): return 1 / prompt.prompt_id and Game()"
    assert construct(environment(task=unlucky)).dataset_train.prompt(0)


ENDLESS_AGENT = """
    def agent(self, prompt, api):
        while True:
            said = ask(api, logprobs=True, top_logprobs=2)
            likely = said["logprobs"]["content"][0]["top_logprobs"]
            SEEN.append(said["message"]["content"] if likely else "")
SEEN = []
"""


def test_a_good_agent_gets_some_answers(construct):
    trainer = construct(agent(ENDLESS_AGENT))
    seen = sys.modules[type(trainer.dataset_train).__module__].SEEN
    assert seen == ["7"] * MAX_TURNS
