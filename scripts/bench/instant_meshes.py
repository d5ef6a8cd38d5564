"""Meshes that answer at once, for the benchmark of the controller."""

import asyncio
import os
import pickle
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch

from rl.actors.generator import GeneratorMesh
from rl.errors import ActorFailure
from rl.metrics import Metrics, Value
from rl.model.shards import Box, Region
from rl.model.updates import EMPTY, Update
from rl.types import Batch, Completion, GenerationRequest, Prompt, Rollout
from rl.weights.transport import Sent

LAYOUT = (Region("w", (1,), Box.whole((1,))),)
TOKENS = 32  # tokens of a completion
RANKS = 64  # ranks of the trainer


@dataclass(slots=True)
class Marks:
    """Measurements that the meshes take during a run."""

    began: tuple[float, float] | None = None
    """CPU and wall time, in s, of the first request for a rollout."""
    ended: tuple[float, float] = (0.0, 0.0)
    """CPU and wall time, in s, of the end of the last step."""
    resident: list[int] = field(default_factory=list)
    """Bytes of resident memory at each step."""


class Mesh:
    """Mesh that starts at once and is never lost."""

    name = "mesh"
    step_digests: ClassVar[dict[str, dict[str, str]]] = {"gradient": {}, "weights": {}}
    is_running = True

    async def start(self) -> None:
        pass

    async def stop(self) -> None:
        pass

    async def failed(self) -> ActorFailure:
        return await asyncio.Future()

    def on(self, rank: int | None = None, **_: float) -> Any:
        return self

    async def call(self, endpoint: Any, *args: Any) -> Any:
        return await getattr(self, endpoint.name)(*args)


class Trainer(Mesh):
    """Trainer whose weights are its version."""

    loaded = None
    loads = 0

    def __init__(self, marks: Marks):
        self.marks = marks
        self.version = 0

    async def layout(self) -> list[Any]:
        return [("here", False, LAYOUT)] * RANKS

    async def open_publishers(self, transfer: Any) -> list[Any]:
        return ["address"] * RANKS

    async def push_weights(self, version: int, source: None) -> list[Sent]:
        await asyncio.sleep(0)
        return [Sent(0, 0)] * RANKS

    async def forward(self, batch: Batch, **_: Any) -> dict[str, torch.Tensor]:
        await asyncio.sleep(0)
        return {"logprobs": torch.full(batch.tokens.shape, -1.0)}

    async def forward_backward(self, batch: Batch, loss: Any, **_: Any) -> tuple[dict, Metrics]:
        await asyncio.sleep(0)
        return {}, Metrics({})

    async def optim_step(self, **_: Any) -> Metrics:
        await asyncio.sleep(0)
        self.version += 1
        self.marks.resident.append(_resident())
        return Metrics(
            {
                "loss/mean": Value(0.0),
                "trainer/grad_norm": Value(1.0),
                "trainer/updates": Value(1.0, "sum"),
            }
        )

    async def load_checkpoint(self, step: int) -> tuple[dict, list[str]]:
        return {}, []

    async def save_checkpoint(self, step: int, state: dict) -> None:
        """Serialize the message of each rank."""
        self.message_bytes = sum(len(pickle.dumps((step, state))) for _ in range(RANKS)) // RANKS

    async def weight_digests(self, *_: Any) -> list[dict]:
        return [{("w", Box.whole((1,))): self.version}]

    async def export_hf(self, folder: str, *_: Any) -> list[Update]:
        self.marks.ended = time.process_time(), time.perf_counter()
        Path(folder).mkdir()
        Path(folder, "config.json").write_text("{}")
        return [EMPTY]


class Generator(Mesh):
    """Generator that samples the same tokens for every request."""

    dtype = torch.float32
    state = "absent"
    fetches = None
    load = turn = 0
    has_answered = False
    is_serving = GeneratorMesh.is_serving

    def __init__(self, marks: Marks, number: int):
        self.name = f"generator-{number}"
        self.number = number
        self.marks = marks
        self.version = 0

    async def layout(self) -> list[Any]:
        return [("here", False, LAYOUT)]

    async def connect(self, transfer: Any, addresses: list[Any]) -> None:
        self.version = 0

    async def fetch_weights(self, version: int) -> None:
        pass

    async def pull_weights(self, version: int) -> float:
        await asyncio.sleep(0)
        self.version = version
        return 0.0

    async def weight_digests(self) -> list[dict]:
        return [{("w", Box.whole((1,))): self.version}]

    def take_load(self) -> Metrics:
        return Metrics({})

    async def generate(
        self, requests: list[GenerationRequest], **options: object
    ) -> list[Completion]:
        if self.marks.began is None and not requests[0].request_id.startswith("canary"):
            self.marks.began = time.process_time(), time.perf_counter()
        await asyncio.sleep(0)
        return [self._completion(min(TOKENS, request.sampling.max_tokens)) for request in requests]

    def _completion(self, count: int) -> Completion:
        """Return a completion with new lists, like a completion from a message."""
        return Completion(
            tokens=[6] * count,
            logprobs=[-1.0] * count,
            versions=[self.version] * count,
            finish_reason="length",
        )


class Rewards(Mesh):
    """Reward workers whose reward is the number of the sample."""

    restarts = 0

    async def score(self, prompt: Prompt, completions: Sequence[Completion]) -> list[Rollout]:
        await asyncio.sleep(0)
        return [
            Rollout.single_turn(
                prompt,
                each,
                sample=i,
                text="1 2 3",
                reward=i,
                metrics={"correct": 0.0},
            )
            for i, each in enumerate(completions)
        ]


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
