"""What a swap under running requests needs of the block cache of vLLM 0.32, and vLLM has no call
for.
"""

import sys


def forget(engine) -> bool:
    """Let nobody find a block that was filled so far, or that a running request will fill; True
    where that took.

    Running requests keep their blocks and go on. One that is preempted later starts over like any
    other.
    """
    scheduler = engine.engine_core.engine_core.scheduler
    manager = scheduler.kv_cache_manager
    manager.evict_blocks({block.block_id for block in manager.block_pool.blocks})
    for request in scheduler.running:
        for group in manager.coordinator.single_type_managers:
            group.num_cached_block[request.request_id] = (
                sys.maxsize
            )  # "found by others already": adds no more
    return len(manager.block_pool.cached_block_hash_to_block) == 0
