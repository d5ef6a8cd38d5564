"""The work that a client of the Tinker SDK and a session both do.

Both sides read this file, in separate environments, so it imports only what imports nothing.
"""

import random

import grpo_work

DATUMS = 16
TOKENS = 128
"""Number of tokens of a datum, with the one that is predicted last."""
RANK = 16
LEARNING_RATE = 1e-3
CLIENTS = 64
PROCESSES = 4
"""Number of processes that the clients of the SDK are in."""
SAMPLES = 8
"""Number of samples that each client draws, one after another."""
FLOOD_PROCESSES = 16
FLOOD = 32
"""Number of samples that each client then has in flight at once."""
PROMPT_TOKENS = 16
NEW_TOKENS = 16
NAME = "bench/model"
MODEL = grpo_work.MODEL | {"max_seq_len": TOKENS}


def tokens(name: str, count: int) -> list[int]:
    """Return random tokens, the same for the same name."""
    draw = random.Random(name)
    return [draw.randrange(MODEL["vocab_size"]) for _ in range(count)]
