"""The training engine of one rank: forward, forward_backward, optim_step."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as titan_dist
from torchtitan.tools.utils import get_local_device

from rl.algorithms.losses import Metric
from rl.model.parts import Parts
from rl.model.shape import ModelConfig
from rl.platform import device_type
from rl.training.attention import DenseAttention, dense_mask
from rl.training.config import TrainerConfig
from rl.training.logprobs import logprobs_and_entropy
from rl.training.micro_batches import MicroBatch, micro_batches
from rl.training.model import build_model, parts_of
from rl.types import Batch

Loss = Callable[[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]], tuple[torch.Tensor, dict[str, Metric]]]


class TrainingEngine:
    """One rank's model, optimizer and schedule, under any layout that torchtitan offers.

    Ranks are those of torch.distributed (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT); all of them
    call each method alike, with the same whole batch::

        engine = TrainingEngine(config, model, seed=0, steps=100, folder="run")
        outputs, metrics = engine.forward_backward(batch, loss)   # any number of times
        metrics = engine.optim_step()                             # divides once, clips, steps, zeroes

    Losses are per token, weighted and summed; ``optim_step`` divides by the weight of all that was
    accumulated on all ranks. So the gradient is that of the whole batch, however it was cut (C1).

    CUDA (NCCL, varlen attention, bf16, float8) takes the same path but is not covered by the tests.
    """

    def __init__(self, config: TrainerConfig, model: ModelConfig, *, seed: int, steps: int, folder: str):
        self.config = config
        self.device = get_local_device()
        if device_type() == "cuda":
            torch.cuda.set_device(self.device)
        world = titan_dist.init_distributed(config.comm, base_folder=folder)
        self.dims = ParallelDims.from_config(config.parallelism, world)
        titan_dist.set_spmd_backend(config.parallelism.spmd_backend)
        self._context = titan_dist.get_spmd_context(parallel_dims=self.dims)
        self.dims.build_mesh()
        titan_dist.set_determinism(self.dims, self.device, config.debug, distinct_seed_mesh_dims=[])

        self.model = build_model(config, model, self.dims, seed=seed, folder=folder)
        self.optimizers = config.optimizer.build(model_parts=[self.model])
        self.schedule = config.lr_scheduler.build(optimizers=self.optimizers, training_steps=steps)
        self.version = 0
        """Optimizer steps taken: the policy version of the weights."""
        self.skipped_steps = 0
        self._accumulated = 0.0
        self._batch_mesh = self.dims.get_optional_mesh("batch")

    @property
    def dp_rank(self) -> int:
        """Which part of a batch this rank works on."""
        return 0 if self._batch_mesh is None else self._batch_mesh.get_local_rank()

    @property
    def dp_degree(self) -> int:
        """Into how many parts a batch is cut."""
        return 1 if self._batch_mesh is None else self._batch_mesh.size()

    @torch.no_grad()
    def forward(self, batch: Batch, *, temperature: float = 1.0) -> dict[int, dict[str, torch.Tensor]]:
        """Per-token ``logprobs`` and ``entropy`` of this rank's rows: {row: {name: float32 [length]}}."""
        outputs: dict[int, dict[str, torch.Tensor]] = {}
        for micro in self._cut(batch):
            with self._context():
                outputs |= _per_row(micro, *self._logprobs(micro, temperature))
        return outputs

    def forward_backward(
        self, batch: Batch, loss: Loss, *, temperature: float = 1.0
    ) -> tuple[dict[int, dict[str, torch.Tensor]], dict[str, float]]:
        """Accumulate the gradient of the batch's weighted loss; may be called several times.

        Returns this rank's rows as ``forward`` does, and metrics reduced over all ranks:
        ``loss/mean`` is the weighted mean.
        """
        outputs: dict[int, dict[str, torch.Tensor]] = {}
        totals = _MetricTotals(self.device, self._batch_mesh)
        for micro in self._cut(batch):
            with self._context():
                logprobs, entropy = self._logprobs(micro, temperature)
                per_token, metrics = loss(logprobs, entropy, micro.columns)
                (per_token * micro.weights).sum().backward()
            totals.add(per_token.detach(), metrics, micro.weights)
            outputs |= _per_row(micro, logprobs.detach(), entropy.detach())
        self._accumulated += totals.weight
        return outputs, totals.reduce()

    @torch.no_grad()
    def optim_step(self) -> dict[str, float]:
        """Divide by the accumulated weight, clip, step and zero; adds one to ``version``.

        A non-finite gradient norm skips the step on every rank and changes nothing but the count.
        """
        weight = self._sum_over_batch(self._accumulated)
        if weight == 0:
            raise RuntimeError(
                "optim_step: no weight was accumulated; call forward_backward with a batch of weight > 0 first"
            )
        parameters = list(self.model.parameters())
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(1.0 / weight)
        norm = titan_dist.clip_grad_norm_(
            parameters, self.config.training.max_norm, foreach=True, ep_enabled=self.dims.ep_enabled
        ).item()
        metrics = {"trainer/grad_norm": norm, **{f"trainer/{k}": v for k, v in self.schedule.get_metrics().items()}}
        if torch.isfinite(torch.tensor(norm)):
            self.optimizers.step()
            self.schedule.step()
            self.version += 1
        else:
            self.skipped_steps += 1
        self.optimizers.zero_grad()
        self._accumulated = 0.0
        return metrics | {"trainer/skipped_steps": float(self.skipped_steps), "trainer/weight": weight}

    def parts(self) -> Parts:
        """This rank's live shards of the parameters."""
        return parts_of(self.model)

    def close(self) -> None:
        """Leave the process group."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def _cut(self, batch: Batch) -> Any:
        multiple = 2 * self.dims.cp * self.dims.tp  # what sequence and context parallel divide
        for micro in micro_batches(
            batch,
            dp_rank=self.dp_rank,
            dp_degree=self.dp_degree,
            size=self.config.micro_batch_size,
            multiple_of=multiple,
        ):
            yield micro.to(self.device)

    def _logprobs(self, micro: MicroBatch, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
        masks = self._attention_masks(micro.positions)
        logits = self.model(micro.tokens, positions=micro.positions, attention_masks=masks)
        return logprobs_and_entropy(logits, micro.targets, temperature=temperature)

    def _attention_masks(self, positions: torch.Tensor) -> Any:
        inner = self.model.config.first_attention.inner_attention
        if isinstance(inner, DenseAttention.Config):
            return dense_mask(positions)
        return self.model.get_attention_masks(positions)

    def _sum_over_batch(self, value: float) -> float:
        if self._batch_mesh is None:
            return value
        total = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(total, group=self._batch_mesh.get_group())
        return float(total)


class _MetricTotals:
    """Sums and extremes of per-token metrics over micro-batches, then over data-parallel ranks."""

    def __init__(self, device: torch.device, mesh: Any):
        self._device, self._mesh = device, mesh
        self._sums: dict[str, list[float]] = {}
        self._extremes: dict[str, tuple[str, float]] = {}
        self.weight = 0.0

    def add(self, loss: torch.Tensor, metrics: dict[str, Metric], weights: torch.Tensor) -> None:
        self.weight += float(weights.sum(dtype=torch.float64))
        self._accumulate("loss/mean", loss, weights)
        counted = weights > 0
        for name, (values, reduction) in metrics.items():
            values = values.detach()
            if reduction == "mean":
                self._accumulate(name, values, counted)
                continue
            sign = 1.0 if reduction == "max" else -1.0
            best = float((sign * values).masked_fill(~counted, -torch.inf).max())
            _, previous = self._extremes.get(name, (reduction, -torch.inf))
            self._extremes[name] = (reduction, max(best, previous))

    def _accumulate(self, name: str, values: torch.Tensor, weights: torch.Tensor) -> None:
        pair = self._sums.setdefault(name, [0.0, 0.0])
        pair[0] += float((values * weights).sum(dtype=torch.float64))
        pair[1] += float(weights.sum(dtype=torch.float64))

    def reduce(self) -> dict[str, float]:
        """The metrics over all ranks; every rank returns the same."""
        sums = torch.tensor(list(self._sums.values()), dtype=torch.float64, device=self._device)
        extremes = torch.tensor([v for _, v in self._extremes.values()], dtype=torch.float64, device=self._device)
        if self._mesh is not None:
            dist.all_reduce(sums, dist.ReduceOp.SUM, self._mesh.get_group())
            dist.all_reduce(extremes, dist.ReduceOp.MAX, self._mesh.get_group())
        reduced = {
            name: float(total / weight) if weight > 0 else 0.0
            for name, (total, weight) in zip(self._sums, sums, strict=True)
        }
        for (name, (reduction, _)), value in zip(self._extremes.items(), extremes, strict=True):
            reduced[name] = float(value if reduction == "max" else -value)
        return reduced


def _per_row(micro: MicroBatch, logprobs: torch.Tensor, entropy: torch.Tensor) -> dict[int, dict[str, torch.Tensor]]:
    pairs = zip(micro.rows, micro.unpad(logprobs.cpu()), micro.unpad(entropy.cpu()), strict=True)
    return {row: {"logprobs": lp, "entropy": h} for row, lp, h in pairs}
