"""TRL's side of sft_against_trl.py, run in TRL's environment: SFTTrainer and DPOTrainer, with
settings that suit a CPU.

Usage: python scripts/bench/sft_trl.py WORK_JSON

WORK_JSON has ``model`` and ``data`` (a folder and a JSONL file), ``trainer`` (sft or dpo),
``steps``, ``packing``, ``rows`` (of a forward pass), ``passes`` (of a step, of each process) and
``progress`` (a file that gets a line for each step).
Prints one JSON object: the seconds and the tokens of each step, and the mean loss. With
torch.distributed.run, the processes divide each step's rows.
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
from sft_work import BETA, LEARNING_RATE, MAX_NORM, MAX_TOKENS
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer


class Clock(TrainerCallback):
    """Times at which steps ended; the first process writes a line to ``progress`` for each."""

    def __init__(self, progress: str) -> None:
        self.ends: list[float] = []
        self._progress = Path(progress)

    def on_train_begin(self, *_: object, **__: object) -> None:
        self.ends.append(time.perf_counter())

    def on_step_end(self, *_: object, **__: object) -> None:
        self.ends.append(time.perf_counter())
        if int(os.environ.get("RANK", "0")) == 0:
            with self._progress.open("a") as file:
                file.write(f"{len(self.ends) - 1}\n")


def options(work: dict[str, Any], folder: str) -> dict[str, Any]:
    """Return the settings of both trainers. AdamW is as in torchtitan."""
    return {
        "output_dir": folder,
        "max_steps": work["steps"],
        "per_device_train_batch_size": work["rows"],
        "gradient_accumulation_steps": work["passes"],
        "train_sampling_strategy": "sequential",
        "max_length": MAX_TOKENS,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "adam_beta2": 0.95,
        "weight_decay": 0.0,
        "max_grad_norm": MAX_NORM,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "logging_steps": work["steps"],
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }


def trainer_of(work: dict[str, Any], folder: str, clock: Clock) -> Any:
    """Return the trainer that the work asks for."""
    lines = Path(work["data"]).read_text().splitlines()
    given = {
        "train_dataset": Dataset.from_list([json.loads(line) for line in lines]),
        "processing_class": AutoTokenizer.from_pretrained(work["model"]),
        "model": _model(work),
        "callbacks": [clock],
    }
    if work["trainer"] == "dpo":
        config = DPOConfig(beta=BETA, **options(work, folder))
        return DPOTrainer(ref_model=_model(work), args=config, **given)
    config = SFTConfig(packing=work["packing"], **options(work, folder))
    return SFTTrainer(args=config, **given)


def _model(work: dict[str, Any]) -> Any:
    return AutoModelForCausalLM.from_pretrained(work["model"], dtype=torch.float32)


def tokens_of(row: dict[str, Any]) -> int:
    """Return the number of tokens of a row of a trainer's dataset, without padding."""
    if "input_ids" in row:
        return len(row["input_ids"])
    return 2 * len(row["prompt_ids"]) + len(row["chosen_ids"]) + len(row["rejected_ids"])


def main(path: str) -> None:
    work = json.loads(Path(path).read_text())
    clock = Clock(work["progress"])
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(work, folder, clock)
        processes = int(os.environ.get("WORLD_SIZE", "1"))
        rows = work["rows"] * work["passes"] * processes
        lengths = [tokens_of(row) for row in trainer.train_dataset]
        assert len(lengths) >= rows * work["steps"], f"{len(lengths)} rows are too few"
        loss = trainer.train().training_loss
    if int(os.environ.get("RANK", "0")) == 0:
        seconds = [end - begin for begin, end in zip(clock.ends, clock.ends[1:], strict=False)]
        tokens = [sum(lengths[step * rows :][:rows]) for step in range(work["steps"])]
        print(json.dumps({"seconds": seconds, "tokens": tokens, "loss": loss}))


if __name__ == "__main__":
    main(sys.argv[1])
