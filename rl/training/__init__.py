"""Code of one trainer rank. It does not import Monarch and also runs under torch.distributed."""

from rl import platform as platform  # before torchtitan and torchao
