"""The training engine of one rank: forward, forward_backward, optim_step."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as titan_dist
from torchtitan.tools.utils import get_local_device

from rl.algorithms.loss_results import PerToken, check_loss_result, learning_sequences
from rl.algorithms.tokens import Tokens
from rl.compat.titan import compile_flex_attention
from rl.errors import GradientNotFinite
from rl.host.platform import device_type, trim_heap
from rl.metrics import Metrics, Value
from rl.model.host_memory import HostMemory
from rl.model.parity import Parity
from rl.model.router import give, routers_of
from rl.model.shape import ModelConfig
from rl.model.shards import Shards
from rl.training import gradient, sharded_model
from rl.training.adapters import Adapters
from rl.training.attention import attention_masks, micro_batch_limits
from rl.training.context import SequenceShard
from rl.training.kept_logits import kept_logits
from rl.training.matmul import kernel_in_use
from rl.training.micro_batches import MicroBatch, micro_batches_of, outputs_of
from rl.training.offloaded_optimizers import optimizers_of
from rl.training.routing import Routing
from rl.training.token_metrics import MetricTotals, StepSums, WorkCount, over_ranks
from rl.training.trainer_config import AdapterConfig, TrainerConfig
from rl.types import Batch, Head

Loss = Callable[[Tokens], PerToken]
"""Function of the tokens of weight above 0 of whole sequences. Returns the loss of each token, [C],
and metrics; C may be 0."""


class TrainingEngine:
    """One rank's model, optimizer and schedule, under any layout that torchtitan offers.

    Ranks are those of torch.distributed (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT). All ranks
    must call each method together; ranks of one ``dp_rank`` pass the same part of the batch::

        engine = TrainingEngine(config, model, seed=0, steps=100, folder="run")
        mine = batch.select(batch.shares(engine.dp_degree)[engine.dp_rank])
        outputs, metrics = engine.forward_backward(mine, loss)    # any number of times
        metrics = engine.optim_step()               # divides once, clips, steps, zeroes

    Losses are per token, weighted and summed; ``optim_step`` divides by the weight that all ranks
    accumulated. The gradient does not depend on how the batch is split (C1). No test runs CUDA.
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
        loads: bool = False,
        parity: Parity = "close",
    ):
        """Build the model. With ``loads``, a Checkpointer loads weights before the first use.
        ``parity``: see :class:`rl.session.session_config.SessionConfig`.
        """
        self.config = config
        self.device = get_local_device()
        if device_type() == "cuda":
            torch.cuda.set_device(self.device)
            compile_flex_attention(tune=config.tune_attention)
        world = titan_dist.init_distributed(config.comm, base_folder=folder)
        self.dims = dims = ParallelDims.from_config(config.parallelism, world)
        titan_dist.set_spmd_backend(config.parallelism.spmd_backend)
        self._context = titan_dist.get_spmd_context(parallel_dims=self.dims)
        self.dims.build_mesh()

        self.model = sharded_model.build_model(
            config, model, dims, head=head, seed=seed, folder=folder, loads=loads, parity=parity
        )
        self.matmul = kernel_in_use() if self.device.type == "cpu" else "cuBLAS"
        """Kernel of float32 matrix products."""
        self._gathered = sharded_model.keeps_gathered(config, self.device.type)
        self._routers = routers_of(self.model) if config.router_replay == "generator" else []
        # After the model: its initializers draw more on some ranks than on others.
        titan_dist.set_determinism(self.dims, self.device, config.debug, distinct_seed_mesh_dims=[])
        self.optimizers = optimizers_of(config, self.model)
        self.schedule = config.lr_scheduler.build(optimizers=self.optimizers, training_steps=steps)
        self._hyperparameters = [
            {name: value for name, value in group.items() if name != "params"}
            for group in self._groups
        ]
        self._steps = steps
        self.version = 0
        """Optimizer steps taken: the policy version of the weights."""
        self.skipped_steps = 0
        """Number of steps skipped because of a non-finite gradient, over the whole run."""
        self.skipped_in_a_row = 0
        """Number of steps skipped since the last step that was taken."""
        self._host = {"model": HostMemory(), "optimizer": HostMemory()}

        batch_mesh = self.dims.get_optional_mesh("batch")
        self._batch_group = batch_mesh.get_group() if batch_mesh else None
        self._sums = StepSums()
        adapter = config.lora and AdapterConfig(config.lora.rank, config.lora.alpha)
        self.adapters = Adapters(self, adapter)
        self.work = WorkCount.of(self.model)
        """Operations of ``forward_backward`` on this rank's part of the batches."""
        self.dp_rank = batch_mesh.get_local_rank() if batch_mesh else 0
        """Index of the part of a batch that this rank computes, of ``dp_degree`` parts."""
        self.dp_degree = batch_mesh.size() if batch_mesh else 1
        same_batch = self.dims.cp * self.dims.tp
        self._same_batch = dist.new_subgroups(same_batch)[0] if same_batch > 1 else None
        self.is_leader = dist.get_rank() % same_batch == 0
        """Whether this is the first rank of its data-parallel rank."""
        balancer = config.parallelism.context_parallel_load_balancer
        cp = self.dims.get_optional_mesh("cp")
        self._sequence = None if cp is None else SequenceShard(cp, balancer)
        self._routing = Routing(self.model, config.balance, self._sequence, self._batch_group)

    def from_leader(self, batch: Batch | None) -> Batch:
        """Return the leader's batch on every rank of the same data-parallel rank. The other ranks
        may pass None.
        """
        if self._same_batch is not None:
            boxed = [batch]
            dist.broadcast_object_list(boxed, group=self._same_batch, group_src=0)
            batch = boxed[0]
        assert batch is not None
        return batch

    @torch.no_grad()
    def forward(self, batch: Batch, *, temperature: float = 1.0) -> dict[str, torch.Tensor]:
        """Return ``logprobs`` and ``entropy`` of each token, or a critic's ``values``, float32 [T]
        in the batch's order. ``logprobs`` has the shape of the batch's targets.
        """
        self.require_resident("forward", "model")
        parts = []
        try:
            for micro, _ in self._micro_batches(batch):
                with self._context():
                    parts.append((micro.index, self._run(micro, temperature)))
        except Exception:
            sharded_model.reset_passes(self.model)
            raise
        sharded_model.reshard(self.model)
        trim_heap()
        return outputs_of(batch, parts)

    def forward_backward(
        self, batch: Batch, loss: Loss, *, temperature: float = 1.0, weight: float = 1.0
    ) -> tuple[dict[str, torch.Tensor], Metrics]:
        """Add the gradient of the batch's weighted loss, times ``weight``; may be called several
        times per step.

        ``weight`` does not change the denominator of ``optim_step``. Returns the result of
        ``forward``, in which tokens of weight 0 have log-probs and entropies of 0 (except with
        context parallelism), and metrics reduced over all ranks: ``loss/mean`` is the weighted
        mean. Raises RunError, naming the loss, if the loss does not return a :data:`PerToken`. A
        call that raises discards all gradients since the last step, those of earlier calls
        included.
        """
        self.require_resident("forward_backward", "model", "optimizer")
        try:
            return self._accumulate(batch, loss, temperature, weight)
        except Exception:
            self.model.zero_grad()  # of gathered parameters too
            sharded_model.reset_passes(self.model)
            self._forget_gradients()
            raise

    def _accumulate(
        self, batch: Batch, loss: Loss, temperature: float, weight: float
    ) -> tuple[dict[str, torch.Tensor], Metrics]:
        parts = []
        totals = MetricTotals(self._batch_group)
        learns = torch.ones(len(batch), dtype=torch.bool)
        if self.config.balance.loss_coefficient == 0:  # that loss counts all tokens
            learns = learning_sequences(batch, loss)
        balances = self.config.balance.bias_rate > 0  # by the tokens of all sequences
        skips = self.config.zero_gradient == "skip" and not balances
        totals.add_share(batch, learns, skips=skips)
        for trains in (True,) if skips else (False, True):
            for micro, is_last in self._micro_batches(batch, learns, trains=trains):
                if trains:
                    sharded_model.reduce_over_replicas(self.model, is_last, gathered=self._gathered)
                with self._context(), torch.set_grad_enabled(trains):
                    self._routing.watch()
                    outputs = self._run(micro, temperature)
                    computed = {name: values[micro.loss_index] for name, values in outputs.items()}
                    tokens = Tokens.of(micro.columns | computed, micro.sequence, len(micro.lengths))
                    result = loss(tokens)
                    per_token, metrics = check_loss_result(loss, result, len(micro.loss_index))
                    balance = self._routing.count(micro, self._sums)
                    if trains:
                        (weight * ((per_token * micro.loss_weights).sum() + balance)).backward()
                totals.add(per_token, metrics, micro.loss_weights)
                parts.append((micro.index, {name: v.detach() for name, v in outputs.items()}))
            if self._gathered or not trains:
                sharded_model.reshard(self.model)
        self.work.add(batch.lengths[learns])
        if not skips:
            self.work.add(batch.lengths[~learns], passes=1)
        divisor = batch.loss_weights if batch.denominators is None else batch.denominators
        self._sums.weight += float(divisor.sum(dtype=torch.float64))
        self._sums.metrics.append(totals.reduce())
        return outputs_of(batch, parts), self._sums.metrics[-1]

    @torch.no_grad()
    def optim_step(
        self,
        *,
        denominator: float | None = None,
        lr: float | None = None,
        betas: tuple[float, float] | None = None,
        eps: float | None = None,
        weight_decay: float | None = None,
        max_norm: float | None = None,
        on_gradient: Callable[[Shards], None] | None = None,
    ) -> Metrics:
        """Divide and clip the gradient, take an optimizer step, and zero the gradient.

        ``denominator`` is the weight of the whole batch on all ranks; the default is the
        accumulated weight. With a denominator, a step without accumulated gradients is a step on
        gradients of 0. ``on_gradient`` is called with this rank's shards of the gradient, divided
        and clipped. The other arguments replace the config's values in all parameter groups for
        this step; a ``max_norm`` of infinity does not clip.

        A step adds 1 to ``version``. If the gradient norm is not finite, every rank skips the step
        and discards the gradient. Raises GradientNotFinite if more than
        ``config.max_skipped_steps`` steps in a row are skipped. Raises RuntimeError if the schedule
        has ended, or if no weight was accumulated and no denominator is given.

        Returns metrics of the step, and the metrics of all ``forward_backward`` calls since the
        last step. ``trainer/updates`` is 1 if the gradient norm and a learning rate are above 0, so
        that weights change, and the dtype of the parameters did not round all changes away.
        """
        self.require_resident("optim_step", "model", "optimizer")
        if self.version == self._steps:
            ended = f"the schedule ends after {self._steps} steps; build the engine with more"
            raise RuntimeError(f"optim_step: {ended}")
        weight = denominator
        if weight is None:
            weight = over_ranks(self._batch_group, self._sums.weight, dist.ReduceOp.SUM)
        if weight == 0:
            advice = "call forward_backward with a batch of weight > 0 first"
            raise RuntimeError(f"optim_step: no weight was accumulated; {advice}")
        limit = self.config.training.max_norm if max_norm is None else max_norm
        if all(parameter.grad is None for parameter in self.model.parameters()):
            for parameter in self.model.parameters():
                parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        norm = gradient.divide_and_clip(self.model.parameters(), weight, limit)
        if on_gradient is not None:
            on_gradient(sharded_model.gradient_shards(self.model))
        rates = self.schedule.get_metrics()
        if lr is not None:
            rates = dict.fromkeys(rates, lr)
        moved = True
        routed = self._routing.metrics(self._sums)
        if math.isfinite(norm):
            before = gradient.rounding_elements(self.model)
            overrides = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
            with gradient.overridden(self._groups, overrides):
                self.optimizers.step()
                self._routing.update_biases(self._sums)
            self.adapters.merge_again()
            self.schedule.step()
            self.version += 1
            self.skipped_in_a_row = 0
            moved = gradient.have_changed(before, gradient.rounding_elements(self.model))
        else:
            self.skipped_steps += 1
            self.skipped_in_a_row += 1
        metrics = Metrics.merged(self._sums.metrics) | routed
        self._forget_gradients()
        trim_heap()
        allowed = self.config.max_skipped_steps
        if self.skipped_in_a_row > allowed:
            raise GradientNotFinite(
                f"{self.skipped_in_a_row} optimizer steps in a row had a gradient norm of {norm} "
                f"and were skipped, more than trainer.max_skipped_steps={allowed}: lower the "
                "learning rate"
            )
        learned = math.isfinite(norm) and norm > 0 and max(rates.values()) > 0 and moved
        step_metrics = {
            "trainer/grad_norm": Value(norm),
            "trainer/updates": Value(float(learned), "sum"),
            "trainer/skipped_steps": Value(float(self.skipped_steps), "last"),
            "trainer/weight": Value(weight, "sum"),
            **{f"trainer/{name}": Value(rate, "last") for name, rate in rates.items()},
        }
        return metrics | Metrics(step_metrics)

    def shards(self) -> Shards:
        """Return this rank's live shards of the policy's weights, with its adapter merged in."""
        self.require_resident("shards", "model")
        return self.adapters.merged.shards()

    def trained_shards(self) -> Shards:
        """Return this rank's live shards of the trained parameters: those of adapters, if any."""
        self.require_resident("trained_shards", "model")
        return sharded_model.trained_shards(self.model)

    @property
    def _groups(self) -> list[dict[str, Any]]:
        """Parameter groups of all optimizers."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def optimizer_loaded(self) -> None:
        """Set learning rates and other hyperparameters to those of the config. Must be called after
        loading the state of the optimizer, which contains those of its own run.
        """
        rates = [rate for scheduler in self.schedule.schedulers for rate in scheduler.get_last_lr()]
        for group, values, rate in zip(self._groups, self._hyperparameters, rates, strict=True):
            group.update(values | {"lr": rate})

    def reset_optimizer(self) -> None:
        """Drop the gradients, the moments and the optimizer's own counts of steps."""
        self.optimizers.zero_grad()
        for optimizer in self.optimizers:
            optimizer.state.clear()

    def weights_loaded(self) -> None:
        """Discard accumulated gradients and merge adapters again. Must be called after writing into
        the parameters.
        """
        self._forget_gradients()
        self.adapters.merge_again()

    def _forget_gradients(self) -> None:
        self.optimizers.zero_grad()
        self._sums = StepSums()
        self._routing.forget()

    def offload(self) -> None:
        """Move parameters, gradients and optimizer state to host memory and free their device
        memory.
        """
        sharded_model.reshard(self.model)
        if not self._host["model"].holds:
            merged = self.adapters.merged.buffers.values()
            self._host["model"].take([*self.model.parameters(), *merged])
        if not self._host["optimizer"].holds:
            self._host["optimizer"].take(gradient.optimizer_state(self.model, self.optimizers))

    def onload(self, model: bool = True, optimizer: bool = True) -> None:
        """Move the model and the optimizer state back to the device, bit for bit. Does nothing if
        they are resident.
        """
        for name, wanted in (("model", model), ("optimizer", optimizer)):
            if wanted:
                self._host[name].bring_back()

    def require_resident(self, call: str, *names: str) -> None:
        """Raise RuntimeError, naming ``call``, if one of ``names`` (model, optimizer) is
        offloaded.
        """
        for name in names:
            if self._host[name].holds:
                raise RuntimeError(f"{call}: the {name} is offloaded; call onload() first")

    def close(self) -> None:
        """Leave the process group."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def _micro_batches(
        self, batch: Batch, learns: torch.Tensor | None = None, *, trains: bool = True
    ) -> Iterator[tuple[MicroBatch, bool]]:
        """Yield micro-batches on the device: see :func:`micro_batches_of`."""
        # a context-parallel rank learns its cells on the device, where counting them would wait
        weighted = learns is not None and self._sequence is None
        limits = micro_batch_limits(self.config, self.model.config)
        group = self._batch_group
        cut = micro_batches_of(batch, limits, group, learns, trains=trains, weighted=weighted)
        for micro, is_last in cut:
            yield micro.to(self.device), is_last
        give(self._routers)

    def _run(self, micro: MicroBatch, temperature: float) -> dict[str, torch.Tensor]:
        """Return the model's outputs for the micro-batch's tokens, float32 [T]."""
        cells = [micro.tokens, micro.targets, micro.positions]
        cells += [] if micro.experts is None else [micro.experts]
        masks = attention_masks(self.model, micro.positions, self.config)
        if self._sequence is not None:
            cells, masks = self._sequence.shard(*cells, masks=masks)
        tokens, targets, positions, *experts = cells
        give(self._routers, *experts)
        kept = kept_logits(micro.sampling_mask, self._sequence, self.device)
        inputs = {"positions": positions, "attention_masks": masks, "temperature": temperature}
        outputs = self.model(tokens, targets, cells=micro.heads, kept=kept, **inputs)
        if self._sequence is not None:
            outputs = {name: self._sequence.gather(values) for name, values in outputs.items()}
        return {name: micro.per_token(values) for name, values in outputs.items()}
