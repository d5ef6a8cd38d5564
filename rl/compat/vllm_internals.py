"""The parts of a ``LLMEngine`` that runs in this process: model, caches, weight version.

Imports no vLLM.
"""

import sys
from typing import Any

import torch

RELIES_ON = {
    "vllm.v1.engine.llm_engine:LLMEngine.model_executor": "the way to the model in this process",
    "vllm.v1.executor.uniproc_executor:UniProcExecutor.driver_worker": "the same",
    "vllm.v1.worker.gpu_worker:Worker.get_model()": "the same",
    "vllm.v1.worker.gpu_worker:Worker.model_runner": "the way to the KV cache's memory",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.kv_caches": (
        "LLMEngine.sleep needs an allocator of vLLM's, which CPUs lack"
    ),
    "vllm.v1.engine.llm_engine:LLMEngine.engine_core": "LLMEngine passes neither of these on",
    "vllm.v1.engine.core_client:InprocClient.set_weight_version(weight_version)": "the same",
    "vllm.v1.engine.core_client:InprocClient.shutdown()": "the same",
    "vllm.v1.engine.core_client:InprocClient.engine_core": (
        "LLMEngine.reset_prefix_cache refuses while requests run, or has them start over"
    ),
    "vllm.v1.engine.core:EngineCore.scheduler": "the same",
    "vllm.v1.core.sched.scheduler:Scheduler.running": "the same",
    "vllm.v1.core.sched.scheduler:Scheduler.kv_cache_manager": "the same",
    "vllm.v1.core.kv_cache_manager:KVCacheManager.evict_blocks(block_ids)": "the same",
    "vllm.v1.core.kv_cache_manager:KVCacheManager.block_pool": "the same",
    "vllm.v1.core.kv_cache_manager:KVCacheManager.coordinator": "the same",
    "vllm.v1.core.block_pool:BlockPool.blocks": "the same",
    "vllm.v1.core.block_pool:BlockPool.cached_block_hash_to_block": "the same",
    "vllm.v1.core.kv_cache_utils:KVCacheBlock.block_id": "the same",
    "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator.single_type_managers": "the same",
    "vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager.num_cached_block": (
        "the same"
    ),
}


def model_of(engine: Any) -> Any:
    """Return the model that the engine runs."""
    return engine.model_executor.driver_worker.get_model()


def runner_of(engine: Any) -> Any:
    """Return the engine's model runner."""
    return engine.model_executor.driver_worker.model_runner


def kv_caches(engine: Any) -> list[torch.Tensor]:
    """Return the tensors that hold the engine's keys and values."""
    return runner_of(engine).kv_caches  # type: ignore[no-any-return]


def set_weight_version(engine: Any, version: str) -> None:
    """Have tokens from now on carry ``version``."""
    engine.engine_core.set_weight_version(version)


def shut_down(engine: Any) -> None:
    """Stop the engine and leave its process groups."""
    engine.engine_core.shutdown()


def forget_prefixes(engine: Any) -> bool:
    """Let no request find a block that was filled so far, or that a running request will fill; True
    where that took.

    Running requests keep their blocks and go on. One that is preempted later starts over like any
    other.
    """
    scheduler = engine.engine_core.engine_core.scheduler
    manager = scheduler.kv_cache_manager
    manager.evict_blocks({block.block_id for block in manager.block_pool.blocks})
    for request in scheduler.running:
        for group in manager.coordinator.single_type_managers:
            # "found by others already": adds no more
            group.num_cached_block[request.request_id] = sys.maxsize
    return len(manager.block_pool.cached_block_hash_to_block) == 0
