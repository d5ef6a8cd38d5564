"""Estimates of the memory of forward and backward passes, at the moments when it is largest.

Layouts do not determine this memory. Rehearsals check the estimates for GPUs:
``tests/plan/rehearsal``. They are in bytes, for the longest sequences, without what allocators and
workspaces of kernels need: leave a tenth of a device free.
"""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from torchtitan.distributed.activation_checkpoint import FullAC, MemoryBudgetAC, SelectiveAC

from rl.model.delta_rule import CHUNK
from rl.model.shape import ModelShape, shape_of
from rl.model.shards import Layout
from rl.plan.planned_run import DTYPE_BYTES, LEARNING, PlannedRun
from rl.session.session_config import Role
from rl.training.packing import MicroBatchLimits
from rl.training.sharded_model import keeps_gathered
from rl.training.trainer_config import TrainerConfig

REDUCED = 4
"""Bytes of an element of a gradient while it is reduced."""

BATCH = 512
"""Bytes of a token of a micro-batch: its columns, outputs and loss."""

GIVEN = 10
"""Bytes of a recorded expert: the record, and the id that the router gets."""


INPUT = 12
"""Bytes of a token of an engine step: its id and position."""

ROUTED = 24
"""Bytes of a token's place among those of an expert: its weight, and indices."""


@dataclass(frozen=True, slots=True)
class PeakMemory:
    """Memory of a pass at one moment, by purpose."""

    activations: int
    logits: int
    gathered: int

    @property
    def total(self) -> int:
        """Sum over the purposes."""
        return self.activations + self.logits + self.gathered


class PassSizes:
    """Sizes of the passes of role ``name`` on a rank."""

    def __init__(self, run: PlannedRun, name: str):
        self.role = role = run.roles[name]
        self.trainer = trainer = role.trainer
        self.degrees = degrees = trainer.parallelism
        self.layouts = run.held[name]
        self.shape: ModelShape = shape_of(role.model)
        self.tp = degrees.tensor_parallel_degree
        self.cp = degrees.context_parallel_degree
        self.ep = degrees.expert_parallel_degree
        self.shard = degrees.data_parallel_shard_degree * self.cp
        """Number of ranks among which FSDP divides a parameter."""
        self.p = DTYPE_BYTES[trainer.training.mixed_precision_param]
        """Bytes per element of the dtype of forward passes."""
        self.cells = micro_batch_cells(run, trainer)
        """Number of tokens of a micro-batch on all context-parallel ranks together."""
        self.tokens = self.cells // self.cp


class MemoryOfPasses(PassSizes):
    """Memory of a role's passes on a rank, at each moment at which it may be largest.

    Sizes are in bytes, or numbers of parameters that FSDP gathers together.
    """

    def __init__(self, run: PlannedRun, name: str):
        super().__init__(run, name)
        self.cuda = run.cuda
        self.longest = run.config.longest
        self.values = self.role.head == "values"
        self.learns = name in LEARNING
        self.trains_weights = self.learns and self.trainer.lora is None
        self.width = self.shape.dim // (self.tp if self.degrees.enable_sequence_parallel else 1)
        self.q = self.shape.n_heads * self.shape.head_dim // self.tp
        self.k = self.shape.n_kv_heads * self.shape.head_dim // self.tp
        self.f = feed_forward_width(self.shape) // self.tp
        """Widths of queries, of keys, and of the feed-forward layers on a rank."""
        widths = 14 * (2 * self.shape.delta_key_dim + self.shape.delta_value_dim) + 8 * CHUNK
        self.rule = 4 * self.shape.delta_value_heads * widths // self.tp
        """Bytes per token of float32 results of a delta rule and its gradients: of queries, keys
        and values, and of matrices within a chunk."""
        self.normed = 8 if not self.cuda or self.tp > 1 else 4 if self.shape.norm_offset else self.p
        """Bytes that a norm saves of a number: of its input, or on CPU and for DTensor of a float32
        copy and of the normalized one."""
        self.routed = self.shape.experts_per_token if self.shape.num_experts else 0
        records = GIVEN * (self.trainer.router_replay != "none") * self.routed * self.shape.n_layers
        self.batch = (BATCH + records) * self.cells
        groups = parameter_groups(self.layouts, self.role)
        self.embedding, self.head = groups.pop("embedding"), groups.pop("head")
        self.tied = not self.embedding
        self.layer = max(groups.values())
        keeps = keeps_gathered(self.trainer, "cuda" if run.cuda else "cpu")
        others = self.embedding + sum(groups.values()) - self.layer
        self.kept = self.p * others if keeps else 0
        """Bytes of parameters that stay gathered, without those of the head and one layer."""
        self.alone = 3 * REDUCED * (self.shard == 1)
        """Bytes of an element of a gradient that FSDP divides on a rank without others."""

    def peak(self) -> PeakMemory:
        """Return the moment at which the ranks need the most memory."""
        moments = [self.in_head(), self.in_layer()]
        if self.trains_weights:
            layer = max(3 * self.p + REDUCED, self.alone) * self.layer + self._head_during_layers()
            words = self.head if self.tied else self.embedding
            gradients = 2 if self.tied else 1
            copies = max((1 + gradients) * self.p + REDUCED, self.alone)
            gathered = copies * words + REDUCED * self.layer
            moments += [  # reductions of a layer's gradients, and of those of the embedding
                PeakMemory(self.saved(), 0, layer),
                PeakMemory(self.tokens * self.p * self.width, 0, gathered),
            ]
        most = max(moments, key=lambda moment: moment.total)
        return replace(most, gathered=most.gathered + self.kept)

    def in_head(self) -> PeakMemory:
        """Return the moment at which the head computes gradients, or log-probs."""
        chunk, words = self._chunk()
        if not self.learns:
            copies = 1 if self.tied else 2  # FSDP keeps what it gathered beside the parameters
            hidden = self.tokens * self.p * self.shape.dim + self.batch
            more = self._product(chunk, words) if self.shape.float32_head else 0
            logits = 0 if self.values else 8 * chunk * words + more
            return PeakMemory(hidden, logits, copies * self.p * self.head)
        logits = chunk * words * 8 + self._product(chunk, words)
        if self.trains_weights and not self.values:
            product = self.p * self.head if self.p < 4 else 0
            logits = REDUCED * self.head + max(logits, chunk * words * (4 + self.p) + product)
        gathered = self.p * (self.head + self.layer)
        # of the last norm, and of the head's input and its gradient
        end = self.tokens * (self.normed * self.width + 2 * self.p * self.shape.dim)
        return PeakMemory(self.saved() + end, 0 if self.values else logits, gathered)

    def in_layer(self) -> PeakMemory:
        """Return the moment at which the last layer computes gradients, or activations."""
        if not self.learns:
            copies = 3 if self.ep > 1 else 2  # their group is gathered ahead
            gathered = self.p * (copies * self.layer + self.head)
            return PeakMemory(self.tokens * self._forward() + self.batch, 0, gathered)
        layers = self.saved() + self.tokens * self._temporary()
        policy = self.trainer.activation_checkpoint
        if policy is not None:
            recomputed = self._layer()
            if isinstance(policy, SelectiveAC.Config):
                recomputed -= self._products()
            layers += self.tokens * recomputed
        gathered = 2 * self.p * self.layer + self._head_during_layers()
        if self.trains_weights and not self.routed:
            gathered += self.p * self.shape.hidden_dim * self.shape.dim // self.tp
        return PeakMemory(layers, 0, gathered)

    def _head_during_layers(self) -> int:
        """Return the bytes of the head and of gradients in reduction while layers compute."""
        head = self.p * self.head if self.tied else 0
        if not self.trains_weights:
            return head
        if self.tied:
            return 2 * head + REDUCED * self.layer
        return REDUCED * max(self.head, self.layer)

    def _chunk(self) -> tuple[int, int]:
        words = self.shape.vocab_size // self.tp
        return min(max(1, (self.trainer.logits_mib << 20) // (4 * words)), self.tokens), words

    def _product(self, chunk: int, words: int) -> int:
        """Return the bytes of what logits that are not float32 at once are made of."""
        if not self.shape.float32_head:
            return self.p * chunk * words if self.p < 4 else 0
        return 4 * (self.head + chunk * self.shape.dim) if self.p < 4 and not self.cuda else 0

    def saved(self) -> int:
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
            layer = self._products()
        balances = self.trainer.balance.loss_coefficient > 0
        layer += 4 * self.shape.num_experts * (1 + balances)  # scores, which routing is counted by
        return self.tokens * (self.shape.n_layers * layer + entry) + self.batch

    def _products(self) -> int:
        """Return the bytes per token that selective checkpointing keeps of a layer."""
        experts = 2 * self.routed * self.shape.dim // self.tp
        feed_forward = experts if self.ep > 1 else self.f
        return self.p * (2 * self.shape.dim + 2 * self.q + 2 * self.k + feed_forward)

    def _layer(self) -> int:
        """Return the bytes per token that autograd saves in a layer."""
        p, d, whole = self.p, self.width, self.shape.dim
        count = 4 if self.shape.normalized == "both" else 2
        norms = count * (self.normed * d + 4) + 2 * p * whole
        heads = 4 * self.shape.n_heads // self.tp
        if self.shape.qk_norm:
            norms += self.normed * (self.q + self.k)
            heads += 4 * (self.shape.n_heads + self.shape.n_kv_heads) // self.tp
        # CPU has a dense mask, which each layer casts, and no flex attention
        attention = p * (2 * self.q + 2 * self.k)
        attention += p * self.q + heads + 8 * self.shape.head_dim if self.cuda else p * self.longest
        if self.shape.attention_cap and not self.cuda:  # its scores are kept
            attention += 12 * self.shape.n_heads * self.longest // self.tp
        experts = self.routed * whole * (p + (4 if self.cuda else 8)) // self.tp
        if self.shape.attention_gate:
            attention += 3 * p * self.q
        linear = len(self.shape.layers_with_delta_rule)
        mean = self.shape.n_attentions * attention + linear * _delta_net(self.shape, p) // self.tp
        return norms + mean // self.shape.n_layers + 4 * p * self.f + experts

    def _forward(self) -> int:
        """Return the bytes per token of a layer that saves nothing: while queries are rotated, the
        feed-forward layer multiplies, or the results of experts are combined.
        """
        p, d = self.p, self.width
        cast = 4 if p < 4 else 0
        gathered = p * self.shape.dim if self.tp > 1 else 0
        rotated = (12 + cast + p) * self.q + (cast + 2 * p) * self.k + 8 * self.shape.head_dim
        if self.routed:
            combined = self.routed * self.shape.dim * (4 + cast + 3 * p) // self.tp
            other = 2 * p * d + 8 * self.shape.num_experts + combined
        else:
            other = 3 * p * self.f
        return 2 * p * d + gathered + max(rotated, other, self.rule // 2)

    def _temporary(self) -> int:
        """Return the bytes per token of gradients within a layer: those of experts while their
        results are combined, or those of the feed-forward layer.
        """
        residual = self.p * self.shape.dim
        if self.tp > 1:
            residual *= 2  # also gathered
        whole = self.tp > 1 and not self.degrees.enable_sequence_parallel
        of_feed_forward = (6 if whole else 2) * self.p * self.f
        if self.routed:
            of_feed_forward = 12 * self.routed * self.shape.dim // self.tp
        elif self.trainer.float8 is not None:
            of_feed_forward = 12 * self.f  # float32 before the cast to float8
        return residual + max(self.rule, of_feed_forward)


def micro_batch_cells(run: PlannedRun, trainer: TrainerConfig) -> int:
    """Return the maximum number of tokens, padding included, in a forward pass on a data-parallel
    rank. Every sequence is assumed to have the maximum length, and attention on GPUs to be flex
    attention.
    """
    share = -(-run.config.sequences // trainer.dp_degree) * run.config.longest
    limit = trainer.micro_batch_tokens or trainer.micro_batch_size * run.config.longest
    cells = min(limit, share)
    return MicroBatchLimits.of(trainer, "flex").width(cells) if run.cuda else cells


def feed_forward_width(shape: ModelShape) -> int:
    """Return the total width of the feed-forward layers that a token goes through in a layer."""
    experts = shape.experts_per_token * shape.moe_hidden_dim + shape.shared_expert_dim
    return experts if shape.num_experts else shape.hidden_dim


def _delta_net(shape: ModelShape, p: int) -> int:
    """Return the bytes per token that autograd saves in a gated delta net. The delta rule keeps its
    inputs alone.
    """
    heads = shape.delta_value_heads
    values = heads * shape.delta_value_dim
    return p * (shape.delta_rows + 4 * values) + 12 * values + 20 * heads


def parameter_groups(
    layouts: tuple[Layout, ...], role: Role, chosen: Callable[[str], bool] = bool
) -> dict[str, int]:
    """Return the number of elements of the ``chosen`` parameters that rank 0 has while it computes,
    for each layer, the ``embedding``, and norm and ``head`` together. A tied embedding is the
    head's.
    """
    degrees = role.trainer.parallelism
    replica = role.trainer.ranks // degrees.data_parallel_replicate_degree
    groups = Counter({"embedding": 0, "head": 0})
    for rank, layout in enumerate(layouts[:replica]):
        for name, _, box in layout:
            if not chosen(name):
                continue
            divided = is_divided_expert(name, role)
            degree = degrees.expert_parallel_degree if divided else degrees.tensor_parallel_degree
            if rank % degree == 0:
                groups[_group_of(name)] += box.numel
    if not any(name.startswith("lm_head.") for name, _, _ in layouts[0]):
        groups["head"] += groups.pop("embedding")
        groups["embedding"] = 0
    return groups


def in_parameter_groups(elements: dict[str, int], role: Role) -> Counter[tuple[str, bool]]:
    """Return the sums of ``elements``, by parameter, over the parameters that FSDP reduces
    together: their gradients share a storage.
    """
    tied = not any(name.startswith("lm_head.") for name in elements)
    sums: Counter[tuple[str, bool]] = Counter()
    for name, count in elements.items():
        group = _group_of(name)
        divided = is_divided_expert(name, role)
        sums["head" if tied and group == "embedding" else group, divided] += count
    return sums


def is_divided_expert(name: str, role: Role) -> bool:
    """Return whether the parameter belongs to experts that have a mesh of their own."""
    return role.trainer.parallelism.expert_parallel_degree > 1 and ".inner_experts." in name


def _group_of(name: str) -> str:
    if name.startswith("layers."):
        return ".".join(name.split(".")[:2])
    return "embedding" if name.startswith("tok_embeddings.") else "head"


def rope_tables(run: PlannedRun, role: Role) -> int:
    """Return the bytes of the RoPE tables: cosines and sines in float32 for each layer with
    attention, position, and number of a head that is rotated.
    """
    shape = shape_of(role.model)
    rotated = int(shape.head_dim * shape.rope_share)
    return shape.n_attentions * shape.max_seq_len * 2 * rotated * 4


def delta_step(run: PlannedRun) -> int:
    """Return the bytes of a gated delta net for a token of an engine step: the rows before and in
    the convolution, the gates, and in float32 what the chunks of the delta rule keep.
    """
    shape = run.shape
    if not shape.layers_with_delta_rule:
        return 0
    rows = 5 * shape.delta_rows + shape.delta_value_heads * shape.delta_value_dim
    chunks = 9 * shape.delta_key_dim + 5 * shape.delta_value_dim + 3 * CHUNK
    whole = run.transfer_bytes * rows + 4 * shape.delta_value_heads * chunks
    return whole // run.rl.generator.tensor_parallel_degree


def engine_step(run: PlannedRun) -> int:
    """Return the bytes that an engine step needs on a generator rank: those of a layer for the
    step's tokens, or the logits of sampled tokens with two float32 copies.
    """
    generator = run.rl.generator
    shape = run.shape
    tp = generator.tensor_parallel_degree
    p = run.transfer_bytes
    q = shape.n_heads * shape.head_dim // tp
    k = max(1, shape.n_kv_heads // tp) * shape.head_dim
    attention = p * (q + 2 * k) + (4 * (q + k) + p * q if p < 4 else p * (q + 2 * k))
    if shape.num_experts:  # whose results are combined in float32
        copies = 2 * p + 8 + (p if generator.expert_parallel else 0)
        other = (copies * shape.dim + ROUTED) * shape.experts_per_token
        other += p * shape.dim + 8 * shape.num_experts
    else:
        other = 3 * p * shape.hidden_dim // tp
    norm = 12 * shape.dim + 4 if shape.norm_offset else 0  # three float32 copies, and the scale
    layer = INPUT + 3 * p * shape.dim + max(attention, other, delta_step(run), norm)
    tokens = generator.max_batched_tokens
    sampled = generator.max_running_requests  # the step with which vLLM profiles GPU memory
    if not run.cuda:
        sampled = min(sampled, math.ceil(run.sequences_sampled / generator.replicas))
    logits = sampled * shape.vocab_size * (p + 8)
    if shape.float32_head and p < 4:
        copies = 0 if run.cuda else 4 * shape.dim * (shape.vocab_size // tp + sampled)
        logits = sampled * shape.vocab_size * 12 + copies
    return max(tokens * layer, tokens * p * shape.dim + logits)
