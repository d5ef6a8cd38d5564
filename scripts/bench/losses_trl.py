"""TRL's side of losses_against_trl.py, run in TRL's environment: the losses of its trainers.

Usage: python scripts/bench/losses_trl.py FOLDER

Reads the models ``policy``, ``reference`` and ``judge``, and ``work.json``, in FOLDER. Prints one
JSON object: by name of a loss, its value, the norm of its gradient and metrics.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)
from trl import (
    DPOConfig,
    DPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)
from trl.experimental.cpo import CPOConfig, CPOTrainer

Answer = dict[str, float]
PAIR = {"prompt": "w1 w2", "chosen": "w3 w4", "rejected": "w5 w6"}
"""Data set that the trainers are built with; the losses are computed on work.json."""


class Side:
    """TRL's trainers on the models and the work in a folder."""

    def __init__(self, folder: Path, output: str):
        self.folder = folder
        self.work: dict[str, Any] = json.loads((folder / "work.json").read_text())
        self.tokenizer = AutoTokenizer.from_pretrained(folder / "policy")
        self.tokenizer.add_special_tokens({"eos_token": "<never>"})
        self.config = {
            "output_dir": output,
            "use_cpu": True,
            "bf16": False,
            "gradient_checkpointing": False,
            "report_to": "none",
            "per_device_train_batch_size": len(self.work["pairs"]),
        }

    def sft(self) -> Answer:
        """SFTTrainer's loss of all chosen and rejected answers."""
        trainer = SFTTrainer(
            model=self._policy("policy"),
            args=SFTConfig(**self.config),
            train_dataset=Dataset.from_list([{"prompt": "w1 w2", "completion": "w3 w4"}]),
            processing_class=self.tokenizer,
        )
        examples = [
            {
                "input_ids": pair["prompt_ids"] + pair[name],
                "labels": [-100] * len(pair["prompt_ids"]) + pair[name],
            }
            for pair in self.work["pairs"]
            for name in ("chosen_ids", "rejected_ids")
        ]
        return self._answer(trainer, trainer.data_collator(examples))

    def dpo(self, loss_type: str, beta: float) -> Answer:
        """DPOTrainer's ``sigmoid`` or ``ipo``."""
        trainer = DPOTrainer(
            model=self._policy("policy"),
            ref_model=self._policy("reference"),
            args=DPOConfig(loss_type=[loss_type], beta=beta, **self.config),
            train_dataset=Dataset.from_list([PAIR]),
            processing_class=self.tokenizer,
        )
        names = ("prompt_ids", "chosen_ids", "rejected_ids")
        examples = [{name: pair[name] for name in names} for pair in self.work["pairs"]]
        return self._answer(trainer, trainer.data_collator(examples))

    def kto(self, beta: float, desirable: float, undesirable: float) -> Answer:
        """KTOTrainer's ``kto``, on mismatched completions that the work names."""
        trainer = KTOTrainer(
            model=self._policy("policy"),
            ref_model=self._policy("reference"),
            args=KTOConfig(
                beta=beta,
                desirable_weight=desirable,
                undesirable_weight=undesirable,
                train_sampling_strategy="sequential",
                **self.config,
            ),
            train_dataset=Dataset.from_list(
                [{"prompt": "w1 w2", "completion": f"w{n}", "label": n > 3} for n in (3, 4)]
            ),
            processing_class=self.tokenizer,
        )
        return self._answer(trainer, trainer.data_collator(self.work["unpaired"]))

    def simpo(self, beta: float, gamma: float) -> Answer:
        """CPOTrainer's ``simpo`` without its likelihood term."""
        trainer = CPOTrainer(
            model=self._policy("policy"),
            args=CPOConfig(
                loss_type="simpo", beta=beta, simpo_gamma=gamma, cpo_alpha=0.0, **self.config
            ),
            train_dataset=Dataset.from_list([PAIR]),
            processing_class=self.tokenizer,
        )
        examples = []
        for pair in self.work["pairs"]:
            example = {}
            for side in ("chosen", "rejected"):
                tokens = pair["prompt_ids"] + pair[f"{side}_ids"]
                example[f"{side}_input_ids"] = tokens
                example[f"{side}_attention_mask"] = [1] * len(tokens)
                labels = [-100] * len(pair["prompt_ids"]) + pair[f"{side}_ids"]
                example[f"{side}_labels"] = labels
            examples.append(example)
        inputs = trainer.data_collator(examples)
        loss, metrics = trainer.get_batch_loss_metrics(trainer.model, inputs, "train")
        return self._learned(trainer, loss) | metrics

    def reward(self, centering: float, with_margins: bool) -> Answer:
        """RewardTrainer's loss."""
        trainer = RewardTrainer(
            model=AutoModelForSequenceClassification.from_pretrained(
                self.folder / "judge", dtype=torch.float32
            ),
            args=RewardConfig(center_rewards_coefficient=centering, **self.config),
            train_dataset=Dataset.from_list([PAIR]),
            processing_class=self.tokenizer,
        )
        examples = []
        for pair in self.work["pairs"]:
            example = {
                name: pair["prompt_ids"] + pair[name] for name in ("chosen_ids", "rejected_ids")
            }
            examples.append(example | ({"margin": pair["margin"]} if with_margins else {}))
        return self._answer(trainer, trainer.data_collator(examples))

    def _policy(self, name: str) -> Any:
        return AutoModelForCausalLM.from_pretrained(self.folder / name, dtype=torch.float32)

    def _answer(self, trainer: Any, inputs: dict[str, torch.Tensor]) -> Answer:
        trainer.model.train()
        loss = trainer.compute_loss(trainer.model, inputs)
        metrics = {name: values[-1] for name, values in trainer._metrics["train"].items() if values}
        return self._learned(trainer, loss) | metrics

    def _learned(self, trainer: Any, loss: torch.Tensor) -> Answer:
        loss.backward()
        gradients = [p.grad.double() for p in trainer.model.parameters() if p.grad is not None]
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        return {"loss": float(loss), "grad_norm": float(norm)}


def main(folder: str) -> None:
    with tempfile.TemporaryDirectory() as output:
        side = Side(Path(folder), output)
        answers = {
            name: getattr(side, method)(**options)
            for name, (method, options) in side.work["losses"].items()
        }
    print(json.dumps(answers))


if __name__ == "__main__":
    main(sys.argv[1])
