"""Tiller's side of against_trl.py: a task, and configs that train on it, by kind of work."""

from dataclasses import dataclass
from typing import cast

from grpo_work import CLIP, END, INSTRUCTION, MAX_NORM, WORKS
from torchtitan.components.optimizer import default_adamw
from torchtitan.config import TrainingConfig
from transformers import PreTrainedTokenizerFast

from rl.algorithms.losses import dapo
from rl.config import EvaluationConfig, PolicyGradientConfig, RLConfig, RolloutConfig
from rl.environments.task import Score, Task
from rl.generation.generator_config import GeneratorConfig
from rl.model.shape import ModelConfig
from rl.tasks.gsm8k_jsonl import Gsm8kJsonl
from rl.training.trainer_config import TrainerConfig
from rl.types import Completion, Prompt


class EvenTokens(Task):
    """Task with prompts of random words, whose reward is the share of even tokens."""

    @dataclass(kw_only=True, slots=True)
    class Config(Task.Config):
        work: str
        """Kind of work, one of grpo_work.WORKS."""

    def __init__(self, config: Config, *, seed: int, model: ModelConfig):
        super().__init__(config, seed=seed, model=model)
        self.tokenizer = PreTrainedTokenizerFast.from_pretrained(cast(str, model.hf_path))
        self.work = WORKS[config.work]
        self.stop_token_ids = (END,) if self.work.ends else ()

    def prompt(self, prompt_id: int) -> Prompt:
        text = self.work.prompt_text(prompt_id)
        return Prompt(
            prompt_id=prompt_id, tokens=self.tokenizer(text)["input_ids"], text=text, answer=""
        )

    def eval_prompts(self, count: int) -> list[Prompt]:
        return []

    def score(self, prompt: Prompt, text: str, completion: Completion) -> Score:
        return Score(reward=self.work.reward(completion.tokens), correct=False)


def config_of(kind: str) -> RLConfig:
    """Return the config that matches grpo_trl.py: DAPO's loss over tokens with GRPO's clip range,
    in fp32, one batch a step.
    """
    work = WORKS[kind]
    longest = work.prompt_tokens
    task: Task.Config = EvenTokens.Config(work=kind, max_prompt_tokens=longest)
    if work.published:
        task = Gsm8kJsonl.Config(instruction=INSTRUCTION, max_prompt_tokens=longest)
    return RLConfig(
        task=task,
        model=ModelConfig(max_seq_len=work.model["max_seq_len"]),
        rollout=RolloutConfig(
            prompts_per_step=work.prompts,
            samples_per_prompt=work.samples,
            max_tokens=work.new_tokens,
        ),
        algorithm=PolicyGradientConfig(loss=dapo(clip_low=CLIP, clip_high=CLIP)),
        trainer=TrainerConfig(
            training=TrainingConfig(mixed_precision_param="float32", max_norm=MAX_NORM),
            optimizer=default_adamw(lr=work.learning_rate, weight_decay=0.0, fused=True),
            micro_batch_size=work.prompts * work.samples,
        ),
        generator=GeneratorConfig(kv_cache_gib=0.25),
        evaluation=EvaluationConfig(prompts=0),
        quiet=True,
    )


def uniform() -> RLConfig:
    """Return the config of completions that all have the same length."""
    return config_of("uniform")


def varied() -> RLConfig:
    """Return the config of completions that an end token ends."""
    return config_of("varied")


def long_prompts() -> RLConfig:
    """Return the config of prompts that are longer than their completions."""
    return config_of("long_prompts")


def real() -> RLConfig:
    """Return the config of a published model that answers word problems."""
    config = config_of("real")
    config.trainer.micro_batch_size = 8
    config.generator = GeneratorConfig()
    return config


def real_defaults() -> RLConfig:
    """Return the same work with the default trainer, except for its optimizer, and generator."""
    config = real()
    config.trainer = TrainerConfig(optimizer=config.trainer.optimizer)
    return config
