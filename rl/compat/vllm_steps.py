"""Tokens that each step of a ``LLMEngine`` in this process computes, and their places in its KV
cache, with either model runner. Imports no vLLM before the engine has started.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np


class Stretch(NamedTuple):
    """Neighbouring tokens of a request."""

    name: str
    begin: int
    """Position of the first token."""
    end: int
    """Position after the last token."""


class Computed(NamedTuple):
    """Tokens of a request that a step has computed."""

    tokens: Stretch
    draws: bool
    """Whether the request's next token was drawn from the last of them."""


class Slots:
    """Places of tokens in the KV cache, numbered from 0 to ``count``."""

    def __init__(self, engine: Any):
        from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

        manager = engine.engine_core.engine_core.scheduler.kv_cache_manager
        groups = manager.coordinator.single_type_managers
        whole = [group for group in groups if isinstance(group, FullAttentionManager)]
        # layers with a window free the blocks behind it
        self._group = (whole or groups)[0]
        self._size = self._group.block_size
        self.count = len(manager.block_pool.blocks) * self._size
        first = manager.block_pool.null_block.block_id * self._size
        self.freed = slice(first, first + self._size)
        """Slots that stand for those of freed blocks. No step computes tokens there."""

    def of(self, stretches: Iterable[Stretch]) -> np.ndarray:
        """Return the slots of the tokens of all ``stretches``, int64 [T]."""
        size = self._size
        found: list[int] = []
        for name, begin, end in stretches:
            blocks = self._group.req_to_blocks[name]
            while begin < end:
                block, offset = divmod(begin, size)
                count = min(size - offset, end - begin)
                slot = blocks[block].block_id * size + offset
                found.extend(range(slot, slot + count))
                begin += count
        return np.array(found, dtype=np.int64)


def follow_steps(engine: Any, follow: Callable[[list[Computed]], None]) -> None:
    """Call ``follow`` after each forward pass with what it has computed, in the order of the
    model's input, while the requests still have their blocks.
    """
    scheduler = engine.engine_core.engine_core.scheduler
    update = scheduler.update_from_output

    def update_after(scheduler_output: Any, model_runner_output: Any) -> Any:
        counts = scheduler_output.num_scheduled_tokens
        computed = []
        for name in model_runner_output.req_ids:
            request = scheduler.requests[name]
            end = request.num_computed_tokens
            tokens = Stretch(name, end - counts[name], end)
            computed.append(Computed(tokens, end == request.num_tokens))
        follow(computed)
        return update(scheduler_output, model_runner_output)

    scheduler.update_from_output = update_after
