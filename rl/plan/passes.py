"""Estimates of the memory of forward and backward passes on GPUs, at the moments when it is
largest.

Rehearsals check these estimates: ``tests/plan/rehearsal``. They are in bytes, for the longest
sequences, without what allocators lose.
"""

from dataclasses import dataclass

from torchtitan.distributed.activation_checkpoint import FullAC, MemoryBudgetAC

from rl.model.shape import shape_of
from rl.plan import estimates
from rl.plan.estimates import REDUCED
from rl.plan.setting import LEARNING, Setting

BATCH = 512
"""Bytes of a token of a micro-batch: its columns, outputs and loss."""


@dataclass(frozen=True, slots=True)
class Moment:
    """Memory of a pass at one moment, by purpose."""

    activations: int
    logits: int
    gathered: int

    @property
    def total(self) -> int:
        """Sum over the purposes."""
        return self.activations + self.logits + self.gathered


def largest_moment(setting: Setting, name: str) -> Moment:
    """Return the moment of role ``name`` at which its ranks need the most memory."""
    sizes = _Sizes(setting, name)
    found = [sizes.in_head(), sizes.in_layer()]
    if sizes.learns:
        found += [sizes.in_reduction(), sizes.in_embedding()]
    return max(found, key=lambda moment: moment.total)


class _Sizes:
    """Sizes of a role's model on one rank. ``tokens`` are those of a micro-batch; the other sizes
    are per token, in bytes, or numbers of parameters that FSDP gathers together.
    """

    def __init__(self, setting: Setting, name: str):
        role = setting.roles[name]
        self.trainer = trainer = role.trainer
        self.shape = shape = shape_of(role.model)
        self.values = role.head == "values"
        self.learns = name in LEARNING
        self.trains_weights = self.learns and trainer.lora is None
        degrees = trainer.parallelism
        self.tp = degrees.tensor_parallel_degree
        self.divides_experts = degrees.expert_parallel_degree > 1
        self.p = estimates.computed_bytes(trainer)
        self.cells = estimates.micro_batch_cells(setting, trainer)
        self.tokens = self.cells // degrees.context_parallel_degree
        self.width = shape.dim // (self.tp if degrees.enable_sequence_parallel else 1)
        groups = estimates.groups(setting.held[name], role)
        self.embedding, self.head = groups.pop("embedding"), groups.pop("head")
        self.tied = not self.embedding
        self.layer = max(groups.values())

    def in_head(self) -> Moment:
        """Return the moment at which the head computes gradients, or log-probs."""
        chunk, words = self._chunk()
        if not self.learns:
            copies = 1 if self.tied else 2  # FSDP keeps what it gathered beside the parameters
            hidden = self.tokens * self.p * self.shape.dim + BATCH * self.cells
            logits = 0 if self.values else 8 * chunk * words
            return Moment(hidden, logits, copies * self.p * self.head)
        logits = chunk * words * (8 + (self.p if self.p < 4 else 0))
        if self.trains_weights and not self.values:
            product = self.p * self.head if self.p < 4 else 0
            logits = REDUCED * self.head + max(logits, chunk * words * (4 + self.p) + product)
        gathered = self.p * (self.head + self.layer)
        return Moment(self._saved() + self._end(), 0 if self.values else logits, gathered)

    def in_layer(self) -> Moment:
        """Return the moment at which the last layer computes gradients, or activations."""
        if not self.learns:
            copies = 3 if self.divides_experts else 2  # their group is gathered ahead
            gathered = self.p * (copies * self.layer + self.head)
            return Moment(self.tokens * self._forward() + BATCH * self.cells, 0, gathered)
        layers = self._saved() + self.tokens * self._temporary()
        if self.trainer.activation_checkpoint is not None:
            layers += self.tokens * self._layer()
        gathered = 2 * self.p * self.layer + self._head_during_layers()
        if self.trains_weights and not self._routed():
            gathered += self.p * self.shape.hidden_dim * self.shape.dim // self.tp
        return Moment(layers, 0, gathered)

    def in_reduction(self) -> Moment:
        """Return the moment at which the gradients of a layer are reduced."""
        if not self.trains_weights:
            return Moment(0, 0, 0)
        layer = (3 * self.p + REDUCED) * self.layer
        return Moment(self._saved(), 0, layer + self._head_during_layers())

    def in_embedding(self) -> Moment:
        """Return the moment at which the gradients of the embedding are reduced."""
        if not self.trains_weights:
            return Moment(0, 0, 0)
        words = self.head if self.tied else self.embedding
        gradients = 2 if self.tied else 1
        gathered = ((1 + gradients) * self.p + REDUCED) * words + REDUCED * self.layer
        return Moment(self.tokens * self.p * self.width, 0, gathered)

    def _head_during_layers(self) -> int:
        """Return the bytes of the head and of gradients in reduction while layers compute."""
        kept = self.p * self.head if self.tied else 0
        if not self.trains_weights:
            return kept
        if self.tied:
            return 2 * kept + REDUCED * self.layer
        return REDUCED * max(self.head, self.layer)

    def _chunk(self) -> tuple[int, int]:
        words = self.shape.vocab_size // self.tp
        return min(max(1, (self.trainer.logits_mib << 20) // (4 * words)), self.tokens), words

    def _end(self) -> int:
        """Return the bytes of the last norm, and of the head's input and its gradient."""
        return self.tokens * (8 * self.width + 2 * self.p * self.shape.dim)

    def _saved(self) -> int:
        """Return the bytes that all layers save for the backward pass."""
        policy = self.trainer.activation_checkpoint
        entry = self.p * self.width
        whole = self._layer()
        if policy is None:
            layer = whole
        elif isinstance(policy, FullAC.Config):
            layer = entry
        elif isinstance(policy, MemoryBudgetAC.Config):
            layer = round(entry + policy.memory_budget * (whole - entry))
        else:
            layer = self._kept()
        return self.tokens * (self.shape.n_layers * layer + entry) + BATCH * self.cells

    def _attention(self) -> tuple[int, int]:
        """Return the width of queries and of keys on a rank."""
        width = self.shape.head_dim
        return self.shape.n_heads * width // self.tp, self.shape.n_kv_heads * width // self.tp

    def _routed(self) -> int:
        return self.shape.experts_per_token if self.shape.num_experts else 0

    def _layer(self) -> int:
        """Return the bytes per token that autograd saves in a layer."""
        q, k = self._attention()
        p, d, whole = self.p, self.width, self.shape.dim
        f = estimates.feed_forward_width(self.shape) // self.tp
        norms = 16 * d + 2 * p * whole + 8 * (q + k)
        heads = 4 * (2 * self.shape.n_heads + self.shape.n_kv_heads) // self.tp
        attention = p * (3 * q + 2 * k) + heads + 8 * self.shape.head_dim
        experts = self._routed() * whole * (p + 4) // self.tp
        return norms + attention + 4 * p * f + experts

    def _forward(self) -> int:
        """Return the bytes per token of a layer that saves nothing: while queries are rotated, the
        feed-forward layer multiplies, or the results of experts are combined.
        """
        q, k = self._attention()
        p, d = self.p, self.width
        cast = 4 if p < 4 else 0
        gathered = p * self.shape.dim if self.tp > 1 else 0
        rotated = (12 + cast + p) * q + (cast + 2 * p) * k + 8 * self.shape.head_dim
        if routed := self._routed():
            combined = routed * self.shape.dim * (4 + cast + 3 * p) // self.tp
            other = 2 * p * d + 8 * self.shape.num_experts + combined
        else:
            other = 3 * p * estimates.feed_forward_width(self.shape) // self.tp
        return 2 * p * d + gathered + max(rotated, other)

    def _kept(self) -> int:
        """Return the bytes per token of a layer that selective checkpointing keeps."""
        q, k = self._attention()
        f = estimates.feed_forward_width(self.shape) // self.tp
        return self.p * (2 * self.shape.dim + 2 * q + 2 * k + f)

    def _temporary(self) -> int:
        """Return the bytes per token of gradients within a layer: those of experts while their
        results are combined, or those of the feed-forward layer.
        """
        f = estimates.feed_forward_width(self.shape) // self.tp
        residual = self.p * self.shape.dim
        if self.tp > 1:
            residual *= 2  # also gathered
        if self._routed():
            return residual + 12 * self._routed() * self.shape.dim // self.tp
        if self.trainer.float8 is not None:
            return residual + 12 * f  # float32 before the cast to float8
        if self.tp > 1 and not self.trainer.parallelism.enable_sequence_parallel:
            f *= 3
        return residual + 2 * self.p * f
