"""One generator rank: the torchtitan model in vLLM, and the loop that steps the engine."""

from rl import platform as platform  # before torchtitan and torchao
