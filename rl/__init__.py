"""Tiller: RL post-training on torchtitan, vLLM and Monarch actors."""

import logging

from rl.program import begin, is_starting

if is_starting():
    begin()  # importing torch takes seconds

from rl.platform import select_device

select_device()  # must precede every other torchtitan import
for name in ("torchao", "torch.utils._pytree"):
    # importing torchao warns of CUDA libraries, wanted or not
    logging.getLogger(name).setLevel(logging.ERROR)
