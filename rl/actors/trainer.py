"""PolicyTrainer: the training engine as an actor, and the controller's handle to its mesh."""

from pathlib import Path
from typing import Any

import torch
from monarch.actor import Actor, endpoint
from torchtitan.config import Configurable

from rl.actors.group import ActorGroup, Supervisor
from rl.model.shape import ModelConfig
from rl.training.config import TrainerConfig
from rl.types import Batch
from rl.weights.digest import PartDigests, digests
from rl.weights.shared_memory import Publisher, Segment


class PolicyTrainer(Actor):
    """One rank. Engines are built by ``start``, so that a failing one is an error with a traceback."""

    def __init__(self, config: TrainerConfig, model: ModelConfig, seed: int, steps: int, folder: str):
        self._config, self._model = config, model
        self._seed, self._steps, self._folder = seed, steps, folder

    @endpoint
    async def start(self) -> None:
        from rl.training.checkpoint import Checkpointer
        from rl.training.engine import TrainingEngine

        self.engine = TrainingEngine(self._config, self._model, seed=self._seed, steps=self._steps, folder=self._folder)
        self.checkpointer = Checkpointer(self.engine, self._model, folder=self._folder)

    @endpoint
    async def forward(self, batch: Batch, temperature: float) -> dict[int, dict[str, torch.Tensor]]:
        return self.engine.forward(batch, temperature=temperature)

    @endpoint
    async def forward_backward(self, batch: Batch, loss: Configurable.Config, temperature: float) -> Any:
        return self.engine.forward_backward(batch, loss.build(), temperature=temperature)

    @endpoint
    async def optim_step(self) -> tuple[int, dict[str, float]]:
        metrics = self.engine.optim_step()
        return self.engine.version, metrics

    @endpoint
    async def open_segment(self, dtype: torch.dtype, readers: int) -> Segment:
        self.publisher = Publisher(self.engine.parts(), dtype, readers=readers)
        return self.publisher.segment

    @endpoint
    async def push_weights(self) -> int:
        self.publisher.publish(self.engine.version)
        return self.engine.version

    @endpoint
    async def weight_digests(self, dtype: torch.dtype | None) -> PartDigests:
        return digests(self.engine.parts(), dtype=dtype)

    @endpoint
    async def save_checkpoint(self, step: int, run_state: dict[str, Any]) -> None:
        self.checkpointer.save(step, run_state)

    @endpoint
    async def load_checkpoint(self, step: int) -> tuple[int, dict[str, Any]]:
        run_state = self.checkpointer.load(step)
        return self.engine.version, run_state

    @endpoint
    async def export_hf(self, folder: str) -> None:
        self.checkpointer.export_hf(folder)

    @endpoint
    async def close(self) -> None:
        self.checkpointer.close()
        self.engine.close()


class TrainerMesh:
    """What the controller sees of the trainer: calls on whole batches, nothing of ranks."""

    def __init__(
        self,
        config: TrainerConfig,
        model: ModelConfig,
        supervisor: Supervisor,
        *,
        folder: Path,
        start_deadline: float,
        deadline: float,
    ):
        self._config, self._model, self._folder = config, model, folder
        self._start_deadline, self._deadline = start_deadline, deadline
        self._group = ActorGroup("trainer", supervisor, logs=folder / "logs")
        self.version = 0
        """Policy version of the trainer's weights."""

    async def start(self, *, seed: int, steps: int) -> None:
        """Spawn the ranks and build their engines."""
        self._group.spawn(PolicyTrainer, self._config.ranks, self._config, self._model, seed, steps, str(self._folder))
        await self._group.call("start", deadline=self._start_deadline)

    async def forward(self, batch: Batch, *, temperature: float) -> list[dict[str, torch.Tensor]]:
        """Per-token ``logprobs`` and ``entropy`` of every sequence, in the batch's order."""
        return _in_order(batch, await self._call("forward", batch, temperature))

    async def forward_backward(
        self, batch: Batch, loss: Configurable.Config, *, temperature: float
    ) -> tuple[list[dict[str, torch.Tensor]], dict[str, float]]:
        """Accumulate the gradient of ``loss`` on ``batch``; per-token outputs in order, and metrics."""
        answers = await self._call("forward_backward", batch, loss, temperature)
        return _in_order(batch, [outputs for outputs, _ in answers]), answers[0][1]

    async def optim_step(self) -> dict[str, float]:
        """Step on what was accumulated; ``version`` counts up unless the step was skipped."""
        self.version, metrics = (await self._call("optim_step"))[0]
        return metrics

    async def open_segments(self, dtype: torch.dtype, *, readers: int) -> list[Segment]:
        """The ranks' shared memory, for ``readers`` generator ranks."""
        return await self._call("open_segment", dtype, readers)

    async def push_weights(self) -> int:
        """Make the current weights readable; returns their version."""
        return (await self._call("push_weights"))[0]

    async def weight_digests(self, dtype: torch.dtype | None = None) -> list[PartDigests]:
        """Digests of every rank's shards, cast to ``dtype`` if given."""
        return await self._call("weight_digests", dtype)

    async def save_checkpoint(self, step: int, run_state: dict[str, Any]) -> None:
        """Write checkpoint ``step`` with the controller's state in it."""
        await self._call("save_checkpoint", step, run_state)

    async def load_checkpoint(self, step: int = -1) -> dict[str, Any]:
        """Load checkpoint ``step``, the newest if -1, or the model's own folder; returns the controller's state."""
        self.version, run_state = (await self._call("load_checkpoint", step))[0]
        return run_state

    async def export_hf(self, folder: Path) -> None:
        """Write the policy as a Hugging Face folder."""
        await self._call("export_hf", str(folder))

    async def close(self) -> None:
        """Finish saves and leave; the processes end."""
        await self._call("close")
        await self.stop()

    async def stop(self) -> None:
        """End the processes, whatever they are doing."""
        await self._group.stop()

    async def _call(self, endpoint_name: str, *args: Any) -> list[Any]:
        return await self._group.call(endpoint_name, *args, deadline=self._deadline)


def _in_order(batch: Batch, answers: list[dict[int, dict[str, torch.Tensor]]]) -> list[dict[str, torch.Tensor]]:
    merged: dict[int, dict[str, torch.Tensor]] = {}
    for rows in answers:
        merged |= rows
    return [merged[row] for row in range(len(batch))]
