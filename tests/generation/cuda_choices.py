"""Choices that vLLM would make on GPUs for the arguments of our engine, computed without a GPU.

``python -m tests.generation.cuda_choices FILE`` writes the choices of every case, which
cuda_choices.json holds. It changes torch and vLLM from inside, so that it needs a process of its
own.
"""

import importlib
import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from configs.quickstart import quickstart
from configs.qwen3 import qwen3_0_6b, qwen3_8b, qwen3_30b_a3b
from rl.compat import fake_vllm
from rl.compat.fake_cuda import pretend
from rl.compat.titan import tell_device
from rl.config import RLConfig
from rl.model.shape import ModelShape, shape_of

H100: Any = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    bytes=80 << 30,
    capability=(9, 0),
    count=8,
    used=0,
    peak=0,
    holds=lambda key: False,
    called=lambda name: None,
)


def in_turns() -> RLConfig:
    """Return a config whose trainer and generators share GPUs."""
    config = qwen3_8b()
    config.rollout.max_staleness = 0
    config.colocate = "all"
    return config


GRAPHS = {"dtype": "bfloat16", "enforce_eager": False}
CASES: dict[str, tuple[Callable[[], RLConfig], dict[str, Any]]] = {
    "quickstart": (quickstart, {}),
    "0.6B, float32, eager": (qwen3_0_6b, {"dtype": "float32", "enforce_eager": True}),
    "0.6B, float32, graphs": (qwen3_0_6b, {"dtype": "float32", "enforce_eager": False}),
    "0.6B, bfloat16, eager": (qwen3_0_6b, {"dtype": "bfloat16", "enforce_eager": True}),
    "0.6B, bfloat16, graphs": (qwen3_0_6b, GRAPHS),
    "8B, bfloat16, graphs": (qwen3_8b, GRAPHS),
    "8B, bfloat16, graphs, TP 2": (qwen3_8b, GRAPHS | {"tensor_parallel_degree": 2}),
    "8B, bfloat16, graphs, in turns": (in_turns, GRAPHS),
    "30B-A3B as shipped": (qwen3_30b_a3b, {}),
    "30B-A3B, whole experts": (qwen3_30b_a3b, {"expert_parallel": True}),
}
"""Configs and changes of their generators."""


def believe_in_gpus() -> None:
    """Let torch, torchtitan and vLLM see eight H100s for the rest of the process."""
    importlib.import_module("rl.generation.vllm_model")  # vLLM as this host has it
    pretend(H100)
    tell_device("cuda", torch.cuda)
    fake_vllm.believe(H100.count)


def choices(config: Any, backend: str) -> dict[str, Any]:
    """Return what vLLM chose in a ``VllmConfig``, by name."""
    compilation = config.compilation_config
    scheduler = config.scheduler_config
    cache = config.cache_config
    model = config.model_config
    parallel = config.parallel_config
    sizes = compilation.cudagraph_capture_sizes or []
    return {
        "model runner": "V2" if config.use_v2_model_runner else "V1",
        "attention": backend,
        "compilation": compilation.mode.name,
        "CUDA graphs": compilation.cudagraph_mode.name,
        "number of graphs' sizes, and the largest": [len(sizes), max(sizes, default=0)],
        "compiled code is split at attention": "vllm::unified_attention_with_output"
        in (compilation.splitting_ops or []),
        "warm-up of kernels": config.kernel_config.enable_jit_warmup,
        "chunked prefill": scheduler.enable_chunked_prefill,
        "tokens in a step": scheduler.max_num_batched_tokens,
        "requests in a step": scheduler.max_num_seqs,
        "schedules ahead": scheduler.async_scheduling,
        "block size": cache.block_size,
        "dtype of the KV cache": str(cache.cache_dtype),
        "prefix caching": cache.enable_prefix_caching,
        "weights and KV cache in pools that sleep": model.enable_sleep_mode
        and model.enable_cumem_allocator,
        "bytes of the KV cache": cache.kv_cache_memory_bytes,
        "share of the memory": cache.gpu_memory_utilization,
        "dtype": str(model.dtype),
        "longest sequence": model.max_model_len,
        "log-probs": model.logprobs_mode,
        "seed": model.seed,
        "ranks": parallel.tensor_parallel_size,
        "launcher": str(parallel.distributed_executor_backend),
        "vLLM's own all-reduce": not parallel.disable_custom_all_reduce,
        "loader": str(config.load_config.load_format),
    }


def chosen(config: RLConfig, changes: dict[str, Any]) -> dict[str, Any]:
    """Return vLLM's choices for the generators of ``config`` with ``changes``."""
    from rl.generation.start_vllm import vllm_config

    model = config.model
    shape = shape_of(model)
    generator = replace(config.generator, **changes)
    options = {"fuse_qkv": model.fuse_qkv, "seed": 0, "timeout_s": 600}
    with tempfile.TemporaryDirectory() as folder:
        in_turns = config.colocate == "all"
        found = vllm_config(generator, shape, Path(folder), in_turns=in_turns, **options)
    return choices(found, attention_backend(found, shape))


def attention_backend(config: Any, shape: ModelShape) -> str:
    """Return the attention that a layer of the model would choose."""
    from vllm.config import set_current_vllm_config
    from vllm.v1.attention.selector import get_attn_backend

    cache = config.cache_config.cache_dtype
    with set_current_vllm_config(config):
        return get_attn_backend(shape.head_dim, config.model_config.dtype, cache).get_name()


if __name__ == "__main__":
    believe_in_gpus()
    found = {name: chosen(make(), changes) for name, (make, changes) in CASES.items()}
    Path(sys.argv[1]).write_text(json.dumps(found, indent=1) + "\n")
