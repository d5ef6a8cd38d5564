"""What runs inside one generator rank: the torchtitan model in vLLM, and the loop that steps it."""

from rl import platform as platform  # before torchtitan and torchao
