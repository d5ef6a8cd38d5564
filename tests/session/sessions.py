"""Real sessions on small models, and inputs for them."""

import asyncio
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torchtitan.components.lora import LoRAConverter

from rl.actors.hosts import Hosts
from rl.model.shape import ModelConfig
from rl.session.meshes import Meshes
from rl.session.session import Session
from rl.session.session_config import SessionConfig
from rl.training.trainer_config import TrainerConfig, default_adamw
from rl.types import Batch
from rl.types.deadlines import DeadlineConfig

DEADLINES = DeadlineConfig(start=300.0, call=301.0, heartbeat=0.0)
PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8], [9], list(range(10, 30))]


class Sessions:
    """Starts sessions on one event loop and ends them all at exit."""

    def __init__(self, folder: Path, runner: asyncio.Runner):
        self._runner = runner
        self._folder = folder
        self._stack = AsyncExitStack()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self._runner.run(work)

    async def start(self, **fields: Any) -> Session:
        """Start the processes of a session."""
        return await self.start_as(config_of(**fields))

    async def start_as(self, config: SessionConfig) -> Session:
        """Start the processes of a session of ``config``."""
        session = Session(config, folder=self._folder, hosts=self._hosts())
        self._stack.push_async_callback(session.stop)
        await session.start()
        return session

    def meshes(self, **fields: Any) -> Meshes:
        """Return a maker of meshes that no session starts."""
        return Meshes(config_of(**fields), self._hosts(), self._folder)

    async def start_mesh(self, mesh: Any) -> Any:
        """Start a mesh alone."""
        self._stack.push_async_callback(mesh.stop)
        await mesh.start()
        return mesh

    def on(self, trainer: Any, generator: Any, /, **fields: Any) -> Session:
        """Return another session on running meshes."""
        meshes = SimpleNamespace(
            models=lambda: {"trainer": trainer}, generator=lambda number: generator
        )
        return Session(config_of(**fields), folder=self._folder, meshes=meshes)

    def close(self) -> None:
        self.run(self._stack.aclose())

    def _hosts(self) -> Hosts:
        return Hosts(self._folder / "logs")


def config_of(**fields: Any) -> SessionConfig:
    defaults = {
        "model": model_config(tied=True),
        "generator": None,
        "deadlines": DEADLINES,
        "optimizer_steps": 100,
    }
    return SessionConfig(**{**defaults, **fields})


def trainer_config(
    *, fsdp: int = 1, tp: int = 1, lora: LoRAConverter.Config | None = None
) -> TrainerConfig:
    config = TrainerConfig(optimizer=default_adamw(lr=1e-2), micro_batch_size=4, lora=lora)
    config.parallelism.data_parallel_shard_degree = fsdp
    config.parallelism.tensor_parallel_degree = tp
    return config


def model_config(tied: bool) -> ModelConfig:
    return ModelConfig(
        vocab_size=64,
        dim=64,
        n_layers=2,
        n_heads=4,
        n_kv_heads=2,
        head_dim=32,
        hidden_dim=96,
        max_seq_len=96,
        tie_embeddings=tied,
    )


def batch() -> Batch:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([5, 9, 7, 12, 4])
    total = int(lengths.sum())
    weights = torch.ones(total)
    weights[lengths.cumsum(0) - lengths] = 0
    return Batch(
        tokens=torch.randint(0, 64, (total,), generator=generator),
        lengths=lengths,
        loss_weights=weights,
        columns={
            "advantages": torch.randn(total, generator=generator),
            "behaviour_logprobs": torch.full((total,), -4.0),
        },
    )
