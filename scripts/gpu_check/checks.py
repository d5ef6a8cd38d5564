"""List of the checks. Imports no torch."""

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


VARIANTS = [
    "float32-qwen3", "bfloat16-qwen3", "bfloat16-compiled", "float32-shared", "bfloat16-experts",
    "float32-gpt_oss", "bfloat16-float8", "bfloat16-recomputed", "bfloat16-selective",
    "float32-experts", "bfloat16-gpt_oss", "float32-chunked", "float32-lora", "float32-llama",
    "float32-qwen2", "bfloat16-float8-compiled",
]  # fmt: skip
"""Variants of a trainer: a dtype, words of :mod:`scripts.gpu_check.engine`."""
BITWISE = (
    "--parity", "bitwise", "--watchdog.parity", "fail", "--generator.enforce-eager",
)  # fmt: skip
"""Fields of a run that ends at the first token with other bits."""


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


def part(name: str, what: str, function: str, **options: Any) -> Check:
    return Check(name=f"engine-{name}", what=what, function=function, options=options)


def engine(variant: str) -> Check:
    what = f"a trainer's step against the CPU in float32: {variant.replace('-', ', ')}"
    return part(variant, what, "engine:parity", variant=variant)


def pushed(transport: str, what: str) -> Check:
    return part(f"push-{transport}", what, "parts:push", transport=transport)


def speed(case: str, what: str) -> Check:
    what = f"{what} in bfloat16: tokens/s, MFU, memory beside the plan's"
    return part(f"speed-{case}", what, "parts:speed", case=case)


CHECKS = [
    Check(
        name="host",
        what="driver, packages, NCCL and limits, as python -m rl.doctor sees them",
        function="host:host",
        seconds=120.0,
    ),
    *map(engine, VARIANTS),
    part(
        "push-shared_memory", "pushes to another process", "parts:push", transport="shared_memory"
    ),
    part("push-cuda_ipc", "the same from GPU to GPU", "parts:push", transport="cuda_ipc"),
    part("head", "memory of log-probs beside that of all logits at once", "parts:head"),
    part("offload", "a trainer's way to the host and back", "parts:offload"),
    part(
        "checkpoint", "a checkpoint that is saved in the background and loaded", "parts:checkpoint"
    ),
    speed("0_6b", "Qwen3-0.6B"),
    speed("1_7b", "Qwen3-1.7B"),
    speed("8b", "8 layers of Qwen3-8B"),
    speed("16k", "Qwen3-0.6B with 16,384 tokens a sequence"),
    part("widths", "the first passes at four widths of rows", "parts:widths", tune=False),
    part("widths-tuned", "the same with tuned kernels of attention", "parts:widths", tune=True),
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
    Check(
        name="bitwise",
        what="four steps of GRPO in bfloat16 whose log-probs have equal bits on both sides",
        function="runs:grpo",
        options={"steps": 4, "fields": BITWISE},
    ),
    parity("float32", "flex"),
    parity("bfloat16", "varlen"),
    Check(
        name="resume",
        what="a run that is killed and goes on from its checkpoint",
        function="runs:resume",
        seconds=2 * LIMIT_S,
    ),
    push("rdma"),
    push("torchstore"),
    sharded(4, 4),
]
"""All checks: what is most likely wrong comes first."""

WIDTH = max(len(check.name) for check in CHECKS) + 1
"""Width of the column of names."""
