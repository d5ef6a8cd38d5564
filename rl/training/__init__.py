"""What runs inside one trainer rank.

Imports no Monarch: it runs under plain torch.distributed too.
"""

from rl import platform as platform  # before torchtitan and torchao
