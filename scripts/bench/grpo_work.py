"""The work that TRL's GRPOTrainer and Tiller both do.

Both sides read this file, in separate environments, so it imports nothing.
"""

import random

PROMPTS = 8
SAMPLES = 8
NEW_TOKENS = 32
PROMPT_TOKENS = 16
LEARNING_RATE = 1e-3
CLIP = 0.2
MAX_NORM = 1.0
MODEL = {
    "vocab_size": 512,
    "dim": 256,
    "n_layers": 4,
    "n_heads": 4,
    "n_kv_heads": 2,
    "head_dim": 64,
    "hidden_dim": 768,
    "max_seq_len": PROMPT_TOKENS + NEW_TOKENS,
}
"""3.3 million parameters, as fields of rl.model.shape.ModelConfig."""


def prompt_text(prompt_id: int) -> str:
    """Return words of the tokenizer that against_trl.py writes."""
    draw = random.Random(f"prompt/{prompt_id}")
    return " ".join(f"w{draw.randrange(MODEL['vocab_size'])}" for _ in range(PROMPT_TOKENS))


def reward(tokens: list[int]) -> float:
    """Return the share of even tokens: cheap, and learned within a few steps."""
    return sum(token % 2 == 0 for token in tokens) / len(tokens)
