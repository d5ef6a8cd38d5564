"""The policy's shape, its torchtitan config and the generator's tensor-parallel table."""

from rl import platform as platform  # before torchtitan and torchao
