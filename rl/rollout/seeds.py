"""Seeds that depend on what is sampled, never on when."""

import hashlib


def derive_seed(
    run_seed: int, prompt_id: int, sample: int, turn: int = 0, *, stream: str = "train"
) -> int:
    """Seed in [0, 2^63) of one turn of one sample of one prompt; streams never share seeds."""
    key = f"{stream}/{run_seed}/{prompt_id}/{sample}/{turn}".encode()
    return int.from_bytes(hashlib.sha256(key).digest()[:8], "little") >> 1
