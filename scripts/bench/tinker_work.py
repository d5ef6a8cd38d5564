"""The work that a client of the Tinker SDK and a session both do.

Both sides read this file, in separate environments, so it imports nothing.
"""

import random

DATUMS = 16
TOKENS = 128
"""Number of tokens of a datum, with the one that is predicted last."""
RANK = 16
LEARNING_RATE = 1e-3
CLIENTS = 64
SAMPLES = 8
"""Number of samples that each client draws, one after another."""
PROMPT_TOKENS = 16
NEW_TOKENS = 16
NAME = "bench/model"
MODEL = {
    "vocab_size": 512,
    "dim": 256,
    "n_layers": 4,
    "n_heads": 4,
    "n_kv_heads": 2,
    "head_dim": 64,
    "hidden_dim": 768,
    "max_seq_len": TOKENS,
}
"""3.3 million parameters, as fields of rl.model.shape.ModelConfig."""


def tokens(name: str, count: int) -> list[int]:
    """Return random tokens, the same for the same name."""
    draw = random.Random(name)
    return [draw.randrange(MODEL["vocab_size"]) for _ in range(count)]
