"""Triton kernels of a generator on H100s, compiled without a GPU.

``python -m tests.generation.triton_kernels FILE`` compiles the launches that ``launches`` recorded
in FILE, and those of the kernels that Triton's interpreter cannot run. It prints JSON: registers,
shared memory and threads of each kernel. It needs a process of its own, in which Triton takes an
H100 for its device.
"""

import importlib
import json
import pickle
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

WORDS = 151_936
"""Vocabulary of Qwen3."""
HEADS = {"Qwen3-0.6B": (16, 8, 128), "Qwen3-8B": (32, 8, 128), "Llama-3.2-1B": (32, 8, 64)}
"""Number of heads of queries and of keys, and their size."""


@dataclass(frozen=True)
class Pointer:
    """A tensor's dtype, in place of an argument of a kernel."""

    dtype: torch.dtype

    def data_ptr(self) -> int:
        return 0  # a multiple of 16, as torch allocates

    def ptr_range(self) -> int:
        return 0


def launches(engine: Any, requests: list[Any]) -> list[tuple[str, tuple, dict[str, Any]]]:
    """Return the kernels that Triton's interpreter launches for ``requests``, with arguments."""
    from triton.runtime.interpreter import GridExecutor

    from tests.kit.generator_ranks import generate

    recorded: dict[str, tuple[str, tuple, dict[str, Any]]] = {}
    run = GridExecutor.__call__

    def record(self: Any, *args: Any, **kwargs: Any) -> Any:
        name = f"{self.fn.__module__}:{self.fn.__qualname__}"
        launch = (
            name,
            tuple(map(_as_pointer, args)),
            {k: _as_pointer(v) for k, v in kwargs.items()},
        )
        recorded[repr((name, launch[1:]))] = launch
        return run(self, *args, **kwargs)

    GridExecutor.__call__ = record
    try:
        generate(engine, requests)
    finally:
        GridExecutor.__call__ = run
    return [*recorded.values()]


def _as_pointer(value: Any) -> Any:
    return Pointer(value.dtype) if hasattr(value, "data_ptr") else value


class Cuda90:
    """Driver of an H100 that compiles and launches nothing."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def main(file: Path) -> None:
    """Print the resources of every kernel."""
    import triton
    from triton.backends import backends
    from triton.runtime.jit import JITFunction

    backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True))
    importlib.import_module("vllm.triton_utils")  # looks for a driver
    del backends["cpu"]
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    triton.runtime.driver.set_active(Cuda90())
    found: list[dict[str, Any]] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        found.append({"kernel": f"{self.module}:{self.fn.__qualname__}"} | resources(kernel))

    JITFunction.run = compile_only
    for name, args, kwargs in pickle.loads(file.read_bytes()):
        module, _, path = name.partition(":")
        kernel = getattr(importlib.import_module(module), path)
        while not isinstance(kernel, JITFunction):
            kernel = kernel.fn
        kernel[(1,)](*args, **kwargs)
    for heads in HEADS.values():
        attend(*heads)
    cut()
    print(json.dumps(found))


def attend(heads: int, kv_heads: int, size: int) -> None:
    """Attend in float32 to a KV cache: one token of each sequence, or a prompt."""
    from vllm.v1.attention.ops.triton_reshape_and_cache_flash import triton_reshape_and_cache_flash
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention

    sequences, segments = 4, 16
    cache = torch.zeros(8, 16, kv_heads, size)
    scale = torch.ones(1).expand(sequences, kv_heads)
    integers = torch.zeros(64, dtype=torch.int32)
    for longest in (1, 16):
        queries = torch.zeros(sequences * longest, heads, size)
        keys = torch.zeros(sequences * longest, kv_heads, size)
        slots = torch.zeros(len(keys), dtype=torch.int64)
        triton_reshape_and_cache_flash(keys, keys, cache, cache, slots, "auto", scale, scale)
        unified_attention(
            queries,
            cache,
            cache,
            torch.empty_like(queries),
            cu_seqlens_q=integers[: sequences + 1],
            max_seqlen_q=longest,
            seqused_k=integers[:sequences],
            max_seqlen_k=128,
            softmax_scale=size**-0.5,
            causal=True,
            window_size=(-1, -1),
            block_table=integers.view(sequences, 16),
            softcap=0,
            q_descale=None,
            k_descale=scale,
            v_descale=scale,
            seq_threshold_3D=64,
            num_par_softmax_segments=segments,
            softmax_segm_output=torch.empty(64, heads, segments, size),
            softmax_segm_max=torch.empty(64, heads, segments),
            softmax_segm_expsum=torch.empty(64, heads, segments),
        )


def cut() -> None:
    """Cut logits by top-k and by top-p."""
    from vllm.v1.sample.ops import topk_topp_triton as ops

    ops.num_compute_units = lambda *_: 132
    logits = torch.zeros(8, WORDS)
    k, p = torch.full((8,), 50, dtype=torch.int32), torch.full((8,), 0.9)
    for each in ((k, p), (k, None), (None, p)):
        ops.apply_top_k_top_p_triton(logits, *each)
    for each in (k, None):
        ops._apply_topp_split(logits, each, p, float("-inf"), 132)


def resources(kernel: Any) -> dict[str, int]:
    """Return registers and local memory of a thread, shared memory of a block, and its threads."""
    from triton.backends import nvidia

    program = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [str(program), "-res-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    used = {name: int(number) for name, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", said)}
    return {
        "registers": used["REG"],
        "spilled": used["STACK"] + used["LOCAL"],
        "shared": kernel.metadata.shared,
        "threads": 32 * kernel.metadata.num_warps,
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]))
