"""TRL's side of against_trl.py, run in TRL's environment: GRPOTrainer, with settings that suit a
CPU.

Usage: python scripts/bench/grpo_trl.py WORK_JSON

WORK_JSON has ``kind`` (one of grpo_work.WORKS), ``model`` (a folder), ``steps``, ``passes`` (into
which each process divides a batch), ``progress`` (a file that gets a line for each step),
``problems`` (a JSONL file for published models), and ``options`` of GRPOConfig. Prints one JSON
object: the seconds, the number of tokens, and the share of groups with equal rewards of each step.
With torch.distributed.run, the processes divide each step's completions.
"""

import json
import os
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from grpo_work import CLIP, END, INSTRUCTION, MAX_NORM, WORKS, Work
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

RANK = int(os.environ.get("RANK", "0"))
PROCESSES = int(os.environ.get("WORLD_SIZE", "1"))
QUIET: dict[str, Any] = {
    "use_cpu": True,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "dataloader_pin_memory": False,
}
"""Options of GRPOConfig for a CPU, without files and reports."""


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


def dataset(work: Work, steps: int, problems: str) -> Dataset:
    """Return the prompts of all steps, each with its answer."""
    count = steps * work.prompts
    if not work.published:
        texts = map(work.prompt_text, range(count))
        return Dataset.from_list([{"prompt": text, "answer": ""} for text in texts])
    return Dataset.from_list(prompts(Path(problems), INSTRUCTION)[:count])


def prompts(problems: Path, instruction: str) -> list[dict[str, Any]]:
    """Return the prompts of a file of problems, each with its answer."""
    rows = map(json.loads, problems.read_text().splitlines())
    return [
        {
            "prompt": [{"role": "user", "content": f"{row['question']}\n{instruction}"}],
            "answer": row["answer"].split()[-1],
        }
        for row in rows
    ]


def exact_match(text: str, answer: str) -> float:
    """Return whether the last number after the mark, or of a text without a mark, is the answer."""
    numbers = re.findall(r"-?\d[\d,]*(?:\.\d+)?", text.rpartition("####")[2])
    return float(bool(numbers) and numbers[-1].replace(",", "") == answer)


def main(path: str) -> None:
    given: dict[str, Any] = json.loads(Path(path).read_text())
    work = WORKS[given["kind"]]
    steps, passes = given["steps"], given["passes"]
    tokens: list[float] = []
    equal: list[float] = []

    def score(
        completion_ids: list[list[int]], completions: list[Any], answer: list[str], **_: object
    ) -> list[float]:
        lengths = [len(each) for each in completion_ids]
        assert work.ends or set(lengths) == {work.new_tokens}, f"completions of {lengths} tokens"
        drawn = config.steps_per_generation // passes  # steps whose completions are drawn at once
        tokens.extend([sum(lengths) * PROCESSES / drawn] * drawn)
        rewards = [work.reward(each) for each in completion_ids]
        if work.published:
            texts = [messages[-1]["content"] for messages in completions]
            rewards = [exact_match(*each) for each in zip(texts, answer, strict=True)]
        groups = [rewards[i : i + work.samples] for i in range(0, len(rewards), work.samples)]
        equal.extend([sum(len({*group}) == 1 for group in groups) / len(groups)] * drawn)
        return rewards

    tokenizer = AutoTokenizer.from_pretrained(given["model"])
    if not work.published:  # a token outside the vocabulary ends no completion
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
            logging_steps=steps,
            **QUIET,
            **given["options"],
        )
        GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(given["model"], dtype=torch.float32),
            reward_funcs=score,
            args=config,
            train_dataset=dataset(work, steps, given["problems"]),
            processing_class=tokenizer,
            callbacks=[clock],
        ).train()
    if RANK == 0:
        seconds = [end - begin for begin, end in zip(clock.ends, clock.ends[1:], strict=False)]
        print(json.dumps({"seconds": seconds, "tokens": tokens[:steps], "equal": equal[:steps]}))


if __name__ == "__main__":
    main(sys.argv[1])
