"""Lines that a rank writes to its log."""

import time

from rl.platform import peak_memory


def log(text: str) -> None:
    """Write a line with the time to the log of this process."""
    print(f"{time.strftime('%F %T')}  {text}", flush=True)


def log_memory(text: str) -> None:
    """Write a line with the time and the largest memory of this process so far."""
    log(f"{text}; memory at most {peak_memory() / 2**30:.2f} GiB so far")
