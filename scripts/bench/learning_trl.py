"""Learning of TRL's GRPOTrainer on the word problems of docs/real-model.md, with the prompts, the
reward, the sizes and the loss of configs/smollm2.py. It lacks resampling and noise in the weights.

Usage: PYTHONPATH=. TRL_PYTHON scripts/bench/learning_trl.py MODEL PROBLEMS FILE [--steps N]
[--every N]

TRL_PYTHON is the interpreter that against_trl.py installs. MODEL and PROBLEMS are folders that
scripts/real_model.py writes. FILE gets a JSON line for each step and for each evaluation, which
scripts/plot_runs.py draws. A step has two updates, as in the config. Evaluation is greedy, on all
held-out problems; the seconds of steps are without it.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from grpo_trl import QUIET, exact_match
from grpo_work import CLIP, MAX_NORM
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from rl.tasks.calculations import share_of_calculations

SYSTEM = {"role": "system", "content": "Calculate."}
NEW_TOKENS = 40
UPDATES = 2
PARTIAL_CREDIT = 0.5
BATCH = 50


def prompts(problems: Path) -> list[dict[str, Any]]:
    """Return the prompts of a file of conversations, each with its solution."""
    rows = map(json.loads, problems.read_text().splitlines())
    return [{"prompt": [SYSTEM, *row["question"]], "answer": row["answer"]} for row in rows]


def reward(text: str, solution: str) -> float:
    """Return 1 for the answer, else the credit for the solution's calculations."""
    if exact_match(text, solution.split()[-1]):
        return 1.0
    return PARTIAL_CREDIT * share_of_calculations(solution.partition("####")[0], text)


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
        numbers = [each["answer"].split()[-1] for each in part]
        right += sum(map(exact_match, answers, numbers))
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
        step, more = divmod(state.global_step, UPDATES)
        if more:
            return
        self._add({"step": step, "timing/step": time.perf_counter() - self._began})
        if step % self._every == 0:
            self._write(step, given["model"])
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
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--every", type=int, default=10, help="steps between two evaluations")
    arguments = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model, padding_side="left")
    held = prompts(arguments.problems / "held_one_shot.jsonl")
    recorder = Recorder(arguments.file, arguments.every, tokenizer, held)

    def score(completions: list[Any], answer: list[str], **_: object) -> list[float]:
        texts = [messages[-1]["content"] for messages in completions]
        return [*map(reward, texts, answer)]

    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            max_steps=arguments.steps * UPDATES,
            per_device_train_batch_size=32,
            gradient_accumulation_steps=4,
            steps_per_generation=4 * UPDATES,
            num_generations=4,
            max_completion_length=NEW_TOKENS,
            temperature=1.2,
            learning_rate=3e-5,
            lr_scheduler_type="warmup_stable_decay",
            lr_scheduler_kwargs={
                "num_decay_steps": int(0.4 * arguments.steps * UPDATES),
                "decay_type": "linear",
            },
            warmup_steps=2 * UPDATES,
            adam_beta2=0.95,
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
            train_dataset=Dataset.from_list(prompts(arguments.problems / "train_one_shot.jsonl")),
            processing_class=tokenizer,
            callbacks=[recorder],
        ).train()


if __name__ == "__main__":
    main()
