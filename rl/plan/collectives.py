"""Collectives of forward and backward passes: their bytes, and their time at the full rate of the
links.

Rehearsals check the bytes: ``tests/plan/rehearsal``. Collectives of a few numbers, such as that of
the gradient norm, are left out.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from torchtitan.distributed.activation_checkpoint import SelectiveAC

from rl.plan.peak_memory import (
    REDUCED,
    PassSizes,
    feed_forward_width,
    is_divided_expert,
    parameter_groups,
)
from rl.plan.planned_run import PlannedRun
from rl.session.hardware import Device
from rl.training.sharded_model import is_adapter
from rl.types import Place

Axis = Literal["FSDP", "HSDP", "TP", "CP", "EP"]
Kind = Literal["all-gather", "reduce-scatter", "all-reduce", "all-to-all"]

HIDDEN = ("FSDP", "HSDP")
"""Axes whose collectives run beside the computation: FSDP gathers the next layer and reduces the
last one meanwhile."""


@dataclass(frozen=True, slots=True)
class Collective:
    """All collectives of one kind that a rank takes part in for one purpose."""

    axis: Axis
    kind: Kind
    bytes: int
    """Sum of the whole tensors, the parts of all ranks together."""
    seconds: float
    once: bool
    """Whether they happen once in a step, instead of in each micro-batch."""


@dataclass(frozen=True, slots=True)
class Group:
    """Every ``stride``-th rank of a mesh, ``size`` ranks from rank 0 on."""

    size: int
    stride: int

    def seconds(self, kind: Kind, bytes: int, place: Place, device: Device) -> float:
        """Return the time of collectives: that of the slower of the links that they use.

        In rings, the bytes between two nodes go through the adapters of all ranks of a node. In an
        all-to-all, each rank sends its own.
        """
        here = sum(rank < place.per_host for rank in range(0, self.size * self.stride, self.stride))
        others = self.size - here
        if kind == "all-to-all":
            inside = (here - 1) / self.size * bytes
            between = others / self.size * bytes
        else:
            passes = 2 if kind == "all-reduce" else 1
            inside = passes * (self.size - 1) / self.size * bytes
            between = inside / here if others else 0
        return max(inside / device.link_gb_s, between / device.network_gb_s) / 1e9


def collectives_of(run: PlannedRun, name: str, *, train: bool) -> list[Collective]:
    """Return the collectives of role ``name`` in a forward pass, or if ``train`` in the computation
    of gradients, with full micro-batches.
    """
    passes = _Collectives(run, name, train=train)
    planned = [
        *passes.of_weights(),
        *passes.of_hidden_states(),
        *passes.of_rows(),
        *passes.of_experts(),
    ]
    return [collective for collective in planned if collective.bytes]


class _Collectives(PassSizes):
    """Collectives of a role's passes on rank 0. Sizes are in bytes."""

    def __init__(self, run: PlannedRun, name: str, *, train: bool):
        super().__init__(run, name)
        self.place = run.places[name]
        self.device = run.device
        self.train = train
        self.hidden = self.tokens * self.shape.dim * self.p
        """Bytes of the hidden states of a micro-batch."""
        policy = self.trainer.activation_checkpoint if train else None
        self.recomputes = policy is not None
        self.recomputes_results = policy is not None and not isinstance(policy, SelectiveAC.Config)
        """Whether collectives whose results selective checkpointing keeps are repeated."""

    def of_weights(self) -> Iterator[Collective]:
        """Yield the collectives of FSDP: those of all weights, without experts that have a mesh of
        their own, and those of these experts.
        """
        yield from self._of_weights(Group(self.shard, self.tp), experts=False)
        if self.ep > 1:
            group = Group(self.shard * self.tp // self.ep, self.ep)
            yield from self._of_weights(group, experts=True)

    def _of_weights(self, group: Group, *, experts: bool) -> Iterator[Collective]:
        def chosen(name: str) -> bool:
            return is_divided_expert(name, self.role) == experts

        sizes = parameter_groups(self.layouts, self.role, chosen)
        trained = sum(sizes.values())
        if self.trainer.lora is not None:
            adapters = parameter_groups(
                self.layouts, self.role, lambda name: chosen(name) and is_adapter(name)
            )
            trained = sum(adapters.values())
        head = sizes.pop("head")
        policy = self.degrees.fsdp_reshard_after_forward
        parts = ((sum(sizes.values()), policy == "never"), (head, policy != "always"))
        for count, stays in parts if group.size > 1 else ():
            # before the forward and the backward pass, unless they stay
            times = 2 if self.train and not stays else 1
            once = stays and not self.train
            yield self._made("FSDP", "all-gather", times * self.p * count, group, once=once)
        if not self.train:
            return
        if group.size > 1:
            yield self._made("FSDP", "reduce-scatter", REDUCED * trained, group)
        replicas = Group(self.degrees.data_parallel_replicate_degree, self.shard * self.tp)
        if replicas.size > 1:
            bytes = REDUCED * trained // group.size
            yield self._made("HSDP", "all-reduce", bytes, replicas, once=True)

    def of_hidden_states(self) -> Iterator[Collective]:
        """Yield the collectives of tensor parallelism."""
        if self.tp == 1:
            return
        group = Group(self.tp, 1)
        layers = self.shape.n_layers * (1 if self.ep > 1 else 2)  # attention, feed-forward layer
        if self.degrees.enable_sequence_parallel:
            gathered = reduced = layers + 1
            if self.recomputes:
                gathered += layers
            if self.recomputes_results:
                reduced += layers
            if self.train:
                frozen = self.trainer.lora is not None  # no gradient of the embedding
                gathered += layers + 1 - frozen
                reduced += layers + 1 - frozen
            yield self._made("TP", "all-gather", gathered * self.hidden, group)
            yield self._made("TP", "reduce-scatter", reduced * self.hidden, group)
        else:
            yield from self._of_whole_hidden_states(group, layers)
        sums = 16 * self.tokens  # of the head's softmax
        yield self._made("TP", "all-reduce", sums, group)

    def _of_whole_hidden_states(self, group: Group, layers: int) -> Iterator[Collective]:
        """Yield the collectives of tensor parallelism without sequence parallelism.

        In the backward pass DTensor chooses them by size; these are its choices for two ranks.
        """
        reduced = layers + 1 + (layers if self.recomputes_results else 0)
        if self.train:
            width = self.shape.n_heads * self.shape.head_dim
            inner = feed_forward_width(self.shape)
            weights = self.p * self.shape.dim * self.shape.n_layers
            tokens = self.hidden // self.shape.dim * self.shape.n_layers
            reduced += self.shape.n_layers + 1
            gathered = tokens * width + weights * (width + inner)
            scattered = tokens * (2 * inner + width) + weights * width
            yield self._made("TP", "all-gather", gathered, group)
            yield self._made("TP", "reduce-scatter", scattered, group)
        yield self._made("TP", "all-reduce", reduced * self.hidden, group)

    def of_rows(self) -> Iterator[Collective]:
        """Yield the collectives of context parallelism: each layer gathers keys and values."""
        if self.cp == 1:
            return
        group = Group(self.cp, self.tp)
        width = 2 * self.shape.n_kv_heads * self.shape.head_dim // self.tp
        layers = self.cells * self.p * width * self.shape.n_layers
        outputs = 16 * self.cells
        gathered = (2 if self.recomputes else 1) * layers + outputs
        yield self._made("CP", "all-gather", gathered, group)
        if self.train:
            yield self._made("CP", "reduce-scatter", layers, group)

    def of_experts(self) -> Iterator[Collective]:
        """Yield the exchange of tokens with the ranks of their experts, and back."""
        if self.ep == 1:
            return
        times = 2 * (1 + self.train + self.recomputes_results)
        bytes = times * self.shape.n_layers * self.shape.experts_per_token * self.hidden // self.tp
        yield self._made("EP", "all-to-all", bytes, Group(self.ep, 1))

    def _made(
        self, axis: Axis, kind: Kind, bytes: int, group: Group, *, once: bool = False
    ) -> Collective:
        seconds = group.seconds(kind, bytes, self.place, self.device)
        return Collective(axis, kind, bytes, seconds, once)
