"""Environment variables that make ranks of torch.distributed connect to an existing store.

Imports nothing: processes that do not import torch use it too.
"""

EXISTING_STORE = {"TORCHELASTIC_USE_AGENT_STORE": "True"}
"""Environment in which ``init_process_group`` connects to a store instead of opening one."""
