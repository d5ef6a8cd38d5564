"""Learning of TRL's GRPOTrainer on the word problems of docs/real-model.md, with the sizes and the
loss of the runs that page calls sentences. It lacks their entropy bonus, resampling and falling
rate, and has one update a step.

Usage: TRL_PYTHON scripts/bench/learning_trl.py MODEL PROBLEMS FILE [--steps N] [--every N]

TRL_PYTHON is the interpreter that against_trl.py installs. MODEL and PROBLEMS are folders that
scripts/real_model.py writes. FILE gets a JSON line for each step and for each evaluation, which
scripts/plot_runs.py draws. Evaluation is greedy, on all held-out problems; the seconds of steps are
without it.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from grpo_trl import QUIET, exact_match, prompts
from grpo_work import CLIP, MAX_NORM
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

INSTRUCTION = "Show each calculation in one short line."
NEW_TOKENS = 48
BATCH = 50


def evaluated(model: Any, tokenizer: Any, problems: list[dict[str, Any]]) -> float:
    """Return the share of problems that the model answers right."""
    right = 0.0
    for start in range(0, len(problems), BATCH):
        part = problems[start : start + BATCH]
        texts = tokenizer.apply_chat_template(
            [each["prompt"] for each in part],
            add_generation_prompt=True,
            return_dict=True,
            return_tensors="pt",
            padding=True,
        )
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            ids = model.generate(**texts, do_sample=False, max_new_tokens=NEW_TOKENS)
        answers = tokenizer.batch_decode(
            ids[:, texts["input_ids"].shape[1] :], skip_special_tokens=True
        )
        right += sum(map(exact_match, answers, (each["answer"] for each in part)))
    return right / len(problems)


class Recorder(TrainerCallback):
    """Writes the seconds of each step, and evaluates every few steps."""

    def __init__(self, file: Path, every: int, tokenizer: Any, held: list[dict[str, Any]]):
        self._file = file
        self._every = every
        self._tokenizer = tokenizer
        self._held = held

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self._write(0, given["model"])

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        row = {"step": state.global_step, "timing/step": time.perf_counter() - self._began}
        self._add(row)
        if state.global_step % self._every == 0:
            self._write(state.global_step, given["model"])
        self._began = time.perf_counter()

    def _write(self, step: int, model: Any) -> None:
        share = evaluated(model, self._tokenizer, self._held)
        self._add({"step": step, "eval/exact_match": share})
        self._began = time.perf_counter()

    def _add(self, row: dict[str, float]) -> None:
        print(row, flush=True)
        with self._file.open("a") as file:
            file.write(f"{json.dumps(row)}\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("model", "problems", "file"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=10, help="steps between two evaluations")
    arguments = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model, padding_side="left")
    held = prompts(arguments.problems / "held.jsonl", INSTRUCTION)
    recorder = Recorder(arguments.file, arguments.every, tokenizer, held)

    def score(completions: list[Any], answer: list[str], **_: object) -> list[float]:
        texts = [messages[-1]["content"] for messages in completions]
        return [*map(exact_match, texts, answer)]

    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            max_steps=arguments.steps,
            per_device_train_batch_size=32,
            gradient_accumulation_steps=4,
            num_generations=8,
            max_completion_length=NEW_TOKENS,
            temperature=0.5,
            learning_rate=3e-5,
            lr_scheduler_type="constant_with_warmup",
            warmup_steps=2,
            max_grad_norm=MAX_NORM,
            epsilon=CLIP,
            epsilon_high=0.28,
            loss_type="dapo",
            beta=0.0,
            bf16=True,
            gradient_checkpointing=False,
            **QUIET,
        )
        GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32),
            reward_funcs=score,
            args=config,
            train_dataset=Dataset.from_list(
                prompts(arguments.problems / "train.jsonl", INSTRUCTION)
            ),
            processing_class=tokenizer,
            callbacks=[recorder],
        ).train()


if __name__ == "__main__":
    main()
