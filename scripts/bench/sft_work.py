"""The work that TRL's SFTTrainer and DPOTrainer and Tiller's trainers do.

Both sides read this file, in separate environments, so it imports the standard library alone.
"""

import random

EXAMPLES = 32
PAIRS = 16
MAX_TOKENS = 512
LEARNING_RATE = 1e-4
BETA = 0.1
MAX_NORM = 1.0
MODEL = {
    "vocab_size": 512,
    "dim": 256,
    "n_layers": 4,
    "n_heads": 4,
    "n_kv_heads": 2,
    "head_dim": 64,
    "hidden_dim": 768,
    "max_seq_len": MAX_TOKENS,
}
"""3.3 million parameters, as fields of rl.model.shape.ModelConfig."""


def answers(count: int) -> list[dict[str, str]]:
    """Return ``count`` prompts with a completion each, in words of the tokenizer."""
    return [
        {"prompt": _prompt(draw), "completion": _answer(draw)}
        for draw in (random.Random(f"answer/{number}") for number in range(count))
    ]


def preferences(count: int) -> list[dict[str, str]]:
    """Return ``count`` prompts with two answers each, in words of the tokenizer."""
    return [
        {"prompt": _prompt(draw), "chosen": _answer(draw), "rejected": _answer(draw)}
        for draw in (random.Random(f"preference/{number}") for number in range(count))
    ]


def _prompt(draw: random.Random) -> str:
    return _words(draw, draw.randint(8, 64))


def _answer(draw: random.Random) -> str:
    """Return words. Their number varies as in conversations: the median is 90, the largest 440."""
    length = min(440, max(4, round(draw.lognormvariate(4.5, 0.8))))
    return " " + _words(draw, length)


def _words(draw: random.Random, count: int) -> str:
    return " ".join(f"w{draw.randrange(2, MODEL['vocab_size'])}" for _ in range(count))
