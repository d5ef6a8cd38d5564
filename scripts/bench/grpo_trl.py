"""TRL's side of against_trl.py, run in TRL's environment: GRPOTrainer, with settings that suit a
CPU.

Usage: python scripts/bench/grpo_trl.py MODEL_DIR STEPS

Prints one JSON object: the seconds and the mean reward of each step.
"""

import json
import sys
import tempfile
import time

import torch
from datasets import Dataset
from grpo_work import (
    CLIP,
    LEARNING_RATE,
    MAX_NORM,
    NEW_TOKENS,
    PROMPTS,
    SAMPLES,
    prompt_text,
    reward,
)
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Clock(TrainerCallback):
    """Times at which steps ended."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_begin(self, *_: object, **__: object) -> None:
        self.ends.append(time.perf_counter())

    def on_step_end(self, *_: object, **__: object) -> None:
        self.ends.append(time.perf_counter())


def main(model_dir: str, steps: int) -> None:
    lengths: set[int] = set()
    rewards: list[float] = []

    def score(completion_ids: list[list[int]], **_: object) -> list[float]:
        lengths.update(map(len, completion_ids))
        scores = [reward(tokens) for tokens in completion_ids]
        rewards.append(sum(scores) / len(scores))
        return scores

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    # a token outside the vocabulary, so that no completion ends early
    tokenizer.add_special_tokens({"eos_token": "<never>"})
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=PROMPTS * SAMPLES,
            num_generations=SAMPLES,
            max_completion_length=NEW_TOKENS,
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant",
            max_grad_norm=MAX_NORM,
            epsilon=CLIP,
            beta=0.0,
            use_cpu=True,
            bf16=False,
            torch_compile=True,
            gradient_checkpointing=False,
            logging_steps=steps,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32),
            reward_funcs=score,
            args=config,
            train_dataset=Dataset.from_list(
                [{"prompt": prompt_text(prompt_id)} for prompt_id in range(steps * PROMPTS)]
            ),
            processing_class=tokenizer,
            callbacks=[clock],
        ).train()
    assert lengths == {NEW_TOKENS}, f"completions of {lengths} tokens"
    seconds = [end - begin for begin, end in zip(clock.ends, clock.ends[1:], strict=False)]
    print(json.dumps({"seconds": seconds, "rewards": rewards}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
