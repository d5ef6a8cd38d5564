"""A task of an environment that ships with skyrl-gym."""

from dataclasses import dataclass

import skyrl_gym

from rl.environments.adapters import SkyRLTask


class SumsTask(SkyRLTask):
    @dataclass(kw_only=True, slots=True)
    class Config(SkyRLTask.Config):
        pass

    def prompt(self, prompt_id):
        return self._sum(prompt_id, 1)

    def eval_prompts(self, count):
        return [self._sum(prompt_id, 2) for prompt_id in range(count)]

    def _sum(self, prompt_id, more):
        text = f"{prompt_id} + {more} = ? Answer as #### NUMBER"
        return self.seed_prompt(prompt_id, text=text, answer=str(prompt_id + more))

    def make(self, prompt):
        extras = {"reward_spec": {"ground_truth": prompt.answer}, "max_turns": 3}
        return skyrl_gym.make("gsm8k_multi_turn", env_config=None, extras=extras)
