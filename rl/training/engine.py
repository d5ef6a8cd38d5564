"""The training engine of one rank: forward, forward_backward, optim_step."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as titan_dist
from torchtitan.tools.utils import get_local_device

from rl.algorithms.losses import PerToken, check_loss_result
from rl.algorithms.tokens import Tokens
from rl.errors import RunError
from rl.metrics import Metrics, Value
from rl.model.host_memory import HostMemory
from rl.model.shape import ModelConfig
from rl.model.shards import Shards
from rl.platform import device_type
from rl.training.attention import attention_masks, shares_rows
from rl.training.config import TrainerConfig
from rl.training.context import SequenceShard
from rl.training.lora import MergedWeights
from rl.training.metrics import MetricTotals
from rl.training.micro_batches import Cutting, MicroBatch, lay_out, plan
from rl.training.model import build_model, reshard
from rl.types import Batch, Head

Loss = Callable[[Tokens], PerToken]
"""From the tokens of weight above 0 of some whole sequences to the loss of each, [C], and metrics;
C may be 0."""


class TrainingEngine:
    """One rank's model, optimizer and schedule, under any layout that torchtitan offers.

    Ranks are those of torch.distributed (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT). All of them
    call each method alike; those of one data-parallel rank with the same part of the batch::

        engine = TrainingEngine(config, model, seed=0, steps=100, folder="run")
        mine = batch.select(balanced(batch.lengths.tolist(), engine.dp_degree)[engine.dp_rank])
        outputs, metrics = engine.forward_backward(mine, loss)    # any number of times
        metrics = engine.optim_step()               # divides once, clips, steps, zeroes

    Losses are per token, weighted and summed; ``optim_step`` divides by the weight of all that was
    accumulated on all ranks. So the gradient is that of the whole batch, however it was cut (C1).

    CUDA (NCCL, varlen attention, bf16, float8) takes the same path but is not covered by the tests.
    """

    def __init__(
        self,
        config: TrainerConfig,
        model: ModelConfig,
        *,
        head: Head = "logprobs",
        seed: int,
        steps: int,
        folder: str,
    ):
        self.config = config
        self.device = get_local_device()
        if device_type() == "cuda":
            torch.cuda.set_device(self.device)
        world = titan_dist.init_distributed(config.comm, base_folder=folder)
        self.dims = ParallelDims.from_config(config.parallelism, world)
        titan_dist.set_spmd_backend(config.parallelism.spmd_backend)
        self._context = titan_dist.get_spmd_context(parallel_dims=self.dims)
        self.dims.build_mesh()

        self.model = build_model(config, model, self.dims, head=head, seed=seed, folder=folder)
        self._merged = MergedWeights(self.model, config.lora)
        # After the model, whose initializers draw as much as a rank's shards ask for: from here on
        # all draw alike.
        titan_dist.set_determinism(self.dims, self.device, config.debug, distinct_seed_mesh_dims=[])
        self.optimizers = config.optimizer.build(model_parts=[self.model])
        self.schedule = config.lr_scheduler.build(optimizers=self.optimizers, training_steps=steps)
        self._steps = steps
        self.version = 0
        """Optimizer steps taken: the policy version of the weights."""
        self.skipped_steps = 0
        """Steps skipped for a non-finite gradient, over the whole run."""
        self.skipped_in_a_row = 0
        """Number of these since the last step that was taken."""
        self._host = {"model": HostMemory(), "optimizer": HostMemory()}

        batch_mesh = self.dims.get_optional_mesh("batch")
        self._batch_group = batch_mesh.get_group() if batch_mesh else None
        self._weight = 0.0
        self._totals = MetricTotals(self.device, self._batch_group)
        self.dp_rank = batch_mesh.get_local_rank() if batch_mesh else 0
        """Which part of a batch this rank works on."""
        self.dp_degree = batch_mesh.size() if batch_mesh else 1
        """Into how many parts a batch is cut."""
        same_batch = self.dims.cp * self.dims.tp
        self._same_batch = dist.new_subgroups(same_batch)[0] if same_batch > 1 else None
        self.is_leader = dist.get_rank() % same_batch == 0
        """Whether this is the first rank of its data-parallel rank."""
        balancer = config.parallelism.context_parallel_load_balancer
        self._sequence = (
            SequenceShard(self.dims.get_mesh("cp"), balancer) if self.dims.cp_enabled else None
        )

    def from_leader(self, batch: Batch | None) -> Batch:
        """The leader's batch, on every rank of the same data-parallel rank; the others may pass
        None.
        """
        if self._same_batch is not None:
            held = [batch]
            dist.broadcast_object_list(held, group=self._same_batch, group_src=0)
            batch = held[0]
        assert batch is not None
        return batch

    @torch.no_grad()
    def forward(self, batch: Batch, *, temperature: float = 1.0) -> dict[str, torch.Tensor]:
        """``logprobs`` and ``entropy`` of each token, or a critic's ``values``, float32 [T] in the
        batch's order.
        """
        self.require_resident("forward", "model")
        collected = _Outputs()
        for micro in self._micro_batches(batch):
            with self._context():
                collected.put(micro, self._run(micro, temperature))
        reshard(self.model)
        return collected.of(batch)

    def forward_backward(
        self, batch: Batch, loss: Loss, *, temperature: float = 1.0, weight: float = 1.0
    ) -> tuple[dict[str, torch.Tensor], Metrics]:
        """Add the gradient of the batch's weighted loss, times ``weight``; may be called several
        times.

        ``weight`` scales the gradient linearly and leaves the denominator of ``optim_step`` alone.
        Returns what ``forward`` does, and metrics reduced over all ranks: ``loss/mean`` is the
        weighted mean. Raises RunError, naming the loss, if the loss returns something other than a
        :data:`PerToken`.
        """
        self.require_resident("forward_backward", "model", "optimizer")
        collected = _Outputs()
        totals = MetricTotals(self.device, self._batch_group)
        for micro in self._micro_batches(batch):
            with self._context():
                outputs = self._run(micro, temperature)
                own = {name: values[micro.loss_index] for name, values in outputs.items()}
                result = loss(Tokens(micro.columns | own, sequence=micro.sequence))
                per_token, metrics = check_loss_result(loss, result, len(micro.loss_index))
                (weight * (per_token * micro.loss_weights).sum()).backward()
            totals.add(per_token, metrics, micro.loss_weights)
            collected.put(micro, {name: values.detach() for name, values in outputs.items()})
        self._weight += float(batch.loss_weights.sum(dtype=torch.float64))
        self._totals.merge(totals)
        return collected.of(batch), totals.reduce()

    @torch.no_grad()
    def optim_step(
        self,
        *,
        denominator: float | None = None,
        lr: float | None = None,
        betas: tuple[float, float] | None = None,
        weight_decay: float | None = None,
        max_norm: float | None = None,
    ) -> Metrics:
        """Divide, clip, step and zero; adds one to ``version``.

        ``denominator`` is the weight of the whole batch on all ranks, by default what was
        accumulated. The others take the config's place for this step, in all parameter groups.

        A non-finite gradient norm skips the step on every rank and changes nothing but the counts.
        Raises RunError at one more in a row than ``config.max_skipped_steps``. Returns its own
        metrics, and those of ``forward_backward`` over all calls since the last step.
        ``trainer/updates`` is 1 if the gradient and a learning rate were above 0, so that weights
        changed.
        """
        self.require_resident("optim_step", "model", "optimizer")
        if self.version == self._steps:
            raise RuntimeError(
                f"optim_step: the schedule ends after {self._steps} steps; build the engine with "
                "more"
            )
        weight = denominator
        if weight is None:
            weight = self._over_batch(self._weight, dist.ReduceOp.SUM)
        if weight == 0:
            raise RuntimeError(
                "optim_step: no weight was accumulated; call forward_backward with a batch of "
                "weight > 0 first"
            )
        parameters = [each for each in self.model.parameters() if each.grad is not None]
        for parameter in parameters:
            parameter.grad.mul_(1.0 / weight)
        limit = self.config.training.max_norm if max_norm is None else max_norm
        norm = titan_dist.clip_grad_norm_(
            parameters, limit, foreach=True, ep_enabled=self.dims.ep_enabled
        ).item()
        rates = self.schedule.get_metrics()
        if lr is not None:
            rates = dict.fromkeys(rates, lr)
        self._step_or_skip(norm, lr=lr, betas=betas, weight_decay=weight_decay)
        totals = self._totals.reduce()
        self._forget_gradients()
        if self.skipped_in_a_row > self.config.max_skipped_steps:
            raise RunError(
                f"{self.skipped_in_a_row} optimizer steps in a row had a gradient norm of {norm} "
                "and were skipped, more than "
                f"trainer.max_skipped_steps={self.config.max_skipped_steps}: lower the learning "
                "rate"
            )
        learned = math.isfinite(norm) and norm > 0 and max(rates.values()) > 0
        own = {
            "trainer/grad_norm": Value(norm),
            "trainer/updates": Value(float(learned), "sum"),
            "trainer/skipped_steps": Value(float(self.skipped_steps), "last"),
            "trainer/weight": Value(weight, "sum"),
            **{f"trainer/{name}": Value(rate, "last") for name, rate in rates.items()},
        }
        return totals | Metrics(own)

    def _step_or_skip(self, norm: float, **overrides: Any) -> None:
        """Step with ``overrides`` in the config's place if the gradient norm is finite; count
        either case.
        """
        if not math.isfinite(norm):
            self.skipped_steps += 1
            self.skipped_in_a_row += 1
            return
        with self._overridden(**overrides):
            self.optimizers.step()
        self._merged.refresh()
        self.schedule.step()
        self.version += 1
        self.skipped_in_a_row = 0

    def shards(self) -> Shards:
        """This rank's live shards of the weights that the policy acts by: adapters are merged into
        them.
        """
        self.require_resident("shards", "model")
        return self._merged.shards()

    def weights_loaded(self) -> None:
        """To be called by whoever has written into the parameters; what was accumulated is of
        others.
        """
        self._forget_gradients()
        self._merged.refresh()

    def _forget_gradients(self) -> None:
        self.optimizers.zero_grad()
        self._weight = 0.0
        self._totals = MetricTotals(self.device, self._batch_group)

    def offload(self) -> None:
        """Move parameters, gradients and optimizer state to host memory; their device memory is
        free.
        """
        reshard(self.model)
        if not self._host["model"].holds:
            self._host["model"].take([*self.model.parameters(), *self._merged.buffers.values()])
        if not self._host["optimizer"].holds:
            gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
            states = [state for each in self.optimizers for state in each.state.values()]
            moments = [value for state in states for value in state.values() if value.dim()]
            self._host["optimizer"].take([*gradients, *moments])

    def onload(self, model: bool = True, optimizer: bool = True) -> None:
        """Bring them back, bit for bit; what was never away stays as it is."""
        for name, wanted in (("model", model), ("optimizer", optimizer)):
            if wanted:
                self._host[name].bring_back()

    def require_resident(self, call: str, *names: str) -> None:
        """Raise RuntimeError if the ``model`` or ``optimizer`` is away, saying that ``call`` needs
        it.
        """
        for name in names:
            if self._host[name].holds:
                raise RuntimeError(f"{call}: the {name} is offloaded; call onload() first")

    def close(self) -> None:
        """Leave the process group."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def _micro_batches(self, batch: Batch) -> Iterator[MicroBatch]:
        """This rank's micro-batches, and dummies while another rank has more."""
        cutting = self._cutting()
        planned = plan(batch, cutting)
        count = int(self._over_batch(len(planned), dist.ReduceOp.MAX))
        if count == 0:
            raise ValueError("the batch is empty; give at least one sequence")
        for number in range(count):
            rows = planned[number] if number < len(planned) else []
            yield lay_out(batch, rows, cutting).to(self.device)

    def _cutting(self) -> Cutting:
        inner = self.model.config.first_attention.inner_attention
        one_row = shares_rows(inner)
        blocks = 1 if self.config.float8 is None else 16  # of a float8 product's rows
        multiple = self.dims.cp * math.lcm(2, self.dims.tp, blocks)
        if one_row and self.dims.cp_enabled:
            multiple = math.lcm(multiple, 128 * self.dims.cp)  # flex attention's blocks
        return Cutting(
            sequences=self.config.micro_batch_size,
            tokens=self.config.micro_batch_tokens,
            pack=self.config.packing,
            one_row=one_row,
            multiple_of=multiple,
        )

    def _run(self, micro: MicroBatch, temperature: float) -> dict[str, torch.Tensor]:
        """Return the model's outputs for the micro-batch's tokens, float32 [T]."""
        cells = [micro.tokens, micro.targets, micro.positions]
        masks = attention_masks(self.model, micro.positions)
        if self._sequence is not None:
            cells, masks = self._sequence.shard(*cells, masks=masks)
        tokens, targets, positions = cells
        outputs = self.model(
            tokens, targets, positions=positions, attention_masks=masks, temperature=temperature
        )
        if self._sequence is not None:
            outputs = {name: self._sequence.gather(values) for name, values in outputs.items()}
        return {name: micro.per_token(values) for name, values in outputs.items()}

    def _over_batch(self, value: float, reduction: Any) -> float:
        if self._batch_group is None:
            return value
        total = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(total, reduction, self._batch_group)
        return float(total)

    @contextmanager
    def _overridden(self, **fields: Any) -> Iterator[None]:
        given = {name: value for name, value in fields.items() if value is not None}
        groups = [group for each in self.optimizers for group in each.param_groups]
        before = [{name: group[name] for name in given} for group in groups]
        for group in groups:
            group.update(given)
        yield
        for group, own in zip(groups, before, strict=True):
            group.update(own)


class _Outputs:
    """Per-token values of a batch, put together from its micro-batches."""

    def __init__(self) -> None:
        self._index: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []

    def put(self, micro: MicroBatch, values: dict[str, torch.Tensor]) -> None:
        """Add a micro-batch's tokens; they stay on the device, so that it need not be
        waited for.
        """
        self._index.append(micro.index)
        self._names = list(values)
        self._values.append(torch.stack([*values.values()]))

    def of(self, batch: Batch) -> dict[str, torch.Tensor]:
        """Values [T] in the batch's order."""
        values = torch.zeros(len(self._names), len(batch.tokens))
        values[:, torch.cat(self._index)] = torch.cat(self._values, dim=1).cpu()
        return dict(zip(self._names, values, strict=True))
