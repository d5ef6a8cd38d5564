"""Configs in a package outside Tiller, as a user writes them."""

import dataclasses
from dataclasses import dataclass

from configs.quickstart import quickstart
from configs.sft_jsonl import sft_jsonl
from configs.tool_quickstart import tool_quickstart
from rl.algorithms.advantages import GAE
from rl.config import RLConfig, SampledEvaluationConfig, SFTConfig
from rl.model.shape import ModelConfig
from rl.tasks.copy_digits import WORDS, CopyDigits
from rl.tasks.gsm8k_jsonl import Gsm8kJsonl
from rl.types import Prompt
from tests.e2e.held import HeldCalculator, HeldGuessingGame
from tests.kit.agent_tasks import Guesser
from tests.kit.wild_tools import WildTools

BLOCK = 32
PREAMBLE = [place % len(WORDS) for place in range(2 * BLOCK + 6)]


class CopyAfterPreamble(CopyDigits):
    """Copying digits after a preamble of several blocks of the KV cache, which prompts share."""

    @dataclass(kw_only=True, slots=True)
    class Config(CopyDigits.Config):
        pass

    def prompt(self, prompt_id: int) -> Prompt:
        return _after_preamble(super().prompt(prompt_id))

    def eval_prompts(self, count: int) -> list[Prompt]:
        return [_after_preamble(prompt) for prompt in super().eval_prompts(count)]


def _after_preamble(prompt: Prompt) -> Prompt:
    return dataclasses.replace(prompt, tokens=PREAMBLE + prompt.tokens)


def long_prompts() -> RLConfig:
    """Return a config whose prompts fill several blocks of the KV cache."""
    config = quickstart()
    config.task = CopyAfterPreamble.Config(max_prompt_tokens=len(PREAMBLE) + 5)
    config.model.max_seq_len = 3 * BLOCK
    config.generator.block_size = BLOCK
    return config


def sampled_sft() -> SFTConfig:
    """Supervised fine-tuning whose generators answer word problems on the way."""
    config = sft_jsonl()
    config.evaluation = SampledEvaluationConfig(
        task=Gsm8kJsonl.Config(max_prompt_tokens=96), max_tokens=8, prompts=4, samples=2, every=7
    )
    config.evaluation.generator.kv_cache_gib = 0.05
    return config


def many_models() -> RLConfig:
    """PPO with a critic, a reference that follows, four updates a step, and cut distributions."""
    config = long_prompts()
    config.rollout.top_k = 12
    config.rollout.min_p = 0.02
    config.algorithm.advantage = GAE.Config()
    config.algorithm.loss.kl_coef = 0.05
    config.algorithm.adaptive_kl.target = 0.01
    config.algorithm.old_logprobs = "recomputed"
    config.algorithm.update_epochs = 2
    config.algorithm.prompts_per_minibatch = 2
    config.reference.refresh_every = 2
    return config


def guessing() -> RLConfig:
    """Return a config of episodes of several blocks; ``model.hf_path`` has to be given."""
    config = long_prompts()
    config.steps = 6
    config.task = HeldGuessingGame.Config(max_turns=5, max_episode_tokens=12 * BLOCK)
    config.model = ModelConfig(max_seq_len=12 * BLOCK)
    config.rollout.max_tokens = 24
    config.rollout.top_p = 0.9
    config.trainer.checkpoint.interval = 2
    return config


def held_tools() -> RLConfig:
    """Return the config of the tool quickstart, with a task whose tools can be held."""
    config = tool_quickstart()
    config.task = HeldCalculator.Config(**dataclasses.asdict(config.task))
    return config


def wild_tools() -> RLConfig:
    """Return a config of episodes whose tools misbehave; ``model.hf_path`` has to be given."""
    config = guessing()
    config.task = WildTools.Config(max_turns=3, max_episode_tokens=12 * BLOCK, step_s=5.0)
    config.rollout.reward_workers = 2
    config.rollout.max_lost = 1.0
    return config


def agents() -> RLConfig:
    """Return a config of agents that rewrite their history; needs ``model.hf_path``."""
    config = guessing()
    config.steps = 3
    config.task = Guesser.Config(max_turns=5, max_episode_tokens=24 * BLOCK)
    config.model = ModelConfig(max_seq_len=24 * BLOCK)
    return config


def countdown() -> RLConfig:
    """Return a config of two steps of a text environment of gymnasium."""
    from tests.kit.countdown import CountdownTask

    config = guessing()
    config.steps = 2
    config.task = CountdownTask.Config(max_turns=3, max_episode_tokens=12 * BLOCK)
    return config


def skyrl_sums() -> RLConfig:
    """Return a config of two steps of an environment of skyrl-gym."""
    from tests.kit.sums import SumsTask

    config = countdown()
    config.task = SumsTask.Config(max_turns=3, max_episode_tokens=12 * BLOCK)
    return config


def verifiers_sums() -> RLConfig:
    """Return a config of a taskset of verifiers; needs ``task.path`` and ``task.address``."""
    from rl.environments.verifiers import VerifiersTask

    config = agents()
    config.steps = 10
    config.task = VerifiersTask.Config(max_turns=3, max_episode_tokens=24 * BLOCK)
    return config
