"""Tiller's side of against_trl.py: a task, and the config that trains on it."""

from dataclasses import dataclass
from typing import cast

from grpo_work import (
    CLIP,
    LEARNING_RATE,
    MAX_NORM,
    MODEL,
    NEW_TOKENS,
    PROMPT_TOKENS,
    PROMPTS,
    SAMPLES,
    prompt_text,
)
from grpo_work import reward as even_share
from torchtitan.components.optimizer import default_adamw
from torchtitan.config import TrainingConfig
from transformers import PreTrainedTokenizerFast

from rl.algorithms.losses import dapo
from rl.config import EvaluationConfig, PolicyGradientConfig, RLConfig, RolloutConfig
from rl.environments.task import Score, Task
from rl.generation.generator_config import GeneratorConfig
from rl.model.shape import ModelConfig
from rl.training.trainer_config import TrainerConfig
from rl.types import Completion, Prompt


class EvenTokens(Task):
    """Task with prompts of random words, whose reward is the share of even tokens. No token ends a
    completion early."""

    @dataclass(kw_only=True, slots=True)
    class Config(Task.Config):
        max_prompt_tokens: int = PROMPT_TOKENS

    def __init__(self, config: Config, *, seed: int, model: ModelConfig):
        super().__init__(config, seed=seed, model=model)
        self.tokenizer = PreTrainedTokenizerFast.from_pretrained(cast(str, model.hf_path))
        self.stop_token_ids = ()

    def prompt(self, prompt_id: int) -> Prompt:
        text = prompt_text(prompt_id)
        return Prompt(
            prompt_id=prompt_id, tokens=self.tokenizer(text)["input_ids"], text=text, answer=""
        )

    def eval_prompts(self, count: int) -> list[Prompt]:
        return []

    def score(self, prompt: Prompt, text: str, completion: Completion) -> Score:
        return Score(reward=even_share(completion.tokens), correct=False)


def even_tokens() -> RLConfig:
    """Return the config that matches grpo_trl.py: DAPO's loss over tokens with GRPO's clip range,
    in fp32, one batch a step.
    """
    return RLConfig(
        task=EvenTokens.Config(),
        model=ModelConfig(max_seq_len=MODEL["max_seq_len"]),
        rollout=RolloutConfig(
            prompts_per_step=PROMPTS, samples_per_prompt=SAMPLES, max_tokens=NEW_TOKENS
        ),
        algorithm=PolicyGradientConfig(loss=dapo(clip_low=CLIP, clip_high=CLIP)),
        trainer=TrainerConfig(
            training=TrainingConfig(mixed_precision_param="float32", max_norm=MAX_NORM),
            optimizer=default_adamw(lr=LEARNING_RATE, weight_decay=0.0, fused=True),
            micro_batch_size=PROMPTS * SAMPLES,
        ),
        generator=GeneratorConfig(kv_cache_gib=0.25),
        evaluation=EvaluationConfig(prompts=0),
        quiet=True,
    )
