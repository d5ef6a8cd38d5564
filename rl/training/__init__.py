"""Code of one trainer rank. It does not import Monarch and also runs under torch.distributed."""

from rl.host.platform import import_attention  # before torchtitan and torchao

import_attention()
