"""Supervised fine-tuning, then preferences, then reinforcement: each starts from the one before."""

import random

import pytest
import torch
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from transformers import AutoModelForCausalLM, Qwen3Config

import rl
from rl.algorithms.losses import grpo
from rl.cli.arguments import find_config
from rl.config import PreferenceDataConfig, SFTDataConfig
from rl.tasks.copy_digits import TOKEN, WORDS, is_held_out, word_tokenizer

STRINGS = [f"{number:03}" for number in range(1000)]
TRAINED = [digits for digits in STRINGS if not is_held_out(digits)]
HELD_OUT = [digits for digits in STRINGS if is_held_out(digits)]


@pytest.fixture
def base(tmp_path, seed):
    """Folder of a random model with the words of the task."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(WORDS),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=32,
        tie_word_embeddings=False,
        eos_token_id=TOKEN["<eos>"],
        pad_token_id=TOKEN["<pad>"],
        dtype="float32",
    )
    folder = tmp_path / "base"
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    return folder


def prompt(digits: str) -> str:
    return f"copy {' '.join(digits)} ="


def compared(digits: str) -> dict[str, str]:
    """Return a pair whose rejected answer has one wrong digit."""
    draws = random.Random(digits)
    wrong = [*digits]
    wrong[draws.randrange(3)] = draws.choice([each for each in "0123456789" if each not in digits])
    return {"prompt": prompt(digits), "chosen": " ".join(digits), "rejected": " ".join(wrong)}


def common(start, folder, seed: int, steps: int, lr: float) -> dict:
    """Return the fields that the configs of all stages share."""
    trainer = rl.TrainerConfig(
        optimizer=default_adamw(lr=lr, weight_decay=0.0),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=5, decay_ratio=0.0),
        micro_batch_size=256,
    )
    trainer.checkpoint.enable = False
    return {
        "model": rl.ModelConfig(hf_path=str(start), max_seq_len=32),
        "trainer": trainer,
        "steps": steps,
        "seed": seed,
        "output_dir": str(folder),
        "quiet": True,
    }


def measured(trainer, folder) -> tuple[dict[str, float], dict[str, float]]:
    """Train and save; return the scores before and after."""
    with trainer.blocking() as trainer:
        before = trainer.evaluate()
        trainer.train()
        trainer.save_pretrained(folder)
        after = trainer.evaluate()
    return before, after


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, 1])
def test_each_stage_improves_on_the_one_before(base, tmp_path, seed):
    def margin(scores: dict[str, float]) -> float:
        """Return the mean log-prob of chosen answers minus that of rejected ones, in nats."""
        return scores["eval/logps/chosen"] - scores["eval/logps/rejected"]

    def answered(digits: str) -> dict[str, str]:
        return {"prompt": prompt(digits), "completion": " ".join(digits)}

    sft = rl.SFTConfig(
        **common(base, tmp_path / "sft", seed, 28, 1e-3),
        task=SFTDataConfig(max_tokens=16),
        examples_per_step=64,
    )
    rows = [answered(digits) for digits in TRAINED]
    held_out = [answered(digits) for digits in HELD_OUT]
    before, tuned = measured(rl.SFTTrainer(sft, rows, held_out), tmp_path / "tuned")
    print("SFT, held-out nats a token:", before["eval/loss"], tuned["eval/loss"])

    dpo = rl.PreferenceConfig(
        **common(tmp_path / "tuned", tmp_path / "dpo", seed, 20, 1e-4),
        task=PreferenceDataConfig(max_tokens=16),
        examples_per_step=64,
    )
    rows = [compared(digits) for digits in TRAINED]
    held_out = [compared(digits) for digits in HELD_OUT]
    start, preferred = measured(rl.PreferenceTrainer(dpo, rows, held_out), tmp_path / "preferred")
    print("DPO, held-out margin in nats:", margin(start), margin(preferred))

    quickstart = find_config("quickstart")()
    fields = common(tmp_path / "preferred", tmp_path / "grpo", seed, 60, 1e-3)
    for name, value in fields.items():
        setattr(quickstart, name, value)
    quickstart.algorithm.loss = grpo(entropy_coef=0.01)
    quickstart.evaluation.prompts = len(HELD_OUT)
    quickstart.evaluation.samples = 0
    quickstart.generator.kv_cache_gib = 0.05
    chosen, rewarded = measured(rl.RLTrainer(quickstart), tmp_path / "rewarded")
    print("GRPO, held-out exact match:", chosen["eval/exact_match"], rewarded["eval/exact_match"])

    assert tuned["eval/loss"] < before["eval/loss"] / 2
    assert margin(preferred) > margin(start) + 0.3
    assert preferred["eval/rewards/accuracy"] > 0.8
    assert rewarded["eval/exact_match"] > chosen["eval/exact_match"] + 0.05
