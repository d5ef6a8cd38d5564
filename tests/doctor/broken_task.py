"""A task that is wrong in a way that its config names."""

import random
import time
from dataclasses import dataclass, replace

from rl.cli.arguments import find_config
from rl.config import RLConfig
from rl.environments.protocol import EnvironmentTask, MessageEnvironment, Opening, Reply
from rl.environments.task import Score
from rl.tasks.copy_digits import TOKEN, CopyDigits


class Broken(CopyDigits):
    """CopyDigits with one fault."""

    @dataclass(kw_only=True, slots=True)
    class Config(CopyDigits.Config):
        fault: str = ""
        """Fault of the task; empty for none."""

    def __init__(self, config, *, seed, model):
        super().__init__(config, seed=seed, model=model)
        if config.fault == "constructor":
            open("/no/such/file")  # noqa: SIM115

    def prompt(self, prompt_id):
        fault = self.config.fault
        prompt = super().prompt(prompt_id)
        if fault == "leak":
            held_out = super().eval_prompts(50)
            return replace(held_out[prompt_id % 50], prompt_id=prompt_id)
        if fault == "few prompts":
            return replace(super().prompt(prompt_id % 3), prompt_id=prompt_id)
        if fault == "two answers":
            return replace(prompt, answer=f"{prompt_id % 10}")
        if fault == "ends":
            return replace(prompt, tokens=[*prompt.tokens, TOKEN["<eos>"]])
        if fault == "bos twice":
            return replace(prompt, tokens=[TOKEN["<bos>"]] * 2 + prompt.tokens)
        if fault == "no tokens":
            return replace(prompt, tokens=[])
        if fault == "late":
            return replace(prompt, tokens=[] if prompt_id == 900 else prompt.tokens)
        return prompt

    def eval_prompts(self, count):
        return [] if self.config.fault == "no held out" else super().eval_prompts(count)

    def score(self, prompt, text, completion):
        fault = self.config.fault
        rewards = {
            "random": random.random(),
            "constant": 0.25,
            "empty": 1 / len(completion.tokens),
            "nan": float("nan"),
        }
        if fault in rewards:
            return Score(reward=rewards[fault], correct=False)
        if fault == "hangs":
            time.sleep(5)
        if fault == "raises":
            return {}[text]
        if fault == "number":
            return 0.5
        return super().score(prompt, text, completion)


class BrokenEpisodes(EnvironmentTask):
    """One question in each episode, with one fault."""

    @dataclass(kw_only=True, slots=True)
    class Config(EnvironmentTask.Config):
        fault: str = ""
        """Fault of the environment; empty for none."""

    def prompt(self, prompt_id):
        return self.seed_prompt(prompt_id)

    def eval_prompts(self, count):
        return [self.seed_prompt(number, text=f"held out {number}") for number in range(count)]

    def environment(self, prompt, sample):
        return BrokenEnvironment(self.config.fault)


class BrokenEnvironment(MessageEnvironment):
    def __init__(self, fault):
        self.fault = fault

    def reset(self):
        question = {"role": "user", "content": "Yes?"}
        return Opening([] if self.fault == "no messages" else [question])

    def step(self, message):
        rewards = {"random": random.random(), "nan": float("nan")}
        if self.fault == "raises":
            raise KeyError(self.fault)
        return Reply(reward=rewards.get(self.fault, 1.0), done=True)


def broken_episodes() -> RLConfig:
    """Return the quickstart of tools with the environment."""
    config = find_config("tool_quickstart")()
    config.task = BrokenEpisodes.Config(max_prompt_tokens=64, max_episode_tokens=128)
    return config


def broken() -> RLConfig:
    """Return the quickstart with the task."""
    config = find_config("quickstart")()
    config.task = Broken.Config()
    return config
