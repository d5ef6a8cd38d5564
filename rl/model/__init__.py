"""Shape of the policy, its torchtitan config and the generator's tensor-parallel plan."""

from rl.host.platform import import_attention  # before torchtitan and torchao

import_attention()
