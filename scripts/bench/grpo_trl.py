"""TRL's side of against_trl.py, run in TRL's environment: GRPOTrainer, with settings that suit a
CPU.

Usage: python scripts/bench/grpo_trl.py WORK_JSON

WORK_JSON has ``kind`` (one of grpo_work.WORKS), ``model`` (a folder), ``steps``, ``passes`` (into
which each process divides a batch), ``progress`` (a file that gets a line for each step), and
``options`` of GRPOConfig. Prints one JSON object: the seconds and the number of tokens of each
step. With torch.distributed.run, the processes divide each step's completions.
"""

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from grpo_work import CLIP, END, MAX_NORM, WORKS
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

RANK = int(os.environ.get("RANK", "0"))
PROCESSES = int(os.environ.get("WORLD_SIZE", "1"))


class Clock(TrainerCallback):
    """Times at which steps ended; the first process writes a line to ``progress`` for each."""

    def __init__(self, progress: str) -> None:
        self.ends: list[float] = []
        self._progress = Path(progress)

    def on_train_begin(self, *_: object, **__: object) -> None:
        self.ends.append(time.perf_counter())

    def on_step_end(self, *_: object, **__: object) -> None:
        self.ends.append(time.perf_counter())
        if RANK == 0:
            with self._progress.open("a") as file:
                file.write(f"{len(self.ends) - 1}\n")


def main(path: str) -> None:
    given: dict[str, Any] = json.loads(Path(path).read_text())
    work = WORKS[given["kind"]]
    steps, passes = given["steps"], given["passes"]
    tokens: list[float] = []

    def score(completion_ids: list[list[int]], **_: object) -> list[float]:
        lengths = [len(each) for each in completion_ids]
        assert work.ends or set(lengths) == {work.new_tokens}, f"completions of {lengths} tokens"
        drawn = config.steps_per_generation // passes  # steps whose completions are drawn at once
        tokens.extend([sum(lengths) * PROCESSES / drawn] * drawn)
        return [work.reward(each) for each in completion_ids]

    tokenizer = AutoTokenizer.from_pretrained(given["model"])
    # a token outside the vocabulary ends no completion
    tokenizer.add_special_tokens({"eos_token": f"w{END}" if work.ends else "<never>"})
    clock = Clock(given["progress"])
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=work.prompts * work.samples // (passes * PROCESSES),
            gradient_accumulation_steps=passes,
            num_generations=work.samples,
            max_completion_length=work.new_tokens,
            learning_rate=work.learning_rate,
            lr_scheduler_type="constant",
            shuffle_dataset=False,
            max_grad_norm=MAX_NORM,
            epsilon=CLIP,
            beta=0.0,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            logging_steps=steps,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=False,
            **given["options"],
        )
        GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(given["model"], dtype=torch.float32),
            reward_funcs=score,
            args=config,
            train_dataset=Dataset.from_list(
                [
                    {"prompt": work.prompt_text(prompt_id)}
                    for prompt_id in range(steps * work.prompts)
                ]
            ),
            processing_class=tokenizer,
            callbacks=[clock],
        ).train()
    if RANK == 0:
        seconds = [end - begin for begin, end in zip(clock.ends, clock.ends[1:], strict=False)]
        print(json.dumps({"seconds": seconds, "tokens": tokens[:steps]}))


if __name__ == "__main__":
    main(sys.argv[1])
