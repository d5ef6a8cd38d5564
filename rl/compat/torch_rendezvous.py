"""Environment variables that make ranks of torch.distributed connect to an existing store.

Imports nothing: processes that do not import torch use it too.
"""

RELIES_ON = (
    # init_process_group opens a store on rank 0 unless this variable of torchelastic is set
    "torch.distributed.rendezvous:_torchelastic_use_agent_store()",
)

EXISTING_STORE = {"TORCHELASTIC_USE_AGENT_STORE": "True"}
"""Environment in which ``init_process_group`` connects to a store instead of opening one."""
