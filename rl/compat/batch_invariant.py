"""vLLM's CUDA kernels whose sums do not depend on the number of rows. No test covers CUDA."""

import torch
from vllm.model_executor.determinism.batch_invariant import (
    addmm_batch_invariant,
    enable_batch_invariant_mode,
    mm_batch_invariant,
)

_registered: torch.library.Library | None = None  # keeps the kernels registered


def use_batch_invariant_kernels() -> None:
    """Replace the CUDA kernels of products, softmax, log-softmax and means in this process, below
    autograd.
    """
    global _registered
    if _registered is None:
        enable_batch_invariant_mode()
        _registered = torch.library.Library("aten", "IMPL")
        # from Hopper on vLLM keeps cuBLAS, except for the head of a model
        _registered.impl("mm", mm_batch_invariant, "CUDA", allow_override=True)
        _registered.impl("addmm", addmm_batch_invariant, "CUDA", allow_override=True)
