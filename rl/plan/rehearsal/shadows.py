"""Numbers of small device tensors that follow from numbers of the host.

Code that asks a device for positions, counts or masks goes on as with a real device: a shadow is
the same tensor on the host.
"""

import math
from collections.abc import Callable
from typing import Any

import torch

from rl.compat.fake_cuda import FakeTensor, mutates, tree_leaves, tree_map_only

LONGEST = 1 << 24  # integers
LONGEST_FLOATS = 1 << 20
SAME_ON_ALL_RANKS = (
    "_c10d_functional.all_to_all_single.default",
    "_c10d_functional.wait_tensor.default",
    "_c10d_functional._wrap_tensor_autograd.default",
    "_c10d_functional_autograd.all_to_all_single.default",
)
FILLED: dict[str, Callable[[tuple], Any]] = {
    "aten.zeros_like.default": lambda args: 0,
    "aten.new_zeros.default": lambda args: 0,
    "aten.ones_like.default": lambda args: 1,
    "aten.new_ones.default": lambda args: 1,
    "aten.full_like.default": lambda args: args[1],
    "aten.new_full.default": lambda args: args[2],
}
"""Operators whose numbers do not follow from those of their first argument, and what they fill
with."""
COUNTED = (
    "aten.nonzero.default",
    "aten.repeat_interleave.Tensor",
    "aten.masked_select.default",
    "aten.index.Tensor",
)
"""Operators whose shape follows from numbers."""


def shadow_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the numbers of ``tensor``, on the host; None if they are unknown."""
    return getattr(tensor, "shadow", None) if isinstance(tensor, FakeTensor) else tensor


def set_shadow(tensor: torch.Tensor, numbers: torch.Tensor | None) -> None:
    """Set the numbers of a device tensor."""
    tensor.shadow = numbers  # type: ignore[attr-defined]


def computed(operator: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Return the result of the operator on the shadows of its arguments, or None if a number is
    unknown, too many would be computed, or the operator fails on the host. Memory that nothing has
    written to has zeros.

    Arguments that the operator writes into lose their shadow if the result is unknown.
    """
    name = str(operator)
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    if any(shadow_of(tensor) is None for tensor in tensors):
        if mutates(operator) and isinstance(args[0], FakeTensor):
            set_shadow(args[0], None)
        return None
    if name in SAME_ON_ALL_RANKS:
        return shadow_of(args[0]).clone()  # type: ignore[union-attr]
    unknown = any(part in name for part in ("rand", "c10d", "vllm."))
    if unknown or not _is_small(tensors, args, kwargs, name):
        return None
    real_args, real_kwargs = tree_map_only(torch.Tensor, shadow_of, (args, kwargs))
    if "device" in real_kwargs:
        real_kwargs["device"] = torch.device("cpu")
    real_kwargs.pop("non_blocking", None)
    try:
        with torch.no_grad():
            result = operator(*real_args, **real_kwargs)
            return result.zero_() if "empty" in name else result
    except (RuntimeError, NotImplementedError):  # no such kernel for the CPU
        return None


def attach(out: Any, numbers: Any) -> None:
    """Give each device tensor of ``out`` its numbers, in the order of ``numbers``."""
    if numbers is None:
        return
    for fake, real in zip(tree_leaves(out), tree_leaves(numbers), strict=False):
        if isinstance(fake, FakeTensor) and isinstance(real, torch.Tensor):
            set_shadow(fake, real if fake.shape == real.shape else None)


def filled(name: str, args: tuple, out: Any) -> torch.Tensor | None:
    """Return the numbers of ``out``, the result of an operator that fills."""
    if name not in FILLED or not is_short(out):
        return None
    return torch.empty(out.shape, dtype=out.dtype).fill_(FILLED[name](args))


def is_short(tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` has few enough elements for a shadow."""
    return tensor.numel() <= _limit(tensor.dtype)


def _limit(dtype: torch.dtype) -> int:
    return LONGEST_FLOATS if dtype.is_floating_point else LONGEST


def _is_small(tensors: list[torch.Tensor], args: tuple, kwargs: dict[str, Any], name: str) -> bool:
    if not all(map(is_short, tensors)):
        return False
    if not tensors:
        size = math.prod(max(1, leaf) for leaf in tree_leaves(args) if isinstance(leaf, int))
        return "empty" not in name and size <= _limit(kwargs.get("dtype") or torch.float32)
    try:
        return torch.broadcast_shapes(*(tensor.shape for tensor in tensors)).numel() <= LONGEST
    except RuntimeError:  # these are not broadcast
        return True
