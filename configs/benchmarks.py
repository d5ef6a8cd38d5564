"""Benchmarks that people quote, to evaluate a model with: python -m rl.evaluate DIR --config NAME.

Questions come from the Hugging Face Hub, or from a file: --task.path FILE --task.split ''.
"""

from typing import Any

from rl.config import EvaluationConfig, RLConfig, RolloutConfig
from rl.environments.task import Task
from rl.model.shape import ModelConfig
from rl.tasks.gsm8k_jsonl import Gsm8kJsonl
from rl.tasks.ifeval import IFEval
from rl.tasks.mixture import Mixture
from rl.tasks.multiple_choice import MultipleChoice
from rl.tasks.python_puzzles import PythonPuzzles

PROMPT, ANSWER = 2048, 6144
ALL: dict[str, Any] = {"held_out_fraction": 1.0, "max_prompt_tokens": PROMPT}
BOXED = "Think step by step, then put the final answer in \\boxed{}."


def gsm8k_test() -> RLConfig:
    """The 1,319 test questions of GSM8K."""
    source: dict[str, Any] = {"path": "openai/gsm8k", "dataset_config": "main", "split": "test"}
    return _evaluated(Gsm8kJsonl.Config(**source, **ALL))


def math_500() -> RLConfig:
    """The 500 problems of MATH-500; math-verify compares expressions."""
    source: dict[str, Any] = {"path": "HuggingFaceH4/MATH-500", "split": "test"}
    return _evaluated(Gsm8kJsonl.Config(**source, **ALL, instruction=BOXED))


def aime_2024() -> RLConfig:
    """The 30 problems of AIME 2024, each answered 32 times too."""
    source: dict[str, Any] = {"path": "HuggingFaceH4/aime_2024", "split": "train"}
    return _evaluated(Gsm8kJsonl.Config(**source, **ALL, instruction=BOXED), samples=32)


def gpqa_diamond() -> RLConfig:
    """The 198 questions of GPQA Diamond, a gated dataset."""
    source: dict[str, Any] = {
        "path": "Idavidrein/gpqa",
        "dataset_config": "gpqa_diamond",
        "split": "train",
    }
    return _evaluated(MultipleChoice.Config(**source, **ALL))


def ifeval() -> RLConfig:
    """The 541 prompts of IFEval."""
    return _evaluated(IFEval.Config(path="google/IFEval", split="train", **ALL))


def humaneval() -> RLConfig:
    """The 164 programs of HumanEval, whose tests run in the sandbox."""
    source: dict[str, Any] = {"path": "openai/openai_humaneval", "split": "test"}
    return _evaluated(PythonPuzzles.Config(**source, **ALL, all_or_nothing=True))


def benchmarks() -> RLConfig:
    """All of these at once, without samples."""
    each = (gsm8k_test, math_500, aime_2024, gpqa_diamond, ifeval, humaneval)
    tasks = {make.__name__: make().task for make in each}
    return _evaluated(Mixture.Config(tasks=tasks, max_prompt_tokens=PROMPT))


def _evaluated(task: Task.Config, samples: int = 0) -> RLConfig:
    """Return a config that evaluates all prompts of ``task``."""
    return RLConfig(
        task=task,
        model=ModelConfig(max_seq_len=PROMPT + ANSWER),
        rollout=RolloutConfig(max_tokens=ANSWER),
        evaluation=EvaluationConfig(prompts=100_000, samples=samples),
    )
