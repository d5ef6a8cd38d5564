"""Random schedules of requests with chunks, preemption, shared prefixes and new weights."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from tests.kit.generator_ranks import push, request, scheduler_of

BORDERS = [1, 2, 15, 16, 24, 31, 32, 33, 63, 64, 65, 127, 128, 129, 150]
"""Lengths of prompts around those of blocks and of chunks of a delta rule."""


def schedule(
    number: int, rng: np.random.Generator, words: int, rooms: Sequence[int], **sampling: object
) -> dict:
    """Return requests of ``words`` ids, their arrivals, and what disturbs them. ``rooms`` are
    numbers of free blocks of the cache among which is drawn. Every second schedule has a swap.
    """

    def ask(name: str, prompt: list[int], seed: int, tokens: int = 40):
        return request(name, prompt, seed=seed, max_tokens=tokens, **sampling)

    def ids(length: int) -> list[int]:
        return rng.integers(words, size=length).tolist()

    asks = []
    for group in range(int(rng.integers(1, 4))):
        one = ask(f"{number}-{group}", ids(int(rng.choice(BORDERS))), 0)
        samples = int(rng.choice([1, 2, 4]))
        asks += [replace(one, request_id=f"{one.request_id}-{n}", seed=n) for n in range(samples)]
    turn = [*asks[0].prompt_tokens, *ids(30)]
    asks.append(ask(f"{number}-turn", turn, 5, int(rng.integers(1, 40))))
    return {
        "asks": asks,
        "arrivals": np.sort(rng.integers(0, 30, size=len(asks))).tolist(),
        "tokens": int(rng.choice([17, 37, 64, 100, 256])),
        "room": rng.choice([None, *rooms]),
        "swap": int(rng.integers(2, 40)) if number % 2 else None,
    }


# Run on the ranks.


def play(engine, plan: dict, newer: dict[str, torch.Tensor]) -> tuple:
    """Return completions, and the numbers of cached tokens and of preemptions."""
    scheduler = scheduler_of(engine)
    pool = scheduler.kv_cache_manager.block_pool
    usual = scheduler.max_num_scheduled_tokens
    before = engine._requests.counts.copy()
    room = plan["room"]
    scheduler.max_num_scheduled_tokens = plan["tokens"]

    def take() -> list:
        return pool.get_new_blocks(0 if room is None else pool.get_num_free_blocks() - room)

    taken = take()
    waiting = [*zip(plan["arrivals"], plan["asks"], strict=True)]
    done, step = {}, 0
    try:
        while waiting or engine.busy:
            while waiting and waiting[0][0] <= step:
                engine.add(waiting.pop(0)[1])
            if step == plan["swap"]:
                pool.free_blocks(taken)  # no block is in use when vLLM resets its cache
                push(engine, newer, 2)
                taken = take()
            done.update(engine.step())
            step += 1
    finally:
        pool.free_blocks(taken)
        scheduler.max_num_scheduled_tokens = usual
    counts = engine._requests.counts - before
    return (
        [done[each.request_id] for each in plan["asks"]],
        counts["cached_tokens"],
        counts["preemptions"],
    )
