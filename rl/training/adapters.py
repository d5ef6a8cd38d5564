"""Adapters of one base model, which take turns on a trainer rank."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn

from rl.compat.titan import initializers, set_lora_scale
from rl.compat.torch_internals import local_tensor
from rl.errors import RunError
from rl.model.host_memory import HostMemory
from rl.training.gradient import optimizer_state
from rl.training.lora import MergedWeights, adapted_weights
from rl.training.sharded_model import adapted_weight, draw, named_adapters, own_part, reshard
from rl.training.token_metrics import StepSums
from rl.training.trainer_config import BASE, AdapterConfig, Source

ADAPTER = "adapter"
"""Name of the config of an adapter in a folder."""

FRESH = {"version": 0, "skipped_steps": 0, "skipped_in_a_row": 0}
"""Attributes of an engine that belong to the adapter in it, and their first values."""


@dataclass(eq=False)
class _Adapter:
    """An adapter. All except for ``config`` and ``memory`` is that of the engine while the adapter
    is in the model.
    """

    config: AdapterConfig | None
    weights: list[torch.Tensor]
    """This rank's parts, in host memory."""
    counts: dict[str, Any] = field(default_factory=lambda: FRESH | {"_sums": StepSums()})
    schedule: dict[str, Any] = field(default_factory=lambda: {"last_epoch": 0})
    gradients: dict[nn.Parameter, torch.Tensor] = field(default_factory=dict)
    moments: list[dict[Any, Any]] = field(default_factory=list)
    """State of each optimizer."""
    memory: HostMemory = field(default_factory=lambda: HostMemory(releases=False))
    """Host memory of gradients and moments."""


class Adapters:
    """Adapters of one base model, with gradients, moments and counts of their own. ::

        adapters.create("a", AdapterConfig(rank=8))
        adapters.use("a")                   # the engine's calls are about it from now on
        with adapters.active_adapter(folder):      # the model has other weights in this block
            engine.forward(batch)

    One adapter is in the model. The others are in host memory. The adapter of ``trainer.lora``
    itself, or the whole policy without adapters, has the name None. An adapter of a smaller rank
    than the model's ends with rows of A and columns of B that are 0; so are A and B of a layer that
    the adapter leaves out. Their gradients are therefore 0, and they stay 0. All ranks must call
    each method together.
    """

    def __init__(self, engine: Any, config: AdapterConfig | None):
        """``engine`` is a :class:`rl.training.engine.TrainingEngine`, and ``config`` the adapter
        that its model was built with, None for a model without.
        """
        self._engine = engine
        self._adapted = adapted_weights(engine.model)
        self._parameters = named_adapters(engine.model)
        self._adapters: dict[Source, _Adapter] = {None: _Adapter(config, [])}
        self.merged = MergedWeights(engine.model)
        self.current: Source = None
        """Name of the adapter in the model."""
        self.worn = config
        """Config of the adapter whose weights the model has."""
        self.storage: Any = None
        """The :class:`rl.training.checkpoint.Checkpointer`, which reads snapshots, and saves that a
        change waits for."""

    @property
    def state(self) -> dict[str, Any]:
        """Live parameters of the adapter that the model has, by name, and with ``ADAPTER`` its
        config.
        """
        weights = {name: parameter.detach() for name, parameter in self._parameters.items()}
        return weights | ({ADAPTER: asdict(self.worn)} if self.worn is not None else {})

    def create(self, name: str, config: AdapterConfig) -> None:
        """Add an adapter that does not change the policy yet, in place of any of this name. A has
        torchtitan's first values for the seed of ``config``, in every layout.
        """
        self.drop(name)
        weights = []
        for parameter_name, parameter in self._parameters.items():
            full = torch.zeros(parameter.shape)
            if ".lora_a." in parameter_name and config.adapts(parameter_name):
                layer, side = self._adapted[adapted_weight(parameter_name)]
                used = full[: config.rank] if full.ndim == 2 else full[..., : config.rank]
                draw(used, initializers(layer.lora_a)[side], f"{config.seed}:{parameter_name}")
            weights.append(own_part(parameter, full).to(parameter.dtype, copy=True))
        moments: list[dict[Any, Any]] = [{} for _ in self._engine.optimizers]
        self._adapters[name] = _Adapter(config, weights, moments=moments)

    def drop(self, name: str) -> None:
        """Forget an adapter, if it exists."""
        if name == self.current:
            self.use(None)
        self._adapters.pop(name, None)

    def use(self, name: Source) -> None:
        """Put the adapter into the model, and the one that is there into host memory, bit for bit.

        Raises RunError if the adapter does not exist.
        """
        if name == self.current:
            return
        wanted = self._known(name)
        engine = self._engine
        engine.require_resident("use", "model", "optimizer")
        self._release_parameters()
        self._put_aside(self._adapters[self.current])
        self.current = name
        self._wear(wanted.weights, wanted.config)
        wanted.memory.bring_back()
        for parameter, gradient in wanted.gradients.items():
            parameter.grad = gradient
        for optimizer, state in zip(engine.optimizers, wanted.moments, strict=True):
            optimizer.state.update(state)
        vars(engine).update(wanted.counts)
        engine.schedule.load_state_dict(wanted.schedule)
        engine.optimizer_loaded()

    def _put_aside(self, adapter: _Adapter) -> None:
        engine = self._engine
        adapter.weights = [weight.to("cpu", copy=True) for weight in self._local()]
        adapter.counts = {name: vars(engine)[name] for name in adapter.counts}
        adapter.schedule = engine.schedule.state_dict()
        parameters = self._parameters.values()
        adapter.gradients = {p: p.grad for p in parameters if p.grad is not None}
        adapter.moments = [dict(optimizer.state) for optimizer in engine.optimizers]
        adapter.memory.take(optimizer_state(engine.model, engine.optimizers))
        engine.reset_optimizer()

    def start_anew(self) -> None:
        """Drop moments, gradients and counts of the adapter in the model. The engine's
        ``optimizer_loaded`` must be called after it.
        """
        engine = self._engine
        engine.reset_optimizer()
        vars(engine).update(FRESH | {"_sums": StepSums()})
        engine.schedule.load_state_dict({"last_epoch": 0})

    @contextmanager
    def active_adapter(self, source: Source) -> Iterator[None]:
        """Give the model the weights of an adapter by its name, of a snapshot by its folder, or of
        the base model, while the block runs. Gradients, moments and counts stay as they are.
        """
        if source == self.current:
            yield
            return
        self._engine.require_resident("active_adapter", "model")
        self._release_parameters()
        active = [weight.clone() for weight in self._local()]
        config = self.worn
        try:
            if isinstance(source, Path):
                self._set(self.storage.load_snapshot(source))
            elif source == BASE:
                self._scale(0.0)
            else:
                adapter = self._known(source)
                self._wear(adapter.weights, adapter.config)
            yield
        finally:
            self._wear(active, config)

    def merge(self, source: Source) -> None:
        """Have ``engine.shards`` return the weights of ``source``: see ``active_adapter``.

        The policy's own, None, follow its steps. An adapter that has a name does not: merge the
        policy before another adapter.
        """
        self.merged.shards()  # which makes room for them
        if source != self.merged.source:
            with self.active_adapter(source):
                self.merged.refresh()
            self.merged.source = source

    def merge_again(self) -> None:
        """Merge the policy's own adapter again after its weights changed."""
        if self.merged.source is None and self.current is None:
            self.merged.refresh()

    def _known(self, name: Source) -> _Adapter:
        if name not in self._adapters:
            raise RunError(f"adapter {name!r} does not exist on this trainer; create it first")
        return self._adapters[name]

    def _local(self) -> list[torch.Tensor]:
        return [local_tensor(parameter).detach() for parameter in self._parameters.values()]

    def _release_parameters(self) -> None:
        """Have the parameters ready for other values."""
        reshard(self._engine.model)  # a call that raised may have left gathered parameters
        if self.storage is not None:
            self.storage.wait_for_staging()

    def _wear(self, weights: Iterable[torch.Tensor], config: AdapterConfig | None) -> None:
        reshard(self._engine.model)
        for parameter, values in zip(self._local(), weights, strict=True):
            parameter.copy_(values)
        self._set(config)

    def _set(self, config: AdapterConfig | None) -> None:
        self.worn = config
        self._scale(1.0 if config is None else config.scale)

    def _scale(self, scale: float) -> None:
        for layer, _ in self._adapted.values():
            set_lora_scale(layer, scale)
