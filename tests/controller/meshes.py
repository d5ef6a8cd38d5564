"""Meshes that compute nothing: they keep the order that real ones keep, and note what was asked of them."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import torch

from rl.model.parts import Box, Region
from rl.types import Batch, Completion, GenerationRequest
from rl.weights.transport import Sent

WAIT_S = 10.0
LAYOUT = (Region("w", (4,), Box.whole((4,))),)
Hook = Callable[[], Awaitable[None]]


class Trainer:
    """Its weights are its version; it has one engine, so one call at a time."""

    def __init__(self, log: list[str]):
        self.log, self.version, self.saved = log, 0, {}
        self.during: dict[str, Hook] = {}
        """By endpoint, what it waits for in the middle."""
        self.skips: set[int] = set()
        """Numbers of optimizer steps that change nothing."""
        self.wrong_since = 1000
        """Version from which on its log-probs are not the generator's."""
        self._engine, self._steps, self._pushing = asyncio.Lock(), 0, 0

    async def layouts(self) -> list[Any]:
        return [("here", LAYOUT)]

    async def open_publishers(self, transfer: Any) -> list[Any]:
        return ["address"]

    async def push_weights(self) -> tuple[int, Sent]:
        version = self.version
        self.log.append(f"publish {version}")
        self._pushing += 1
        await self._wait("push_weights")
        self._pushing -= 1
        assert self.version == version, "the weights changed under a push"
        return version, Sent(100, 60)

    async def forward(self, batch: Batch, *, temperature: float) -> dict[str, torch.Tensor]:
        async with self._engine:
            self.log.append(f"forward {self.version}")
            wrong = float(self.version >= self.wrong_since)
            return {"logprobs": torch.full(batch.tokens.shape, -1.0 - wrong - 1e-5 * self.version)}

    async def forward_backward(self, batch: Batch, loss: Any, *, temperature: float) -> tuple[dict, dict[str, float]]:
        async with self._engine:
            self.log.append(f"train {self.version} on {int(batch.columns['versions'].max())}")
            await self._wait("forward_backward")
            return {}, {"loss/mean": 0.0}

    async def optim_step(self) -> dict[str, float]:
        async with self._engine:
            assert not self._pushing, "a step under a push"
            self.log.append("step")
            self.version += self._steps not in self.skips
            self._steps += 1
            return {}

    async def weight_digests(self, dtype: torch.dtype | None = None) -> list[dict]:
        async with self._engine:
            return [{("w", Box.whole((4,))): self.version}]

    async def save_checkpoint(self, step: int, state: dict) -> None:
        self.saved[step] = state

    async def load_checkpoint(self) -> tuple[dict, list[str]]:
        newest = max(self.saved, default=0)
        self.version = newest
        return self.saved.get(newest, {}), []

    async def export_hf(self, folder: Any) -> None:
        pass

    async def _wait(self, endpoint: str) -> None:
        await asyncio.sleep(0)
        if endpoint in self.during:
            await asyncio.wait_for(self.during[endpoint](), WAIT_S)


class Generator:
    """Says version after version what it holds."""

    dtype = torch.float32

    def __init__(self, log: list[str]):
        self.log, self.version = log, None
        self.during: Hook | None = None
        """What generating rollouts waits for in the middle."""
        self.pull_fails = False
        self.pull_takes = 0.0
        """Seconds."""

    async def layouts(self) -> list[Any]:
        return [("here", LAYOUT)]

    async def connect(self, transfer: Any, addresses: list[Any], *, generator: int) -> None:
        self.version = None

    async def pull_weights(self, version: int) -> float:
        await asyncio.sleep(self.pull_takes)
        if self.pull_fails and version:
            raise ZeroDivisionError("no pull today")
        self.log.append(f"pull {version}")
        self.version = version
        return 0.25

    async def generate(self, requests: list[GenerationRequest]) -> list[Completion]:
        canary = requests[0].request_id.startswith("canary")
        self.log.append(f"{'canary' if canary else 'generate'} {self.version}")
        await asyncio.sleep(0)
        if self.during and not canary:
            await asyncio.wait_for(self.during(), WAIT_S)
        said = Completion(tokens=[6, 7], logprobs=[-1.0, -1.0], versions=[self.version] * 2, finish_reason="length")
        return [said] * len(requests)

    async def weight_digests(self) -> list[dict]:
        return [{("w", Box.whole((4,))): self.version}]
