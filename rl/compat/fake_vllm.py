"""vLLM on a fake device: its choices for a GPU, and its models without their kernels.

``believe`` and ``load`` change vLLM for the rest of the process.
"""

import importlib
import sys
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

KERNELS = (
    "vllm._C_stable_libtorch",
    "vllm._moe_C_stable_libtorch",
    "vllm._qutlass_C",
    "vllm.vllm_flash_attn",
    "vllm.vllm_flash_attn.flash_attn_interface",
)
"""Compiled parts of vLLM's CUDA build. Nothing here calls them."""
BACKENDS = "vllm.v1.attention.backends."


class _Kernels(ModuleType):
    """Module that has each function, which answers True."""

    __path__: Any = ()  # a package

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: True


class _Ranks:
    """Tensor-parallel group of vLLM that is torch's own group of all ranks."""

    def __init__(self) -> None:
        self.device_group = dist.group.WORLD
        self.world_size = dist.get_world_size()
        self.rank_in_group = dist.get_rank()

    def all_reduce(self, part: torch.Tensor) -> torch.Tensor:
        whole = part.clone()
        dist.all_reduce(whole)
        return whole

    def all_gather(self, part: torch.Tensor, dim: int) -> torch.Tensor:
        parts = [torch.empty_like(part) for _ in range(self.world_size)]
        dist.all_gather(parts, part)
        return torch.cat(parts, dim)


def believe(count: int) -> None:
    """Let vLLM, which must be imported, see ``count`` GPUs that torch believes in."""
    for name in KERNELS:
        sys.modules[name] = _Kernels(name)
    vars(torch._C)["_cuda_getDeviceCount"] = lambda: count
    from vllm.platforms.cuda import NonNvmlCudaPlatform

    platform = NonNvmlCudaPlatform()
    answers = {"current_platform": platform, "_current_platform": platform, "HAS_TRITON": True}
    for name, module in list(sys.modules.items()):
        if name.startswith("vllm"):
            known = vars(module)
            known.update({key: answers[key] for key in answers if key in known})
    for name in ("fa_utils", "flash_attn"):
        importlib.reload(importlib.import_module(BACKENDS + name))
    vars(importlib.import_module("vllm.device_allocator.cumem"))["cumem_available"] = True


def load(config: Any) -> Any:
    """Return the model of a ``VllmConfig``, made as vLLM's loaders make it but not compiled. Its
    tensor-parallel ranks are those of torch's process group.
    """
    from vllm.config import CompilationMode, set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    vars(parallel_state)["_TP"] = _Ranks()
    config.compilation_config.mode = CompilationMode.NONE
    dtype = config.model_config.dtype
    with set_current_vllm_config(config), set_default_torch_dtype(dtype), torch.device("cuda"):
        return initialize_model(vllm_config=config).eval()


def cache_of(config: Any) -> tuple[str, int]:
    """Return the name of the attention of a model that is loaded, and the bytes of a token in the
    KV cache of all layers with attention.
    """
    known = config.compilation_config.static_forward_context.values()
    layers = [layer for layer in known if hasattr(layer, "attn_backend")]
    specs = [layer.get_kv_cache_spec(config) for layer in layers]
    bytes = sum(spec.page_size_bytes // spec.block_size for spec in specs)
    return layers[0].attn_backend.get_name(), bytes
