"""Tiller: RL post-training on torchtitan, vLLM and Monarch actors."""

from rl.platform import select_device

select_device()  # must precede every other torchtitan import
