"""One generator rank: the torchtitan model in vLLM, and the loop that steps the engine."""

from rl.host.platform import import_attention  # before torchtitan and torchao

import_attention()
