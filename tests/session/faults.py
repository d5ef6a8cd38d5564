"""Faults of trainers and generators, each as the functions that make and mend it.

They run in the processes of the engines.
"""

import time
from typing import Any

import torch

from rl.compat import vllm_internals

LAYER = "1"


def attention(engine: Any) -> Any:
    return titan(engine).layers[LAYER].attention


def titan(engine: Any) -> Any:
    """Return the generator's model."""
    return engine._model.titan


def rotate(base: float) -> Any:
    """Return a function that fills the generator's table of cosines and sines anew."""

    def change(engine: Any) -> None:
        rope = attention(engine).rope
        half = rope.config.dim // 2
        powers = torch.arange(half, dtype=torch.float64) / half
        angles = torch.arange(len(rope.cache))[:, None] * base**-powers
        table = torch.cat([angles.cos(), angles.sin()], dim=1).float()
        rope.cache.copy_(table)

    return change


def double_norm(engine: Any) -> None:
    """Change a weight."""
    titan(engine).layers["0"].attention_norm.weight.mul_(2)


def drop_norm(engine: Any) -> None:
    """Leave out the norm of the queries."""
    attention(engine).q_norm.forward = lambda heads: heads


def restore_norm(engine: Any) -> None:
    del attention(engine).q_norm.forward


def slow_down(engine: Any) -> None:
    """Wait before each step."""
    step = engine.step

    def late() -> Any:
        time.sleep(0.1)
        return step()

    engine.step = late


def speed_up(engine: Any) -> None:
    del engine.step


def keep_prefixes(engine: Any) -> None:
    """Keep cached prefixes when the weights change."""

    def weights_changed(version: int) -> None:
        engine._model.weights_changed()
        vllm_internals.set_weight_version(engine._engine, str(version))
        engine.version = version

    engine.weights_changed = weights_changed


def forget_prefixes(engine: Any) -> None:
    del engine.weights_changed


def keep_head(engine: Any) -> None:
    """Multiply with an old copy of the output head, which is tied to the embedding."""
    titan(engine).lm_head.pack = lambda: None


def restore_head(engine: Any) -> None:
    head = titan(engine).lm_head
    del head.pack
    head.pack()


def drop_mask(_engine: Any) -> None:
    """Let the trainer's tokens attend to later tokens."""
    from rl.training import attention, engine

    engine.attention_masks = lambda _, positions, *__: torch.ones_like(
        attention.dense_tree_mask(positions)
    )


def restore_mask(_engine: Any) -> None:
    from rl.training import attention, engine

    engine.attention_masks = attention.attention_masks


def permute_experts(engine: Any) -> None:
    """Send each token to the expert after the chosen one."""
    router = titan(engine).layers[LAYER].moe.router
    route = router.forward

    def other(*args: Any) -> Any:
        scores, experts, everything = route(*args)
        return scores, (experts + 1) % everything.shape[-1], everything

    router.forward = other


def restore_experts(engine: Any) -> None:
    del titan(engine).layers[LAYER].moe.router.forward


def nothing(_engine: Any) -> None:
    """Change nothing."""
