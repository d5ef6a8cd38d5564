"""Estimates, in bytes, of the memory of forward and backward passes. Layouts do not determine this
memory.

Activations are the tensors that autograd saves in torchtitan's Qwen3. Allocators, workspaces of
kernels and communication buffers need memory too: leave a tenth of a device free.
"""

import math
from collections import Counter
from collections.abc import Callable

from torchtitan.distributed.activation_checkpoint import FullAC, MemoryBudgetAC

from rl.model.shape import ModelShape, shape_of
from rl.model.shards import Layout
from rl.plan.setting import DTYPE_BYTES, LEARNING, Setting
from rl.session.config import Role
from rl.training.config import TrainerConfig

REDUCED = 4
"""Bytes of an element of a gradient while it is reduced."""


def computed_bytes(trainer: TrainerConfig) -> int:
    """Return the bytes per element of the dtype of forward passes."""
    return DTYPE_BYTES[trainer.training.mixed_precision_param]


def micro_batch_cells(setting: Setting, trainer: TrainerConfig) -> int:
    """Return the maximum number of tokens, padding included, in a forward pass on a data-parallel
    rank. Every sequence is assumed to have the maximum length.
    """
    share = -(-setting.sequences // trainer.dp_degree) * setting.longest
    limit = trainer.micro_batch_tokens or trainer.micro_batch_size * setting.longest
    return min(limit, share)


def activations(setting: Setting, name: str) -> int:
    """Return the bytes that autograd saves for one micro-batch on one rank of role ``name``."""
    role = setting.roles[name]
    trainer = role.trainer
    shape = shape_of(role.model)
    p = computed_bytes(role.trainer)
    tokens = micro_batch_cells(setting, trainer) // trainer.parallelism.context_parallel_degree
    row = 0 if setting.cuda else setting.longest  # each layer casts its dense mask
    whole, entry, kept = (tokens * size for size in _layer(trainer, shape, p, row))
    policy = trainer.activation_checkpoint
    if name not in LEARNING:
        layers = whole
    elif policy is None:
        layers = shape.n_layers * whole
    elif isinstance(policy, FullAC.Config):
        layers = shape.n_layers * entry + whole
    elif isinstance(policy, MemoryBudgetAC.Config):
        layers = round(shape.n_layers * (entry + policy.memory_budget * (whole - entry)) + whole)
    else:
        layers = shape.n_layers * kept + whole
    return layers + tokens * shape.dim * (8 + 2 * p)  # the last norm and the input of the head


def _layer(trainer: TrainerConfig, shape: ModelShape, p: int, row: int) -> tuple[int, int, int]:
    """Return the bytes per token of a layer: all saved tensors, the input alone, and the tensors
    that selective checkpointing keeps.

    Norms save two float32 tensors. Linear layers save their inputs. Attention saves queries, keys
    and values. Experts also save an int64 index for each element that goes to an expert.
    """
    tp = trainer.parallelism.tensor_parallel_degree
    d = shape.dim // (tp if trainer.parallelism.enable_sequence_parallel else 1)
    q = shape.n_heads * shape.head_dim // tp
    k = shape.n_kv_heads * shape.head_dim // tp
    routed = shape.experts_per_token if shape.num_experts else 0
    f = feed_forward_width(shape) // tp
    whole = 16 * d + 8 * (q + k) + p * (2 * d + 2 * q + 2 * k + 4 * f + row) + routed * d * (8 + p)
    return whole, p * d, p * (2 * d + 2 * q + 2 * k + f)


def feed_forward_width(shape: ModelShape) -> int:
    """Return the total width of the feed-forward layers that a token goes through in a layer."""
    experts = shape.experts_per_token * shape.moe_hidden_dim
    return experts if shape.num_experts else shape.hidden_dim


def logits(setting: Setting, role: Role) -> int:
    """Return the bytes of the logits that exist at once on a rank: the logits in the dtype of
    forward passes, in float32, and the exponentials or gradients of the float32 logits.
    """
    if role.head == "values":
        return 0
    trainer = role.trainer
    p = computed_bytes(role.trainer)
    words = shape_of(role.model).vocab_size // trainer.parallelism.tensor_parallel_degree
    chunk = max(1, (trainer.logits_mib << 20) // (4 * words))
    tokens = micro_batch_cells(setting, trainer) // trainer.parallelism.context_parallel_degree
    return min(chunk, tokens) * words * (8 + (p if p < 4 else 0))


def gathered(setting: Setting, name: str) -> int:
    """Return the bytes that FSDP gathers at once: two layers, the head and the embedding, and the
    gradients of a layer or of the head and the embedding, whichever is larger.

    A gradient exists in the dtype of the backward pass and, for the reduction, in float32. The
    gradient of the head is also accumulated in float32.
    """
    role = setting.roles[name]
    found = groups(setting.held[name], role)
    p = computed_bytes(role.trainer)
    ends = found.pop("embedding") + found.pop("head")
    layer = max(found.values())
    parameters = p * (2 * layer + ends)
    if name not in LEARNING or role.trainer.lora is not None:
        return parameters
    return parameters + max(ends * (4 + p + 4), layer * (p + 4))


def groups(
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


def in_groups(elements: dict[str, int], role: Role) -> Counter[tuple[str, bool]]:
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


def rope_tables(setting: Setting, role: Role) -> int:
    """Return the bytes of the RoPE tables: float32 [max_seq_len, 2 head_dim] for each layer."""
    shape = shape_of(role.model)
    return shape.n_layers * shape.max_seq_len * 2 * shape.head_dim * 4


def engine_step(setting: Setting) -> int:
    """Return the bytes that an engine step needs on a generator rank: the activations of the step's
    tokens, and three float32 copies of the logits of sampled tokens.
    """
    generator = setting.rl.generator
    shape = setting.shape
    tp = generator.tensor_parallel_degree
    p = setting.transfer_bytes
    wide = 4 * shape.dim + (2 * feed_forward_width(shape) + shape.n_heads * shape.head_dim) // tp
    tokens = generator.max_batched_tokens
    sampled = generator.max_running_requests  # the step with which vLLM profiles GPU memory
    if not setting.cuda:
        tokens = max(tokens, shape.max_seq_len)
        sampled = min(sampled, math.ceil(setting.sequences_sampled / generator.replicas))
    return tokens * wide * p + 3 * 4 * sampled * shape.vocab_size
