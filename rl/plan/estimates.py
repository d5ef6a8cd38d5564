"""Memory that no layout tells: what a forward and a backward pass leave on a device. Estimates, all
in bytes.

Activations are what autograd saves in torchtitan's Qwen3, counted tensor by tensor; allocators,
kernels' workspaces and communication buffers come on top, so that a tenth of a device is better
left free.
"""

import math

from torchtitan.distributed.activation_checkpoint import FullAC, MemoryBudgetAC

from rl.model.shape import ModelShape, shape_of
from rl.model.shards import Layout
from rl.plan.setting import DTYPE_BYTES, LEARNING, Setting
from rl.session.config import Role
from rl.training.config import TrainerConfig


def computed_bytes(trainer: TrainerConfig) -> int:
    """Return the bytes of an element of a forward pass."""
    return DTYPE_BYTES[trainer.training.mixed_precision_param]


def micro_batch_cells(setting: Setting, trainer: TrainerConfig) -> int:
    """Most cells of a forward pass on a data-parallel rank, padding included: all sequences are of
    the longest.
    """
    share = -(-setting.sequences // trainer.dp_degree) * setting.longest
    limit = trainer.micro_batch_tokens or trainer.micro_batch_size * setting.longest
    return min(limit, share)


def activations(setting: Setting, name: str) -> int:
    """Return the bytes that autograd saves of one micro-batch on one rank of role ``name``."""
    role = setting.roles[name]
    trainer = role.trainer
    shape = shape_of(role.model)
    p = computed_bytes(role.trainer)
    tokens = micro_batch_cells(setting, trainer) // trainer.parallelism.context_parallel_degree
    row = setting.longest if not setting.cuda else 0  # of the dense mask, which each layer casts
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
    return layers + tokens * shape.dim * (8 + 2 * p)  # the last norm, and what the head gets


def _layer(trainer: TrainerConfig, shape: ModelShape, p: int, row: int) -> tuple[int, int, int]:
    """Per token: all that autograd saves of a layer, its input alone, and what selective
    checkpointing keeps.

    Norms save two float32 tensors, linear layers their inputs, attention queries, keys and values;
    with experts also an int64 index for each element that goes to one.
    """
    tp = trainer.parallelism.tensor_parallel_degree
    d = shape.dim // (tp if trainer.parallelism.enable_sequence_parallel else 1)
    q = shape.n_heads * shape.head_dim // tp
    k = shape.n_kv_heads * shape.head_dim // tp
    routed = shape.experts_per_token if shape.num_experts else 0
    f = _feed_forward_width(shape) // tp
    whole = 16 * d + 8 * (q + k) + p * (2 * d + 2 * q + 2 * k + 4 * f + row) + routed * d * (8 + p)
    return whole, p * d, p * (2 * d + 2 * q + 2 * k + f)


def _feed_forward_width(shape: ModelShape) -> int:
    """Return the width of all feed-forward layers that a token goes through in a layer."""
    if shape.num_experts:
        return shape.experts_per_token * shape.moe_hidden_dim
    return shape.hidden_dim


def logits(setting: Setting, role: Role) -> int:
    """Return the bytes of the logits that exist at once on a rank: as computed, in float32, and
    their exponentials or gradients.
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
    """Return the bytes that FSDP makes whole at once: two layers and the head with its embedding,
    and gradients of the largest of these.

    A gradient is there as computed and in float32, to be reduced; the head's is added up in float32
    as well.
    """
    role = setting.roles[name]
    groups = _groups(setting.held[name], role)
    p = computed_bytes(role.trainer)
    ends = groups.pop("ends")
    layer = max(groups.values())
    parameters = p * (2 * layer + ends)
    learns = name in LEARNING and role.trainer.lora is None
    return parameters + (max(ends * (4 + p + 4), layer * (p + 4)) if learns else 0)


def _groups(layouts: tuple[Layout, ...], role: Role) -> dict[str, int]:
    """Elements of each layer, and of what comes before and after them, as rank 0 has them while it
    computes.
    """
    degrees = role.trainer.parallelism
    alike = role.trainer.ranks // degrees.data_parallel_replicate_degree
    groups: dict[str, int] = {"ends": 0}
    for rank in range(alike):
        for name, _, box in layouts[rank]:
            expert = degrees.expert_parallel_degree > 1 and ".inner_experts." in name
            degree = degrees.expert_parallel_degree if expert else degrees.tensor_parallel_degree
            if rank % degree == 0:
                key = ".".join(name.split(".")[:2]) if name.startswith("layers.") else "ends"
                groups[key] = groups.get(key, 0) + box.numel
    return groups


def rope_tables(setting: Setting, role: Role) -> int:
    """Each layer of a trainer has its own, float32 [max_seq_len, 2 head_dim]."""
    shape = shape_of(role.model)
    return shape.n_layers * shape.max_seq_len * 2 * shape.head_dim * 4


def engine_step(setting: Setting) -> int:
    """Return the bytes of a generator rank's engine step: activations of its tokens, and float32
    logits, thrice.
    """
    generator = setting.config.generator
    shape = setting.shape
    tp = generator.tensor_parallel_degree
    p = setting.transfer_bytes
    wide = 4 * shape.dim + (2 * _feed_forward_width(shape) + shape.n_heads * shape.head_dim) // tp
    tokens = generator.max_batched_tokens
    if not setting.cuda:
        tokens = max(tokens, shape.max_seq_len)
    running = min(generator.max_running_requests, math.ceil(setting.sequences / generator.replicas))
    # a GPU's are measured at the start
    sampled = generator.max_running_requests if setting.cuda else running
    return tokens * wide * p + 3 * 4 * sampled * shape.vocab_size
