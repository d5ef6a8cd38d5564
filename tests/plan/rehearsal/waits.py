"""Waits of the host for the device that a step of training may have."""

import re

KNOWN = {
    "rl/training/engine.py _over_batch",  # number of micro-batches; weight of the whole batch
    "rl/training/micro_batches.py outputs_of",
    "rl/training/gradient.py _norm",
    "rl/training/metrics.py reduce",
    # torchtitan's, in each micro-batch
    "torchtitan/models/common/attention.py create_varlen_metadata_for_document",
    "torchtitan/models/common/token_dispatcher.py _sync_token_count_exchange",
}


def waits_of(rehearsed: dict) -> list[dict]:
    """Return the waits of steps, with ``place``, the line without its number."""
    return [
        wait | {"place": re.sub(r":\d+", "", wait["line"])}
        for wait in rehearsed["syncs"]
        if wait["phase"] != "init"
    ]


def is_known(wait: dict) -> bool:
    """Return whether the wait may happen."""
    return wait["place"] in KNOWN
