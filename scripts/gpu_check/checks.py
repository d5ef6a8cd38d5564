"""List of the checks."""

import importlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from scripts.gpu_check.verdicts import Verdict

LIMIT_S = 1500.0
"""Longer than the default ``deadlines.start`` and ``deadlines.call`` together, so that these name
the rank that hangs. The first tuning of kernels takes minutes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A check, which runs in a process of its own."""

    name: str
    what: str
    """Description for --list."""
    function: str
    """Module of this package and coroutine function, as ``module:function``."""
    options: dict[str, Any] = field(default_factory=dict)
    gpus: int = 1
    """Number of GPUs that it needs."""
    seconds: float = LIMIT_S
    """Time after which it is ended."""

    def load(self) -> Callable[..., Awaitable[Verdict]]:
        """Return the function."""
        module, _, name = self.function.partition(":")
        return getattr(importlib.import_module(f"scripts.gpu_check.{module}"), name)


def parity(dtype: str, attention: str) -> Check:
    return Check(
        name=f"parity-{dtype}-{attention}",
        what=f"log-probs and modules of trainer and generator in {dtype}, {attention} attention",
        function="sessions:parity",
        options={"dtype": dtype, "attention": attention},
    )


def sharded(fsdp: int, tp: int) -> Check:
    return Check(
        name=f"parity-fsdp{fsdp}-tp{tp}",
        what=f"the same with {fsdp} FSDP ranks and {tp} generator ranks, in bfloat16",
        function="sessions:parity",
        options={"dtype": "bfloat16", "attention": "auto", "fsdp": fsdp, "tp": tp},
        gpus=fsdp + tp,
    )


def push(transport: str) -> Check:
    return Check(
        name=f"push-{transport}",
        what=f"three pushes by {transport}, each parameter compared by its digest",
        function="sessions:push",
        options={"transport": transport},
    )


def run(gpus: int, what: str) -> Check:
    return Check(
        name="grpo" if gpus == 1 else f"grpo-{gpus}-gpus",
        what=what,
        function="runs:grpo",
        options={"gpus": gpus},
        gpus=gpus,
    )


def speed(name: str, length: int) -> Check:
    return Check(
        name=f"speed-{name}",
        what=f"training in bfloat16 with sequences of {length:,} tokens: tokens/s and MFU",
        function="trained:speed",
        options={"length": length},
    )


CHECKS = [
    Check(
        name="host",
        what="driver, packages, NCCL and limits, as python -m rl.doctor sees them",
        function="host:host",
        seconds=120.0,
    ),
    parity("bfloat16", "flex"),
    push("shared_memory"),
    Check(
        name="offload",
        what="trainer and generator in turns on one GPU; memory as nvidia-smi sees it",
        function="trained:offload",
    ),
    Check(
        name="graphs",
        what="CUDA graphs after their weights were changed in place",
        function="trained:graphs",
    ),
    Check(
        name="offload-graphs",
        what="the same turns, with CUDA graphs that outlast those of the trainer",
        function="trained:offload",
        options={"eager": False},
    ),
    run(1, "ten steps of GRPO with the layers of Qwen3-0.6B, models in turns on one GPU"),
    run(2, "the same, asynchronous, on two GPUs"),
    sharded(2, 2),
    push("cuda_ipc"),
    parity("float32", "flex"),
    parity("bfloat16", "varlen"),
    Check(
        name="resume",
        what="a run that is killed and goes on from its checkpoint",
        function="runs:resume",
        seconds=2 * LIMIT_S,
    ),
    speed("16k", 16_384),
    speed("65k", 65_536),
    Check(
        name="float8",
        what="float8 against bfloat16 on the same weights, and four steps",
        function="trained:float8",
    ),
    push("rdma"),
    push("torchstore"),
    sharded(4, 4),
]
"""All checks: what is most likely wrong comes first."""
