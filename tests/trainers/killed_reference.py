"""Program of a test: a preference run that kills itself while the reference scores examples.

Usage: python -m tests.trainers.killed_reference MODEL EXAMPLES RUN BATCHES
"""

import os
import signal
import sys

from configs.dpo_jsonl import dpo_jsonl
from rl.config import PreferenceConfig
from rl.trainers import reference_scores
from rl.trainers.preference import PreferenceTrainer


def config_of(model: str, examples: str, run: str) -> PreferenceConfig:
    """Return a config of four steps on four examples each."""
    config = dpo_jsonl()
    config.model.hf_path = model
    config.model.max_seq_len = 128
    config.task.path = examples
    config.task.max_tokens = 96
    config.task.held_out_fraction = 0.2
    config.examples_per_step = 4
    config.steps = 4
    config.trainer.optimizer.param_groups[0].optimizer_kwargs["lr"] = 1e-3
    config.trainer.lr_scheduler.warmup_steps = 0
    config.reference.scores = "cached"
    config.output_dir = run
    config.quiet = True
    return config


class Counting(PreferenceTrainer):
    """Counts the batches that the reference scores, and kills the process before batch ``last``."""

    last = 1000
    batches = 0

    async def scores_of(self, batch, role):
        self.batches += role == "reference"
        if self.batches == self.last:
            os.kill(os.getpid(), signal.SIGKILL)
        return await super().scores_of(batch, role)


if __name__ == "__main__":
    reference_scores.EVERY_S = 0.0
    *places, batches = sys.argv[1:]
    with Counting(config_of(*places)) as trainer:
        trainer.last = int(batches)
        trainer.train()
