"""Shape of the policy, its torchtitan config and the generator's tensor-parallel plan."""

from rl import platform as platform  # before torchtitan and torchao
