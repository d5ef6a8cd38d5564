"""How long a step takes, from the figures of the hardware: a model of three stages, good to a
factor of two or so.

It knows products, attention and bytes that are read; of communication, of the optimizer, of a rank
that waits for another, of the environment and its rewards it knows nothing but what the
efficiencies stand for. Replace these by what ``timing/*`` of a run shows, and compare configs
rather than believe a number.
"""

import math
from dataclasses import dataclass
from functools import cache

from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC

from rl.generation.config import kv_bytes_per_token
from rl.model.qwen3 import parameter_shapes
from rl.model.shape import ModelShape, shape_of
from rl.plan.memory import generator_weights, kv_sequences
from rl.plan.push import Push
from rl.plan.setting import LEARNING, Setting

SELECTIVE = 7 / 6  # of a forward and a backward pass: half of the forward's products are done again
COMPLETION_SHARE = PROMPT_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class Step:
    """Seconds of a step's stages, and of the step."""

    generation: float
    training: float
    push: float
    seconds: float
    trainer_idle: float
    """Shares of a step in which nothing is done."""
    generators_idle: float
    concurrency: int
    """Sequences that a generator decodes at once."""
    tokens: int
    """Tokens of all prompts and completions of a step."""
    tflop: float
    """TFLOP of the policy's gradients."""
    assumptions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Sizes:
    """A model's parameters, as they count for its speed."""

    total: int
    active: int
    """Parameters that a token is multiplied with."""
    experts: int
    """Parameters of all experts together."""


@cache
def sizes_of(shape: ModelShape, *, fuse_qkv: bool) -> Sizes:
    """Return the sizes of a model: a token goes through ``experts_per_token`` of the experts, and
    looks one embedding up.
    """
    shapes = parameter_shapes(shape, fuse_qkv=fuse_qkv)
    total = sum(map(math.prod, shapes.values()))
    experts = sum(math.prod(size) for name, size in shapes.items() if ".inner_experts." in name)
    used = experts * shape.experts_per_token // shape.num_experts if experts else 0
    looked_up = 0 if shape.tie_embeddings else shape.vocab_size * shape.dim
    return Sizes(total, total - experts + used - looked_up, experts)


def step_of(setting: Setting, push: Push) -> Step:
    """Return the estimate of a step."""
    prompt, completion = _lengths(setting)
    tokens = round(setting.sequences * (prompt + completion))
    generation, concurrency = _generation(setting, prompt, completion)
    training = _training(setting, tokens, prompt + completion)
    lockstep = setting.config.rollout.max_staleness == 0
    stages = (generation, training, push.seconds)
    seconds = sum(stages) if lockstep else max(stages)
    return Step(
        *stages,
        seconds=seconds,
        trainer_idle=1 - training / seconds,
        generators_idle=1 - generation / seconds,
        concurrency=concurrency,
        tokens=tokens,
        tflop=_flop(setting, "trainer", tokens, prompt + completion, train=True) / 1e12,
        assumptions=_assumptions(setting, prompt, completion, lockstep=lockstep),
    )


def _lengths(setting: Setting) -> tuple[float, float]:
    """Mean tokens of a prompt and a completion."""
    return (
        setting.config.task.max_prompt_tokens * PROMPT_SHARE,
        setting.config.rollout.max_tokens * COMPLETION_SHARE,
    )


def _flop(setting: Setting, name: str, tokens: float, length: float, *, train: bool) -> float:
    """Return the operations of one pass over so many tokens of sequences of this mean length, by
    all ranks of a role together.
    """
    role = setting.roles[name]
    shape = shape_of(role.model)
    active = sizes_of(shape, fuse_qkv=role.model.fuse_qkv).active
    if role.head == "values":
        active -= shape.vocab_size * shape.dim
    # causal: a token sees half of the others
    attention = 2 * shape.n_layers * shape.n_heads * shape.head_dim * length
    forward = tokens * (2 * active + attention)
    policy = role.trainer.activation_checkpoint
    if not train:
        return forward
    if isinstance(policy, FullAC.Config):
        return 4 * forward
    return 3 * forward * (SELECTIVE if isinstance(policy, SelectiveAC.Config) else 1)


def _training(setting: Setting, tokens: float, length: float) -> float:
    """Forward passes for the batch's columns, then the gradients; meshes on devices of their own
    side by side.
    """
    algorithm = setting.config.algorithm
    hardware = setting.hardware
    asked = {*setting.roles}
    if "trainer" not in algorithm.columns():
        asked.discard("trainer")

    def seconds(name: str, *, train: bool) -> float:
        rate = setting.device.tflops * 1e12 * hardware.training_efficiency
        epochs = algorithm.passes if train else 1
        flop = epochs * _flop(setting, name, tokens, length, train=train)
        return flop / (rate * setting.roles[name].trainer.ranks)

    asking = [seconds(name, train=False) for name in asked]
    learning = [seconds(name, train=True) for name in setting.roles if name in LEARNING]
    if setting.shared:
        return sum(asking) + sum(learning)
    return max(asking, default=0.0) + max(learning)


def _generation(setting: Setting, prompt: float, completion: float) -> tuple[float, int]:
    """Return seconds, and the number of sequences that a generator decodes at once.

    A prompt's tokens are bound by products, once for each group where prefixes are cached. A
    decoding step reads the weights that its sequences need and their keys and values, or is bound
    by products too.
    """
    generator = setting.config.generator
    hardware = setting.hardware
    device = setting.device
    sizes = sizes_of(setting.shape, fuse_qkv=setting.config.model.fuse_qkv)
    tp = generator.tensor_parallel_degree
    requests = math.ceil(setting.sequences / generator.replicas)
    fits = kv_sequences(setting, math.ceil(prompt + completion))
    concurrency = max(1, min(requests, generator.max_running_requests, fits))
    products = 2 * sizes.active / (tp * device.tflops * 1e12 * hardware.training_efficiency)
    sharing = setting.config.rollout.samples_per_prompt if generator.prefix_caching else 1
    prompts = math.ceil(requests / sharing)
    weights = generator_weights(setting)
    if sizes.experts:
        shape = setting.shape
        reached = 1 - (1 - shape.experts_per_token / shape.num_experts) ** concurrency
        weights -= round(sizes.experts / tp * setting.transfer_bytes * (1 - reached))
    cache = concurrency * (prompt + completion / 2) * kv_bytes_per_token(generator, setting.shape)
    reading = (weights + cache) / (device.memory_gb_s * 1e9 * hardware.generation_efficiency)
    steps = max(requests * completion / concurrency, completion)
    return prompts * prompt * products + steps * max(reading, concurrency * products), concurrency


def _assumptions(
    setting: Setting, prompt: float, completion: float, *, lockstep: bool
) -> tuple[str, ...]:
    hardware = setting.hardware
    device = setting.device
    return (
        f"mean prompt {prompt:g} tokens, half of task.max_prompt_tokens; mean completion "
        f"{completion:g}, half of rollout.max_tokens",
        f"a device does {device.tflops:g} TFLOP/s at {hardware.training_efficiency:.0%} "
        "(hardware.training_efficiency), generators too",
        f"decoding reads {device.memory_gb_s:g} GB/s at {hardware.generation_efficiency:.0%} "
        "(hardware.generation_efficiency)",
        "lockstep: stages one after another"
        if lockstep
        else "stages side by side: the longest is the step",
        (
            "no time for collectives, optimizer, rewards, waits for long completions, or moves "
            "between host and device"
        ),
    )
