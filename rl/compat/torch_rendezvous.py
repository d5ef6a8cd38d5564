"""The environment in which ranks of torch.distributed meet at a store that is there already.

Imports nothing: processes without a model of torch use it too.
"""

RELIES_ON = {
    "torch.distributed.rendezvous:_torchelastic_use_agent_store()": (
        "init_process_group opens a store on rank 0 unless this variable of torchelastic is set"
    ),
}

EXISTING_STORE = {"TORCHELASTIC_USE_AGENT_STORE": "True"}
"""Environment in which ``init_process_group`` connects to a store and does not open one."""
