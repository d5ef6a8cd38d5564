"""Rehearsal of a generator's rank: the model that vLLM runs, with vLLM's choices, on a fake device.

vLLM's model runner and its kernels do not run.
"""

import dataclasses
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torchtitan.distributed.utils import init_fake_mode

from rl.compat.fake_vllm import cache_of, load
from rl.errors import counted
from rl.generation import kernels
from rl.generation.start_vllm import vllm_config
from rl.plan.memory import kv_cache
from rl.plan.planned_run import PlannedRun
from rl.plan.rehearsal.device import FakeCuda


def run_generator(
    device: FakeCuda, run: PlannedRun, rank: int, folder: str
) -> tuple[Any, dict[str, Any]]:
    """Load a generator's model, run the step with which vLLM measures memory, and decode one token
    of one request, and of as many requests as the largest CUDA graph or an eager step has.

    Return the model, and as JSON-able data vLLM's choices and the bytes of the KV cache. ``folder``
    is empty.
    """
    ledger = device.ledger
    for name in ("rms_norm", "rotary_embedding"):
        setattr(kernels, name, _no_kernel)
    generator = dataclasses.replace(run.rl.generator, record_experts=run.record_bytes > 0)
    init_fake_mode(generator.tensor_parallel_degree, rank=rank)
    chosen = vllm_config(
        generator,
        run.shape,
        Path(folder),
        fuse_qkv=run.config.model.fuse_qkv,
        seed=0,
        timeout_s=1,
        in_turns="generator" in run.shared,
        parity=run.rl.parity,
    )
    model = load(chosen)
    attention, token = cache_of(chosen)
    tokens = chosen.scheduler_config.max_num_batched_tokens
    requests = min(tokens, chosen.scheduler_config.max_num_seqs)
    ledger.begin(f"step of {tokens} tokens")
    _sample(model, _forward(model, tokens)[:requests])
    cache = kv_cache(run, ledger.peak) // token * token
    ledger.begin("KV cache")
    model.rehearsed_cache = torch.empty(cache, dtype=torch.uint8, device="cuda")
    compilation = chosen.compilation_config
    graphs = compilation.cudagraph_mode.name
    sizes = compilation.cudagraph_capture_sizes or []
    captured = [size for size in sizes if size <= requests]
    for count in (1, max(captured, default=requests)):
        ledger.begin(f"{'graph' if captured else 'token'} of {counted(count, 'request')}")
        with device.capture() if captured else nullcontext():
            hidden = _forward(model, count)
        _sample(model, hidden)
    choices = {"attention": attention, "graphs": graphs, "captured": captured}
    return model, choices | {"cache": cache, "token": token}


@torch.no_grad()
def _forward(model: Any, tokens: int) -> torch.Tensor:
    ids = torch.zeros(tokens, dtype=torch.int32, device="cuda")
    hidden: torch.Tensor = model(ids, torch.zeros_like(ids, dtype=torch.int64))
    return hidden


@torch.no_grad()
def _sample(model: Any, hidden: torch.Tensor) -> None:
    logits = model.compute_logits(hidden)  # which stay beside both copies, as in vLLM
    logits.float().log_softmax(-1)


def _no_kernel(*arguments: Any) -> None:
    """Raise RuntimeError for tensors on several devices, as a kernel of vLLM does."""
    devices = {str(operand.device) for operand in arguments if isinstance(operand, torch.Tensor)}
    if len(devices) > 1:
        raise RuntimeError(f"a kernel of vLLM takes one device: {sorted(devices)}")
