"""Seeds that depend on the sample, not on the time of sampling."""

import hashlib


def derive_seed(
    run_seed: int, prompt_id: int, sample: int, turn: int = 0, *, stream: str = "train"
) -> int:
    """Return the seed in [0, 2^63) of a turn of a sample of a prompt; streams share no seeds."""
    key = f"{stream}/{run_seed}/{prompt_id}/{sample}/{turn}".encode()
    return int.from_bytes(hashlib.sha256(key).digest()[:8], "little") >> 1
